"""Whole commands with arguments and files made from a number, and what must be true of each.

Options are taken from the command line itself, so that a new one is fuzzed without a line here.
"""

import csv
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import typer
import yaml
from msgspec import Struct

from memfit.cli.app import app, main
from memfit.cli.command_groups import LazyGroup
from memfit.cli.exits import Exit
from memfit.estimators.base.unfinished import UNFINISHED
from tests.fuzz.workspace import HOSTILE_NAME, Workspace

DOCUMENTED = {Exit.YES, Exit.NO, Exit.INPUT, Exit.UNSUPPORTED, Exit.UNREACHABLE, Exit.MACHINE}
# These may write below these names; every other file must stay as it is.
WRITES = {
    "gate": ("memfit.lock.json", "memfit.yaml"),
    "measurements": ("data/",),
    "cache": ("cache/",),
    "tune": ("data/",),
}
# A training step of a real model is traced; every model of the machine is sized. Both take seconds.
SLOW = {("plan", "train"), ("fits",)}
MARK = "<script>mark</script>"

HOSTILE = (
    *("", "-", "--", "0", "-1", "1", "1e9", "9" * 30, "9" * 5000, "nan", "inf", "0x10", "1k", "."),
    *("10Gb", "10GB", "-1GB", "90%", "1000000%", "\x1b[31mred", "\x9b31m", "a\nb", "\u2028", "é"),
    *("::error::x", "##[stop]", MARK, "|a|", "=1+1", "../../etc/passwd", "/dev/null", "a" * 300),
    *("\udcff", "[bold]", "{}", "%s", "$(id)", "\u202eabc", "😀", "org/name", "hub:org/name@main"),
)
WELL_FORMED = {
    "context": ("1k", "300", "4096", "100000"),
    "tokens": ("1", "300", "2048"),
    "device": ("m4-max-64", "m1-8", "m4-pro-24", "rtx-4090"),
    "memory": ("16GB", "64GB", "24"),
    "runtime": ("mlx-lm", "llama.cpp", "vllm", "mlx-moe", "zinc", "foundry", "mlx-swift-lm"),
    "version": ("0.32.0", "0.31.0"),
    "target": ("chat", "growing", "file", "hub"),
    "cache-type": ("f16", "q8_0", "q4_0"),
    "sweep": ("prefill_step=64,128", "kv_bits=4,8"),
    "matrix": ("quantize=4,8", "context=1k,4k", "device=m1-8,m4-max-64"),
    "quant-mode": ("affine", "mxfp4"),
    "margin": ("5%", "1GB"),
    "--as": ("llama", "qwen3", "gemma3n", "nothing"),
    "ranks": ("2", "3", "8"),
    "split": ("1,1", "20,16"),
    "hosts": ("hosts.json",),
    "fleet": ("fleet.yaml",),
    "config": ("lora.yaml",),
    "traffic": ("traffic.csv", "traffic.jsonl"),
    "requests": ("agents.csv",),
    "profile": ("experts-deepseek-v2-lite.json",),
    "save": ("out.x",),
    "trace": ("trace.json",),
    "--data": ("examples",),
    "--prompts": ("prompts.txt", "@prompts.txt", "a text", "a text " * 60, "@~nobody/a"),
    "--held-out": ("prompts.txt", "a text"),
    "--prompt=": ("@prompts.txt", "a text", "-", "@~nobody/a"),
    "": ("1", "8", "64", "1GB", "50%", "auto", "4k"),
}
MODELS = (
    *("model", "config", "config/config.json", "model.gguf", "qwen3-0.6b.yaml", "model/*"),
    *("deepseek-v2-lite.yaml", "org/name", "hub:org/name@main", "ollama:any", "missing"),
    *(HOSTILE_NAME, "unknown", "hub:org/gguf", "hub:org/gguf:Q8_0"),
)
# tune starts a process for a model that it could run.
NOT_RUN = ("config", "model.gguf", "qwen3-0.6b.yaml", "missing", "adapter", "modelscope:a/b")
OUTPUTS = tuple(f"out.{suffix}" for suffix in ("json", "yaml", "md", "html", "csv", "svg", "xml"))
REPORTS = ("junit", "markdown", "json", "github", "table")
IN_FILES = (b"\xff" * 8, b"\0" * 8, b"1e999", b"NaN", b"{", b"[", b'"', b"\\ud800", b"null", b"-1")


