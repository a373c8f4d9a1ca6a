"""Change one key of a config at a time, and compare the formula with mlx-lm's class.

Run from the checkout with mlx and mlx-lm installed: ``python -m benchmarks.mutations [DIRECTORY]``.
Each key of every config in a directory (JSON, or samples in YAML; by default tests/arch/cases) is
left out, made null, turned round, made larger, halved or shortened. Where both the formula and the
class answer, weights and caches must be equal for a short and a long prompt, or a number is
silently wrong. One mutation takes about 40 ms, all of sample_configs five minutes.
"""

import argparse
import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.local.samples import read_sample
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.weights.derived import derive
from memfit.estimators.weights.quantization_plan import declared

CASES = Path(__file__).parents[1] / "tests" / "arch" / "cases"
WORKLOADS = (
    Workload(prompt_tokens=300, max_tokens=2, prefill_step=256),
    # Longer than most windows.
    Workload(prompt_tokens=9001, max_tokens=2, prefill_step=2048),
)
_LEFT_OUT = object()

Outcome = Literal["equal", "rejected", "different"]


class Mutation(NamedTuple):
    """One case with one key changed."""

    case: str
    path: tuple[str, ...]
    change: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """What was changed, as a line of text."""
        return f"{self.case}: {'.'.join(self.path)} {self.change}"


def main() -> None:
    """Print the mutations with a silent wrong number, and how many of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=CASES)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="take one in N")
    arguments = parser.parse_args()
    outcomes: Counter[Outcome] = Counter()
    every = mutations(arguments.directory, arguments.only)
    for mutation in islice(every, 0, None, arguments.every):
        found = outcome(mutation.config)
        outcomes[found] += 1
        if found == "different":
            print(mutation.name, flush=True)
    print(", ".join(f"{count} {found}" for found, count in outcomes.items()))


def mutations(directory: Path = CASES, only: str = "") -> Iterator[Mutation]:
    """Yield every mutation of every config with ``only`` in its name."""
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".yaml") and only in path.stem:
            is_sample = path.suffix == ".yaml"
            config = dict(read_sample(path).config) if is_sample else json.loads(path.read_text())
            for place, value in _places(config):
                for change, changed in _changes(value):
                    yield Mutation(path.stem, place, change, _with(config, place, changed))


def _places(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for key, value in values.items():
        # Another class is another case; a path is of one module's quantisation.
        if key != "model_type" and "." not in key:
            yield (*above, key), value
        if isinstance(value, dict) and "." not in key:
            yield from _places(value, (*above, key))


def _changes(value: Any) -> Iterator[tuple[str, Any]]:
    yield "left out", _LEFT_OUT
    yield "made null", None
    if isinstance(value, bool):
        yield "turned round", not value
    elif isinstance(value, int):
        yield "doubled", 2 * value
        yield "plus one", value + 1
        yield "halved", value // 2
    elif isinstance(value, list) and value:
        yield "shortened", value[:-1]


def _with(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = changed
    for key in place[:-1]:
        section = section[key]
    if value is _LEFT_OUT:
        del section[place[-1]]
    else:
        section[place[-1]] = value
    return changed


def outcome(config: dict[str, Any]) -> Outcome:
    """Return whether the formula and the class agree on weights, caches and states."""
    try:
        model = build_model(config, "config.json")
        weights = derive(model, declared(config, model, "config.json").plan).loaded_bytes
        derived = [
            (weights, kv_cache(model, each).nbytes, state_bytes(model, each.batch))
            for each in WORKLOADS
        ]
        traced = TracedModel(config, "metal", dtype=model.dtype)
        held = [traced.shapes(workload) for workload in WORKLOADS]
    except MemfitError:
        return "rejected"
    found = [(shapes.weight_bytes, shapes.kv_bytes, shapes.ssm_bytes) for shapes in held]
    return "equal" if derived == found else "different"


if __name__ == "__main__":
    main()
