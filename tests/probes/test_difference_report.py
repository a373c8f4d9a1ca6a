"""Lines to report: only figures beyond their stated error, and nothing that names a user."""

from pathlib import Path

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.difference_report import difference_report
from memfit.probes.figures import estimated_figures, paired_figures
from memfit.probes.result import Point
from tests.checkpoints import Checkpoints

WORKLOAD = Workload(prompt_tokens=64, max_tokens=4)
VERSIONS = {"mlx": "0.32.4", "mlx_lm": "0.32.2", "backend": "cpu", "device": "a name"}


def report(path: Path, name: str, percent: int) -> tuple[str, ...]:
    """The report when one figure is larger than its estimate."""
    sized: SizedModel = size(open_checkpoint(str(path)), device=None)
    estimates = estimated_figures(sized, WORKLOAD)
    measured = {n: [estimate.nbytes] for n, estimate in estimates.items()}
    measured[name] = [estimates[name].nbytes * (100 + percent) // 100]
    figures = paired_figures({**measured, "active": measured["active"]}, estimates)
    point = Point(
        workload=WORKLOAD,
        status="measured",
        reason=None,
        repeats=3,
        estimated_peak_bytes=None,
        peak_bytes=None,
        figures=figures,
        speed=None,
        measurement_id=None,
    )
    assert difference_report(sized, replace(point, status="failed"), VERSIONS) == ()
    return difference_report(sized, point, VERSIONS)


def test_a_peak_within_its_error_is_not_reported(checkpoints: Checkpoints) -> None:
    assert report(checkpoints("no-tokenizer"), "peak", 5) == ()


def test_what_is_beyond_has_versions_settings_and_both_figures(checkpoints: Checkpoints) -> None:
    path = checkpoints("no-tokenizer")
    for name, percent in (("peak", 60), ("kv", 1)):
        lines = report(path, name, percent)
        text = "\n".join(lines)
        assert "mlx 0.32.4, mlx-lm 0.32.2, cpu" in lines[0]
        assert "64 + 4 tokens" in text
        assert f"{name}: estimated " in lines[-1]
        assert not any(word in text for word in (str(path), path.name, "a name"))
