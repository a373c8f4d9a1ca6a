"""``memfit runtimes``: the runtimes that memfit knows, and what is wrong in their answers."""

from memfit.cli.options import Json, Output
from memfit.cli.render.output import deliver


def runtimes(json_: Json = False, output: Output = None) -> None:
    """List runtimes, and how each allocates its cache.

    Shows the cache's types and budget too, and the source of each rule.
    """
    from memfit.cli.render.views.runtimes import RuntimesView
    from memfit.estimators.runtimes.registry import list_runtimes

    view = RuntimesView(list_runtimes())
    deliver(view, "json" if json_ else "table", output)
