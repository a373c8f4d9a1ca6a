"""``memfit plan growth``: sessions that grow token by token, under the rule of each runtime."""

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import sized_model
from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import AdaptedModel, MachineOptions, RuntimeOptions
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_count, parse_size
from memfit.estimators.questions.target import RuntimeQuestion, named_runtime

if TYPE_CHECKING:
    from memfit.estimators.results.growth import Sessions
    from memfit.estimators.runtimes.runtime import Runtime

_DEFAULT_TOKENS = 32 * 1024


class GrowthOptions(OptionGroup, frozen=True, kw_only=True):
    """Sessions, and the runtimes that serve them."""

    tokens: int | None = option(
        help="Final length of a session without turns (32k).", read=parse_count
    )
    sessions: int = option(help="Sessions at once.", default=1)
    turns: int | None = option(help="Turns of each session.")
    turn_tokens: int | None = option(
        metavar="TOKENS", help="Tokens that a turn adds, question and answer.", read=parse_count
    )
    prefix: int | None = option(
        metavar="TOKENS", help="Tokens that all sessions begin with.", read=parse_count
    )
    context: int | None = option(
        help="Capacity of a contiguous cache; by default the length of a session.", read=parse_count
    )
    runtimes: str = option(
        "--runtimes", "--runtime", metavar="all|A,B", help="Runtimes to show.", default="all"
    )
    budget: int | None = option(
        metavar="SIZE",
        help="Memory for all caches; by default what a runtime may take minus the weights.",
        read=parse_size,
    )
    plot: bool = option("--plot", help="Draw caches over the turns.", default=False)

    def session_lengths(self) -> "Sessions":
        """Return the sessions, each in one turn or in turns after a prefix.

        Raises:
            InputError: when a value cannot be read, or options exclude each other.
        """
        from memfit.estimators.results.growth import Sessions

        return Sessions(sessions=self.sessions, **self._lengths())

    def _lengths(self) -> dict[str, int]:
        start = self.prefix or 0
        if self.turns is None and self.turn_tokens is None:
            end = _DEFAULT_TOKENS if self.tokens is None else self.tokens
            if start >= end:
                raise InputError(f"--prefix {start}: must be below the session's {end} tokens")
            return {"prefix_tokens": start, "turns": 1, "turn_tokens": end - start}
        if self.tokens is not None or self.turns is None or self.turn_tokens is None:
            raise InputError("give --tokens, or --turns with --turn-tokens")
        return {"prefix_tokens": start, "turns": self.turns, "turn_tokens": self.turn_tokens}

    def chosen(self, options: RuntimeQuestion) -> "list[Runtime]":
        """Return the runtimes to show, each with the options that it has.

        Raises:
            InputError: when a name or a value is not known, or none of them has an option.
        """
        from memfit.estimators.runtimes.registry import runtime_names

        names = runtime_names() if self.runtimes == "all" else self.runtimes.split(",")
        runtimes = [options.versioned(named_runtime(name.strip()), strict=False) for name in names]
        with_pool = [runtime for runtime in runtimes if runtime.budget.is_taken] or runtimes[:1]
        share = ("gpu_memory_utilization",)
        return [options.with_settings(one, share) if one in with_pool else one for one in runtimes]


@grouped
def growth(
    model: AdaptedModel,
    options: GrowthOptions,
    machine: MachineOptions,
    runtime: Annotated[
        RuntimeOptions, Only("gpu_memory_utilization", "mlx_version", "mlx_lm_version")
    ],
    output: PlanOutput,
) -> None:
    """For long sessions: what they allocate and copy as they grow.

    Also where they exceed a budget.
    """
    from memfit.estimators.plans.sessions.plan import plan_growth

    sessions, rules = options.session_lengths(), options.chosen(runtime)
    sized = sized_model(model, machine.machine(), runtime, verbose=output.verbose)
    result = plan_growth(
        sized, sessions, rules, budget_bytes=options.budget, context=options.context
    )
    output.write(result, units=output.units, plot=output.draws(options.plot))
    if not result.rules:
        raise typer.Exit(Exit.UNSUPPORTED)
    crossed = all(rule.crossing for rule in result.rules)
    raise typer.Exit(Exit.NO if crossed else Exit.YES)
