"""A report of figures that differ from their estimate by more than its stated error."""

from collections.abc import Iterable, Mapping

from memfit.estimators.base.version import __version__
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.figures import TuneFigure
from memfit.probes.result import Point

_EXACT = ("weights", "kv", "ssm", "prefill_kv", "prefill_ssm")


def difference_report(
    sized: SizedModel, point: Point, versions: Mapping[str, str]
) -> tuple[str, ...]:
    """Return lines to paste into an issue, none when every figure is as stated."""
    _, percent = sized.runtime_model.basis("workspace", point.workload)
    found = (
        f"{figure.name}: estimated {figure.estimated_bytes} bytes ({figure.basis}), measured"
        f" {figure.measured_bytes}"
        for figure in point.figures
        if point.status == "measured" and _is_beyond(figure, percent)
    )
    method = f", estimated by {sized.runtime_model.source.method}"
    return report_lines(
        versions, f"{model_line(sized)}{method}", found, workload_words(point.workload)
    )


def report_lines(
    versions: Mapping[str, str], model: str, differences: Iterable[str], workload: str = ""
) -> tuple[str, ...]:
    """Return a report of differences, nothing without any.

    Its lines have no name of a model, a machine or a user, and no path.
    """
    found = tuple(differences)
    ran = (
        f"memfit {__version__}, mlx {versions['mlx']}, mlx-lm {versions['mlx_lm']},"
        f" {versions['backend']}"
    )
    return (ran, model, *([workload] if workload else ()), *found) if found else ()


def model_line(sized: SizedModel) -> str:
    """Return what a model is, without its name."""
    model = sized.model
    return f"{model.model_type}, {model.dtype}, {len(model.layers)} layers"


def _is_beyond(figure: TuneFigure, percent: int) -> bool:
    estimated, difference = figure.estimated_bytes, figure.difference_bytes
    if not difference or estimated is None or figure.basis == "bound":
        return False
    if figure.name in _EXACT:
        return True
    return figure.name == "peak" and 100 * abs(difference) > percent * estimated
