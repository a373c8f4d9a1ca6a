"""A report of figures that differ from their estimate by more than its stated error."""

from collections.abc import Iterator, Mapping

from memfit.estimators.base.version import __version__
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.figures import TuneFigure
from memfit.probes.result import Point

_EXACT = ("weights", "kv", "ssm", "prefill_kv", "prefill_ssm")


def difference_report(
    sized: SizedModel, point: Point, versions: Mapping[str, str]
) -> tuple[str, ...]:
    """Return lines to paste into an issue, none when every figure is as stated.

    They have no name of a model, a machine or a user, and no path.
    """
    _, percent = sized.runtime_model.basis("workspace", point.workload)
    found = [figure for figure in point.figures if _is_beyond(figure, percent)]
    if not found or point.status != "measured":
        return ()
    return tuple(_lines(sized, point, versions, found))


def versions_line(versions: Mapping[str, str]) -> str:
    """Return what measured, without the machine's name."""
    return (
        f"memfit {__version__}, mlx {versions['mlx']}, mlx-lm {versions['mlx_lm']},"
        f" {versions['backend']}"
    )


def _lines(
    sized: SizedModel, point: Point, versions: Mapping[str, str], found: list[TuneFigure]
) -> Iterator[str]:
    yield versions_line(versions)
    yield (
        f"{sized.model.model_type}, {sized.model.dtype}, {len(sized.model.layers)} layers,"
        f" estimated by {sized.runtime_model.source.method}"
    )
    yield workload_words(point.workload)
    for figure in found:
        yield (
            f"{figure.name}: estimated {figure.estimated_bytes} bytes ({figure.basis}), measured"
            f" {figure.measured_bytes}"
        )


def _is_beyond(figure: TuneFigure, percent: int) -> bool:
    estimated, difference = figure.estimated_bytes, figure.difference_bytes
    if not difference or estimated is None or figure.basis == "bound":
        return False
    if figure.name in _EXACT:
        return True
    return figure.name == "peak" and 100 * abs(difference) > percent * estimated
