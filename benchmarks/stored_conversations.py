"""`memfit tune cache` on four kinds of caches: every figure, planned and measured.

Run it in an environment with memfit, mlx-lm and pytest:
`python benchmarks/stored_conversations.py`, with names of classes for some of them. Prompts have
2,100 tokens. It prints tables that docs/benchmarks.md has, and exits with 1 when the bytes of a
cache, a hit or an eviction are not as planned, or a peak is above its plan.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.checkpoints import Recipe, save_checkpoint  # noqa: E402

COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()")
TOKENS = 2100
# Dense, rotating, hybrid, latent attention; small cases of the tests with more layers.
RECIPES = {
    "qwen3": Recipe("qwen3", changes={"num_hidden_layers": 8}),
    "gemma3_text": Recipe(
        "gemma3_text",
        changes={"num_hidden_layers": 12, "sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "qwen3_next": Recipe("qwen3_next", bits=4, changes={"num_hidden_layers": 8}),
    "deepseek_v2": Recipe("deepseek_v2", bits=4),
}
# Three conversations; the last request of the first is shorter than what is stored of it.
TRACE = """agent,prompt_tokens,completion_tokens
first,2000,8
second,600,8
first,2100,8
third,300,4
third,330,4
second,700,8
third,400,4
first,2050,4
"""
MB = 10**6


def answers(*arguments: str, home: Path) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    environment = {**os.environ, "MEMFIT_HOME": str(home)}
    command = (*COMMAND, *arguments, "--json")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(path: Path, folder: Path) -> dict[str, Any]:
    """Measure one checkpoint, with memory for little more than the longest conversation."""
    trace, home = folder / "trace.csv", folder / "home"
    trace.write_text(TRACE)
    planned = answers(
        *("plan", "offload", str(path), "--tokens", str(TOKENS), "--stored-bits", "4"), home=home
    )
    largest = next(row["stored_bytes"] for row in planned["sizes"] if row["tokens"] == TOKENS)
    return answers(
        *("tune", "cache", str(path), "--prompt-tokens", str(TOKENS), "--agreement", "0"),
        *("--requests", str(trace), "--cache-budget", f"{largest * 5 // 4}B"),
        *("--disk", f"{largest * 3 // 2}B"),
        home=home,
    )


def restores(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Yield a row of Markdown for each number of bits."""
    [conversation] = result["conversations"]
    for file in conversation["stored"]:
        ways = {each["way"]: each for each in file["restores"]}
        peaks = [
            _both(ways[way]["planned_peak_bytes"], ways[way]["peak_bytes"]) if way in ways else ""
            for way in ("as-stored", "freeing", "lazy", "bulk")
        ]
        held = _both(file["planned_held_bytes"], file["held_bytes"])
        yield _row(name, str(file["bits"]), held, _size(file["file_bytes"]), *peaks)


def serving(name: str, result: dict[str, Any]) -> str:
    """Return a row of Markdown with what was found where, and the bytes of the conversations."""
    replay = result["replay"]
    planned, run = replay["planned"], replay["measured"]
    counts = ("hot", "warm", "cold", "new", "prefill_tokens", "saved_tokens")
    sizes = ("largest_hot_bytes", "largest_disk_bytes", "read_bytes", "written_bytes")
    return _row(
        name,
        *(f"{planned[each]}, {run[each]}" for each in counts),
        *(_both(planned[each], run[each]) for each in sizes),
        _both(replay["planned_peak_bytes"], replay["peak_bytes"]),
    )


def faults(result: dict[str, Any]) -> list[str]:
    """Return what is not as planned."""
    replay = result["replay"]
    found = [*result["report"], *replay["differences"]]
    if replay["peak_bytes"] > replay["planned_peak_bytes"]:
        found.append(f"peak while serving: {replay['peak_bytes']}")
    return found


def _both(planned: int | None, value: int | None) -> str:
    if planned is None or value is None:
        return "-"
    if planned == value:
        return f"{_size(value)}, equal"
    return f"{_size(value)}, {100 * (planned - value) / value:+.1f} %".replace("-", "−")


def _size(nbytes: int) -> str:
    return f"{nbytes / MB:.3f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print both tables, and every fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES], help="classes to measure")
    names = parser.parse_args().names or list(RECIPES)
    served, wrong = [], []
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            save_checkpoint(folder / name, RECIPES[name])
            result = measured(folder / name, folder)
        print(*restores(name, result), sep="\n", flush=True)
        served.append(serving(name, result))
        wrong += [f"{name}: {fault}" for fault in faults(result)]
    print(*served, sep="\n")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