class Case(Struct, frozen=True, kw_only=True):
    """A command: its arguments, and the files that are not as at first (Latin-1 text)."""

    arguments: tuple[str, ...]
    files: Mapping[str, str] = {}


class Outcome(Struct, frozen=True, kw_only=True):
    """What a command did."""

    code: int | None
    """None for an exception."""
    out: str
    err: str
    seconds: float
    changed: Mapping[str, bytes | None] = {}


@cache
def commands() -> tuple[tuple[tuple[str, ...], Any], ...]:
    """Every command with its words, but for the server of ``memfit mcp``: its client asks it."""
    every = _leaves(typer.main.get_command(app), ())
    return tuple(each for each in every if each[0] != ("mcp",))


def _leaves(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group.commands:
        command = group.load(name) if isinstance(group, LazyGroup) else group.commands[name]
        place = (*words, *name.split())
        if hasattr(command, "commands"):
            yield from _leaves(command, place)
        else:
            yield place, command


def make_case(seed: int | bytes, workspace: Workspace) -> Case:
    """Return the case of a seed: the same one for as long as this code and the commands stay."""
    choose = random.Random(seed)
    words, command = choose.choice(commands())
    if words in SLOW and choose.random() < 0.9:
        words, command = choose.choice(commands())
    # What `gate` does without a word is `gate check`.
    arguments = [word for word in words if word != "check" or choose.random() < 0.2]
    for parameter in command.params:
        is_option = parameter.opts[0].startswith("-")
        if not is_option:
            count = choose.choice((1, 1, 2, 3)) if parameter.nargs == -1 else 1
            wanted = parameter.required or choose.random() < 0.6
            arguments += [_argument(choose, words, parameter.name) for _ in range(count * wanted)]
        elif choose.random() < 1.6 / len(command.params):
            arguments += _option(choose, parameter)
    names = choose.choices(workspace.names, k=choose.choice((0, 1, 1, 2)))
    files = {name: _mutated(choose, workspace.content(name)).decode("latin-1") for name in names}
    return Case(arguments=tuple(arguments), files=files)


def _argument(choose: random.Random, words: tuple[str, ...], name: str) -> str:
    if choose.random() < 0.1:
        return choose.choice(HOSTILE)
    if name == "scenario":
        return choose.choice(("wired-server.yaml", "wired-raised-limit.yaml"))
    if name == "file":
        return choose.choice(("one.json", "all.json"))
    if name == "folders":
        return choose.choice((".", "model", "hf", "config"))
    return choose.choice(NOT_RUN if words[0] == "tune" else MODELS)


def _option(choose: random.Random, parameter: Any) -> list[str]:
    name = choose.choice(parameter.opts)
    if getattr(parameter, "is_flag", False):
        return [name]
    # No path in an option: some of them are written.
    hostile = [value for value in HOSTILE if "/" not in value]
    value = choose.choice(hostile if choose.random() < 0.15 else _values(name, parameter))
    return [f"{name}={value}"] if name.startswith("--") else [name, value]


def _values(name: str, parameter: Any) -> tuple[str, ...]:
    if choices := getattr(parameter.type, "choices", None):
        return tuple(map(str, choices))
    if name in ("-o", "--output"):
        return tuple(f"{kind}={kind}.out" for kind in REPORTS) if parameter.multiple else OUTPUTS
    named = next(values for part, values in WELL_FORMED.items() if part in f"{name}=")
    return (*named, "memfit.yaml", "examples") if parameter.type.name == "path" else named


def _mutated(choose: random.Random, content: bytes) -> bytes:
    changed = bytearray(content[:20_000])
    for _ in range(choose.choice((1, 1, 2, 4))):
        start = choose.randrange(len(changed) + 1)
        end = min(len(changed), start + choose.choice((0, 1, 4, 16)))
        kind = choose.randrange(6)
        if kind == 0:
            del changed[start:]
        elif kind == 1:
            changed[start:end] = choose.choice(IN_FILES)
        elif kind == 2:
            changed[start:end] = choose.choice(HOSTILE).encode("utf-8", "surrogateescape")
        elif kind == 3 and changed:
            changed[start % len(changed)] ^= 1 << choose.randrange(8)
        elif kind == 4:
            changed[start:start] = changed[start:end] * choose.choice((2, 50))
        else:
            changed = bytearray(_changed_value(choose, bytes(changed)))
    return bytes(changed) + content[20_000:]


def _changed_value(choose: random.Random, content: bytes) -> bytes:
    """JSON with another value at one place; other content as it is."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return content
    place = values
    while isinstance(place, dict | list) and place:
        key = choose.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or choose.random() < 0.2:
            place[key] = choose.choice((None, True, -1, 0, 2**63, 1.5, [], {}, *HOSTILE))
            break
        place = place[key]
    return json.dumps(values).encode()


def run(
    case: Case,
    workspace: Workspace,
    *,
    keep: bool = False,
    during: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - has no state
) -> Outcome:
    """Run a command in this process, in the workspace; its changes go away unless they are kept."""
    workspace.put({name: text.encode("latin-1") for name, text in case.files.items()})
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr, os.getcwd()
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    sys.argv = ["memfit", *case.arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"a text"))
    sys.stdout, sys.stderr = streams
    os.chdir(workspace.root)
    started = time.monotonic()
    code, trouble = None, ""
    try:
        with during:
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001 - it is the finding
        trouble = f"{type(error).__name__}: {error}"
    finally:
        seconds = time.monotonic() - started
        sys.argv, sys.stdin, sys.stdout, sys.stderr, folder = before
        os.chdir(folder)
    out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
    changed = workspace.changed()
    (workspace.adopt if keep else workspace.restore)()
    return Outcome(code=code, out=out, err=err + trouble, seconds=seconds, changed=changed)


def faults(case: Case, outcome: Outcome) -> list[str]:
    """Return what is wrong with an outcome; nothing for a good one."""
    found = []
    if outcome.code not in DOCUMENTED:
        found.append(f"exit {outcome.code}: {outcome.err[-300:]}")
    for name, text in (("stdout", outcome.out), ("stderr", outcome.err)):
        if bad := [line for line in text.split("\n") if not line.isprintable()]:
            found.append(f"{name} has control characters: {bad[0]!r}")
        if "Traceback (most recent call last)" in text:
            found.append(f"{name} has a traceback")
    if (
        outcome.code not in (Exit.YES, Exit.NO)
        and not (outcome.out + outcome.err).strip()
        and not outcome.changed
    ):
        found.append("fails without a message")
    if problem := _malformed(_form(case), outcome):
        found.append(problem)
    allowed = (*WRITES.get(case.arguments[0], ()), *_written(case))
    for name in outcome.changed:
        if UNFINISHED in name or not name.startswith(allowed):
            found.append(f"{name} was changed")
    return found


def _written(case: Case) -> tuple[str, ...]:
    """Files that arguments name: one that is written is one of them."""
    values = [
        value
        for argument in case.arguments
        for value in (argument, argument.partition("=")[2], argument.rpartition("=")[2])
    ]
    return tuple(filter(None, values))


def _form(case: Case) -> str:
    """The format of standard output."""
    if any(argument == "-o" or argument.startswith("--output") for argument in case.arguments):
        return ""
    form = "json" if "--json" in case.arguments else ""
    for argument in case.arguments:
        if argument.startswith("--format="):
            form = argument.partition("=")[2]
    return form


def _malformed(form: str, outcome: Outcome) -> str:
    # Errors are JSON too; in other formats only a report is.
    if not outcome.out or (form != "json" and outcome.code not in (Exit.YES, Exit.NO)):
        return ""
    parsers: dict[str, Callable[[str], object]] = {
        "json": json.loads,
        "yaml": yaml.safe_load,
        "junit": ElementTree.fromstring,
        "csv": lambda text: list(csv.reader(io.StringIO(text), strict=True)),
    }
    if form in ("markdown", "html", "svg") and MARK in outcome.out:
        return f"{form} has raw HTML from a file"
    try:
        parsers.get(form, str)(outcome.out)
    except (ValueError, ElementTree.ParseError, yaml.YAMLError, csv.Error) as error:
        return f"not {form}: {error}"
    return ""


def load_case(path: Path) -> Case:
    """Return the case of a file of the regression corpus."""
    return msgspec.json.decode(path.read_bytes(), type=Case)
