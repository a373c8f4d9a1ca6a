"""Options of commands that run a model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from memfit.cli.options.groups import OptionGroup, option
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units, parse_count, parse_size

Process = TypeVar("Process")


class RunOptions(OptionGroup, frozen=True, kw_only=True):
    """How the model is run."""

    force: bool = option(
        "--force", help="Run even if the estimate says that it does not fit.", default=False
    )
    memory_limit: int | None = option(
        metavar="SIZE", help="Memory that MLX may use, such as 8GB.", read=parse_size
    )
    timeout: int = option(
        metavar="SECONDS", min=1, help="Stop a run without progress after this.", default=600
    )
    sweep: list[str] | None = option(
        metavar="SETTING=V,V",
        help="Values of prefill-step, kv-bits, context or batch; repeat it to measure every"
        " combination.",
    )
    wired: bool = option(
        "--wired", help="Measure again with the recommended wired limit.", default=False
    )
    download: bool = option(
        "--download", help="Download a Hub model that is not cached here.", default=False
    )

    def settings(self, margin_bytes: int, units: Units) -> dict[str, Any]:
        """Return the fields of `RunRequest` but the checkpoint."""
        return {
            "memory_limit_bytes": self.memory_limit,
            "margin_bytes": margin_bytes,
            "force": self.force,
            "units": units,
        }

    def start(self, process: Callable[..., Process], path: Path) -> Callable[..., Process]:
        """Return what starts a measuring process for a model's directory, under these limits."""
        return partial(
            process,
            path,
            memory_limit_bytes=self.memory_limit,
            timeout_seconds=float(self.timeout),
        )


def tokens_to_compare(text: str) -> int:
    """Return a number of tokens, at least 1."""
    tokens = parse_count(text)
    if not tokens:
        raise InputError("generate at least 1 token, to compare it")
    return tokens
