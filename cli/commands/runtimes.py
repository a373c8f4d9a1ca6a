"""``memfit runtimes``: the runtimes that memfit knows, and what is wrong in their answers."""

from typing import Annotated

from memfit.cli.options.groups import Only, PlanOutput, grouped


@grouped
def runtimes(output: Annotated[PlanOutput, Only("json_", "file")]) -> None:
    """List runtimes, and how each allocates its cache.

    Shows the cache's types and budget too, and the source of each rule.
    """
    from msgspec import convert

    from memfit.estimators.runtimes.registry import list_runtimes
    from memfit.estimators.runtimes.runtime import RuntimeTable

    # What all runtimes have, without the settings of one.
    output.write(convert({"runtimes": list_runtimes()}, RuntimeTable, from_attributes=True))
