"""Arguments as people write them: options of other programs, and options that are repeated."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from memfit.estimators.base.errors import InputError

LISTS = ("--device", "--memory")
"""Options that name a machine for each rank, with commas or given again."""
_NAMES = {"model": "MODEL", "as_type": "--as", "flash_attn": "--no-flash-attn"}
_BITS = r"[0-9](-?bits?)?|mxfp[48]|nvfp4"
_LEAVE = "it changes no memory that memfit counts: leave it out"
_SEQUENCES = "sequences at once are --batch, tokens computed at once --prefill-step"
FOREIGN = {
    **dict.fromkeys(("-b", "--batch-size"), _SEQUENCES),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "write --max-tokens"),
    **dict.fromkeys(("-fa",), "flash attention is on; --no-flash-attn turns it off"),
    **dict.fromkeys(("--dtype", "--quantization"), "the config says it: leave it out"),
    "--as": "an architecture is assumed by memfit estimate, compare, plan context, plan server",
    "--hf-file": "write it after the name: org/name:file.gguf",
    "--revision": "write it after the name: org/name@revision",
    **dict.fromkeys(("-cmoe", "--cpu-moe"), "write --n-cpu-moe all"),
    **dict.fromkeys(
        ("-ot", "--override-tensor"),
        "tensors on the host are those of whole layers, or experts: --gpu-layers N, --n-cpu-moe N",
    ),
    **dict.fromkeys(("--n-cpu-moe-draft", "--gpu-layers-draft", "-ngld"), "drafts are on the GPU"),
    **dict.fromkeys(
        (
            *("--host", "--port", "-t", "--threads", "--temp", "--top-p", "--top-k", "--seed"),
            *("--trust-remote-code", "--jinja", "--no-mmap", "--mlock", "--api-key", "--log-level"),
            *("--chat-template", "--served-model-name", "--enable-prefix-caching"),
        ),
        _LEAVE,
    ),
}


def option_name(name: str) -> str:
    """Return the option that gives a setting.

    >>> option_name("kv_bits"), option_name("as_type")
    ('--kv-bits', '--as')
    """
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def with_sequences(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with -np in place of a --parallel that has a number.

    >>> with_sequences(["--parallel", "4", "--parallel=pipeline"])
    ['-np', '4', '--parallel=pipeline']
    """
    words = [part for word in arguments for part in _name_and_value(word)]
    return [
        "-np" if word == "--parallel" and value.isdecimal() else word
        for word, value in pairwise([*words, ""])
    ]


def require_own(arguments: Sequence[str], known: Iterable[str]) -> None:
    """Check that no option of another program is read as letters: -ot does not mean -o t.

    Raises:
        InputError: naming the option, and what to write in its place.
    """
    own = set(known)
    for name in arguments:
        if name in FOREIGN and name not in own and name[:2] in own:
            raise InputError(f"no such option: {name}: {FOREIGN[name]}")


def with_bits(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --quantize in place of a -q that has bits or a format.

    >>> with_bits(["-q", "4", "-q", "model"])
    ['--quantize', '4', '-q', 'model']
    """
    return [
        "--quantize" if word == "-q" and re.fullmatch(_BITS, value) else word
        for word, value in pairwise([*arguments, ""])
    ]


def _name_and_value(word: str) -> Sequence[str]:
    name, _, value = word.partition("=")
    return (name, value) if name == "--parallel" and value.isdecimal() else (word,)


def advice(error: Exception, known: Iterable[str], arguments: Sequence[str]) -> str:
    """Return what to write in place of an option that a command does not have, else nothing."""
    if "--parallel" in getattr(getattr(error, "param", None), "opts", ()):
        return "llama.cpp's number of sequences is -np"
    near: Sequence[str] | None = getattr(error, "possibilities", None)
    if not hasattr(error, "option_name"):
        return ""
    own = set(known)
    # Typer names only the first letter of an option with one dash.
    names = (word.partition("=")[0] for word in arguments)
    if name := next((name for name in names if name in FOREIGN and name not in own), ""):
        return f"{name}: {FOREIGN[name]}"
    return f"nearest: {', '.join(near)}" if near else ""


def with_lists(arguments: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the arguments of a command with the machines of several ranks in one list.

    >>> with_lists(["--memory", "64GB", "-v", "--memory=32GB"], ["--memory", "--ranks"])
    ['--memory', '64GB,32GB', '-v']
    """
    words = list(arguments)
    if "--ranks" not in known:
        return words
    for option in filter(set(known).__contains__, LISTS):
        values, places = [], []
        for place, word in enumerate(words):
            name, sign, value = word.partition("=")
            if name == option and (sign or place + 1 < len(words)):
                values.append(value if sign else words[place + 1])
                places.append(range(place, place + 2 - len(sign)))
        if len(places) > 1:
            gone = {place for span in places for place in span}
            first = places[0].start
            rest = [word for place, word in enumerate(words) if place > first and place not in gone]
            words = [*words[:first], option, ",".join(values), *rest]
    return words


def require_once(given: Iterable[Any]) -> None:
    """Check the options that were given, in their order: only a list may be there more than once.

    A switch without a value may be repeated, which changes nothing.

    Raises:
        InputError: for another one, of which only the last would count.
    """
    for option, times in Counter(given).items():
        is_switch = getattr(option, "is_flag", False) and not option.secondary_opts
        if times > 1 and not (option.multiple or option.nargs == -1 or is_switch):
            names: list[str] = option.opts + option.secondary_opts
            also = f" ({', '.join(names[1:])} is the same option)" if names[1:] else ""
            raise InputError(f"{names[0]} is given {times} times: give it once{also}")
