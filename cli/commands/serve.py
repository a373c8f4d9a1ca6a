"""``memfit serve``: mlx_lm.server behind a guard."""

from pathlib import Path

import typer

from memfit.cli.options.groups import VERBOSE, OptionGroup, argument, grouped, option
from memfit.cli.options.questions import NamedModel
from memfit.cli.progress import reporting
from memfit.estimators.base.units import parse_size


class ServeOptions(OptionGroup, frozen=True, kw_only=True):
    """The limit, and the flags of mlx_lm.server."""

    panel = "Server options"
    flags: list[str] | None = argument(
        metavar="[-- FLAGS]", help="More flags of mlx_lm.server, after two dashes."
    )
    limit: int | None = option(
        metavar="SIZE",
        help="Memory that MLX may use; by default this machine's working set less the margin.",
        read=parse_size,
    )
    host: str = option(
        help="The address to listen on; other machines reach 0.0.0.0.", default="127.0.0.1"
    )
    port: int = option(help="The port.", default=8080, min=0, max=65535)
    prefill_step_size: int = option(
        help="Tokens in a prefill chunk, at most.", default=2048, min=1, max=8192
    )
    prompt_concurrency: int = option(help="Prompts prefilled together.", default=8, min=1, max=256)
    decode_concurrency: int = option(
        help="Requests that decode together.", default=32, min=1, max=1024
    )
    prompt_cache_size: int = option(
        help="Caches kept for later requests.", default=10, min=0, max=1024
    )
    max_tokens: int = option(
        help="Tokens of a reply, where a request says none.", default=512, min=1
    )
    max_waiting: int = option(
        help="Requests that may wait; one more is answered with 503.", default=64, min=0
    )
    adapter: Path | None = option(metavar="DIR", help="The directory of a LoRA adapter.")
    verbose: bool = VERBOSE

    @property
    def line(self) -> list[str]:
        """The flags of mlx_lm.server."""
        own = (
            *("host", "port", "prefill_step_size", "prompt_concurrency", "decode_concurrency"),
            *("prompt_cache_size", "max_tokens"),
        )
        flags = [
            part
            for name in own
            for part in (f"--{name.replace('_', '-')}", str(getattr(self, name)))
        ]
        return flags + (["--adapter-path", str(self.adapter)] if self.adapter else [])


@grouped
def serve(model: NamedModel, options: ServeOptions) -> None:
    """Run mlx_lm.server behind a guard that keeps it below a limit.

    A request that does not fit is answered with 413 and the largest prompt that would, one too
    many with 503 and Retry-After; others wait until they fit. SIGTERM and Ctrl-C let open requests
    end. GET /health has the memory. More flags stand after two dashes: -- --temp 0.7.
    """
    from memfit.probes.codeless import codeless_view
    from memfit.probes.download import local_model
    from memfit.probes.serving import require_flags, require_version
    from memfit.probes.serving import serve as served

    flags = options.flags or []
    require_flags(flags)
    require_version()
    with reporting(verbose=options.verbose) as progress:
        _, path = local_model(model.reference(), before_download=None, progress=progress)
    with codeless_view(path) as view:
        code = served(
            view,
            model=str(path),
            limit_bytes=options.limit,
            max_waiting=options.max_waiting,
            flags=[*options.line, *flags],
        )
    raise typer.Exit(code)
