"""Time of a followed call of recorded classes: cold, then warm.

Run it from the repository: `python benchmarks/program_speed.py [CLASS ...]`. Milliseconds of
processor time, the least of several rounds; a cold call is the first of its kind in a process.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from memfit.estimators.base.dtypes import Quantization  # noqa: E402
from memfit.estimators.base.workload import Workload  # noqa: E402
from memfit.estimators.machine.devices import find_device  # noqa: E402
from memfit.estimators.mlx.call_plan import planned_calls  # noqa: E402
from memfit.estimators.mlx.versions import MlxVersions  # noqa: E402
from memfit.estimators.programs.library import find, recorded_model  # noqa: E402
from memfit.estimators.programs.run import Programs  # noqa: E402
from memfit.estimators.runtimes.by_class import trace_target  # noqa: E402
from tests.recording.configs import CONFIGS  # noqa: E402

WORKLOADS = (
    Workload(prompt_tokens=9000, max_tokens=100),
    Workload(prompt_tokens=4098, max_tokens=256, prefill_step=1024),
    Workload(prompt_tokens=33000, max_tokens=600),
    Workload(prompt_tokens=300, max_tokens=1),
)
PACKINGS = {"bf16": None, "4 bits": Quantization(4, 64)}
ROUNDS = 7


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _row(name: str, packing: str) -> str:
    device, versions = find_device("m4-max-64"), MlxVersions()
    begun = time.process_time()
    recorded = find(CONFIGS[name]["model_type"])
    assert recorded is not None
    read = time.process_time() - begun
    model = recorded_model(recorded, CONFIGS[name])
    packed = PACKINGS[packing]
    sizes, variant = model.packed_sizes(packed), model.variant(packed, device.backend)
    target = trace_target(device, versions)
    programs = Programs(recorded, variant, model.kinds, device, target)
    planned = {workload: planned_calls(workload, versions) for workload in WORKLOADS}

    def followed(workload: Workload) -> Callable[[], Any]:
        return lambda: list(programs.peaks(sizes, workload, planned[workload]))

    cold = sum(_seconds(followed(workload)) for workload in WORKLOADS)
    warm = [min(_seconds(followed(each)) for _ in range(ROUNDS)) for each in WORKLOADS]
    calls = [len(planned[each]) for each in WORKLOADS]
    each_call = " ".join(f"{1e3 * s / n:6.2f}" for s, n in zip(warm, calls, strict=True))
    return (
        f"{name:18} {packing:7} {len(model.kinds):3} layers  read {1e3 * read:5.0f}"
        f"  cold {1e3 * cold:6.0f}  warm call {1e3 * sum(warm) / sum(calls):6.2f} ({each_call})"
    )


def main(names: list[str]) -> None:
    """Print a row for each published size and packing of the named classes, of all by default."""
    for name, config in CONFIGS.items():
        if not names or config["model_type"] in names:
            for packing in PACKINGS:
                print(_row(name, packing), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
