"""A plan of mlx_lm.server as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import VERDICT_COLOURS, Document, Table, report
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.server import ServerMoment, ServerPlan, ServerSettings

_VERDICTS = {
    "fits": "Fits at the worst moment",
    "tight": "Tight at the worst moment",
    "exceeds": "Does not fit at the worst moment",
    "unknown": "No device to compare with: --device m4-max-64 or --memory 32GB names one",
}


def to_document(result: ServerPlan, units: Units) -> Document:
    """Return the document."""
    return report(
        title=result.model,
        facts=tuple(_facts(result, units)),
        tables=(
            Table(
                ("Worst moment", "Size"),
                tuple(_rows(result.worst, units)),
                align="lr",
                has_total=True,
            ),
        ),
        verdict=_verdict(result, units),
        colour=VERDICT_COLOURS[result.verdict],
        sections=(
            ("Do this", tuple(_advice(result, units))),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        charts=(),
    )


def command(model: str, settings: ServerSettings, kv_bits: int | None) -> str:
    """Return the command line of the server."""
    flags = (
        f"--prefill-step-size {settings.prefill_step}"
        f" --prompt-concurrency {settings.prompt_concurrency}"
        f" --decode-concurrency {settings.decode_concurrency}"
        f" --prompt-cache-size {settings.prompt_cache_size}"
    )
    bits = f" --kv-bits {kv_bits}" if kv_bits else ""
    return f"mlx_lm.server --model {model} {flags}{bits}"


def _facts(result: ServerPlan, units: Units) -> Iterator[str]:
    yield (
        f"{result.clients} requests open at a time; prompts of up to"
        f" {result.longest_prompt_tokens} tokens, {result.longest_generation_tokens} generated"
    )
    if result.device:
        size = format_bytes(result.device.working_set_bytes, units)
        yield f"{result.device.name}, working set {size}"
    yield f"{format_bytes(result.idle_bytes, units)} stay in memory when all requests have ended"


def _rows(moment: ServerMoment, units: Units) -> Iterator[tuple[str, str]]:
    prompts, decoding = moment.prefilled_prompts, moment.decoding_requests
    named = {
        "Weights": moment.weights_bytes,
        f"Caches: {decoding} decoding, {moment.stored_caches} stored": moment.cache_bytes,
        f"Prefill of {prompts} prompt{'s' * (prompts != 1)}": moment.prefill_bytes,
        "Margin": moment.margin_bytes,
        "Peak": moment.peak_bytes,
    }
    for name, nbytes in named.items():
        yield name, format_bytes(nbytes, units)


def _verdict(result: ServerPlan, units: Units) -> str:
    text = _VERDICTS[result.verdict]
    if result.device:
        peak = format_bytes(result.worst.peak_bytes, units)
        text += f": {peak} of {format_bytes(result.device.working_set_bytes, units)}"
    if result.waited:
        share = -(-100 * result.waited // result.requests)
        text += f"; {share} % of {result.requests} requests wait for a place"
    return text


def _advice(result: ServerPlan, units: Units) -> Iterator[str]:
    if result.fitting and result.fitting_worst:
        yield command(result.model, result.fitting, result.kv_bits)
        yield f"takes {format_bytes(result.fitting_worst.peak_bytes, units)} at the worst moment"
    elif result.verdict in ("tight", "exceeds"):
        yield "no flags of the server make it fit: shorten prompts, quantise, or use more memory"
    else:
        yield command(result.model, result.settings, result.kv_bits)
