"""Words that the views of several results share: sizes, tokens, machines, workloads."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import GIB, KnownDevice, name_as_sold
from memfit.estimators.mlx.versions import MLX_VERSION, format_version
from memfit.estimators.results.advice import ConversionMemory
from memfit.estimators.results.estimate import (
    DeviceSummary,
    Estimate,
    ModelSummary,
    RuntimeSummary,
)
from memfit.estimators.results.terms import Verdict

if TYPE_CHECKING:
    from memfit.estimators.base.images import ImageSize
    from memfit.estimators.results.advice import ImageAdvice
    from memfit.estimators.results.comparison import Comparison
    from memfit.estimators.results.context import ContextPlan
    from memfit.estimators.results.wired import WiredMachine
    from memfit.probes.result import TuneResult


PARTS = {
    "embedding": "embedding",
    "attention": "attention and other token mixers",
    "mlp": "MLP",
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "router": "router",
    "norm": "norms",
    "head": "head",
    "vision": "vision and audio",
    "other": "other",
}


def rows(result: Estimate) -> Iterator[tuple[str, int, str]]:
    """Yield the components of the peak: name, bytes and basis."""
    parts = result.components
    yield "Weights", parts.weights.resident_bytes, parts.weights.basis
    kv_tokens = f"KV cache, {parts.kv.allocated_tokens} tokens"
    yield kv_tokens, parts.kv.bytes, parts.kv.basis
    if parts.ssm.bytes:
        yield "Recurrent state", parts.ssm.bytes, parts.ssm.basis
    workspace = parts.workspace
    error = f" ±{workspace.error_percent} %" if workspace.error_percent else ""
    yield "Workspace", workspace.bytes, f"{workspace.basis}{error}"
    if parts.draft:
        yield "Draft model", parts.draft.bytes, parts.draft.basis


def weight_rows(result: Estimate) -> Iterator[tuple[str, int]]:
    """Yield the non-empty parts of the weights, largest first."""
    weights = result.components.weights
    parts = weights.kept_by_part or weights.by_part
    for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
        if nbytes:
            yield PARTS[name], nbytes
    if weights.kept_by_part:
        yield "with the other experts, on disk", weights.bytes
    elif weights.loaded_bytes != weights.bytes:
        yield "all of these, on disk", weights.bytes
    elif result.memories:
        yield "all of these, on GPU and host", weights.bytes


def title(model: ModelSummary) -> str:
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in model.layers.items())
    return (
        f"{model.model_type}, {_billions(model.parameters)} parameters,"
        f" {model.bits_per_weight:.2f} bits per weight; {kinds}"
    )


def task(result: "Estimate | Comparison | ContextPlan") -> str:
    """The workload and the runtime in one line."""
    work = result.workload
    text = f"{prompt(work)}, prefill step {work.prefill_step}"
    if work.kv_bits:
        text += f", {work.kv_bits}-bit KV cache from token {work.quantized_kv_start}"
    return f"{text}; {result.runtime}"


def prompt(work: Workload) -> str:
    """The tokens and the batch, which are the same for every runtime."""
    text = f"{work.prompt_tokens} prompt tokens"
    if work.cached_tokens:
        text += f", {work.cached_tokens} of them cached"
    if work.images:
        # Before a model is known: each has as many tokens as its processor makes of them.
        known = f"{work.images.tokens} of them of" if work.images.tokens else "and"
        text += f", {known} {work.images}"
    text += f" + {work.max_tokens} generated" if work.max_tokens else ", no reply"
    return f"{text}, batch {work.batch}" if work.batch > 1 else text


def machine(result: "Estimate | Comparison | ContextPlan | TuneResult", units: Units) -> str:
    device = result.device
    if device is None:
        return "no device: add --device m4-max-64 or --memory 32GB for a verdict"
    text = machine_memory(device, units)
    if device.working_set_bytes != device.memory_bytes:
        size = format_limit(device.working_set_bytes, units)
        text += f", working set {size}{on_macos(device)}"
    if device.used_by_others_bytes is not None:
        text += f", {format_bytes(device.used_by_others_bytes, units)} in use by others now"
    return text


def verdict_sentence(verdict: Verdict, exceeded: tuple[str, ...], share: str) -> str:
    if verdict == "fits":
        return f"Fits: {share}."
    if verdict == "tight":
        return f"Tight: {share}; it can be slow or fail."
    if "working_set" in exceeded:
        return f"Does not fit: {share}."
    return f"Does not fit: one allocation is larger than the device allows ({share} in all)."


def percent(part: int, whole: int) -> str:
    """A share in whole percent, rounded up, so that a need never looks smaller."""
    return f"{-(-100 * part // whole)} %"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.1f} M"


def size(nbytes: int, units: Units, *, down: bool = False) -> str:
    """Bytes with one decimal, rounded up so that a need never looks smaller."""
    return f"{tenths(nbytes, units, down=down)} {'GB' if units is Units.GB else 'GiB'}"


def tenths(nbytes: int, units: Units, *, down: bool = False) -> str:
    """The number of `size`."""
    unit = 10**9 if units is Units.GB else 2**30
    count = 10 * nbytes // unit if down else -(-10 * nbytes // unit)
    return f"{count // 10}.{count % 10}"


def conversion_text(conversion: ConversionMemory, units: Units) -> str:
    """What converting takes: memory, and files."""
    read = size(conversion.source_bytes, units)
    files = f"{read} to {'read' if conversion.is_local else 'download'}"
    written = size(conversion.output_bytes, units)
    return f"takes {size(conversion.peak_bytes, units)}: {files}, {written} written"


def gigabytes(memory_bytes: int) -> str:
    """Memory as it is sold: a "GB" of it is a GiB."""
    return f"{memory_bytes // GIB} GB"


def memory(device: DeviceSummary | KnownDevice, units: Units) -> str:
    """A machine's memory, of a Mac as it is sold."""
    if device.backend == "metal" and not device.memory_bytes % GIB:
        return gigabytes(device.memory_bytes)
    return format_limit(device.memory_bytes, units)


def gpu_budget(device: DeviceSummary, units: Units) -> str:
    """What the GPU may use, and under which macOS it is another figure."""
    budget = size(device.working_set_bytes, units, down=True)
    if macos := on_macos(device):
        # Short, so that the first screen keeps its lines: 15 of "macOS 13-15".
        others = (
            f", {tenths(each.working_set_bytes, units, down=True)} on"
            f" {each.macos.replace('-', ' ').split()[-1]}"
            for each in device.by_macos or ()
            if each.working_set_bytes != device.working_set_bytes
        )
        return f"GPU {budget}{macos}{''.join(others)}"
    return f"the GPU may use {budget} of {memory(device, units)}"


def budget_of(device: "DeviceSummary | WiredMachine", units: Units) -> str:
    """A machine with its working set."""
    size = format_limit(device.working_set_bytes, units)
    macos = on_macos(device) if isinstance(device, DeviceSummary) else ""
    return f"{name_as_sold(device.name)}, working set {size}{macos}"


def on_macos(device: DeviceSummary) -> str:
    """Under which macOS a Mac that is only named has its working set; empty of any other machine.

    Where they are alike it is the newest.
    """
    known = device.by_macos or ()
    own = [each.macos for each in known if each.working_set_bytes == device.working_set_bytes]
    return f" on {own[-1]}" if own else ""


def machine_memory(device: DeviceSummary, units: Units) -> str:
    """The machine with its memory, where its name does not have it."""
    name = name_as_sold(device.name)
    return name if name != device.name else f"{name}, {memory(device, units)} of memory"


def tokens(count: int) -> str:
    """Tokens in a few characters, rounded down: 4k is 4096, but 40960 is 40k.

    >>> tokens(131072), tokens(102144), tokens(300)
    ('128k', '99k', '300')
    """
    if count >= 2**20:
        return f"{count // 2**20}M"
    return f"{count // 1024}k" if count >= 1024 else str(count)


def at_step(step: int, usual: int) -> str:
    """The prefill step of a figure, where it is not the usual one.

    >>> at_step(512, 2048), at_step(2048, 2048)
    ('@512', '')
    """
    return "" if step == usual else f"@{step}"


def runtime_text(runtime: RuntimeSummary) -> str:
    """A runtime and its version, and that of MLX where it is not the newest."""
    # The newest MLX is in the notes alone: a line more would not fit the first screen.
    if runtime.mlx_version == format_version(MLX_VERSION):
        return f"{runtime.name} {runtime.version}"
    return str(runtime)


def named(device: DeviceSummary) -> str:
    """The option that names a machine to memfit."""
    if device.source == "detected":
        return "--device host"
    if device.source == "table":
        return f"--device {device.name}"
    if device.name == "Mac with a given working set":
        return f"--working-set {device.working_set_bytes}"
    return f"--memory {gigabytes(device.memory_bytes).replace(' ', '')}"


def image_lines(result: "Estimate | ContextPlan", units: Units) -> tuple[str, ...]:
    """Return the lines of a prompt with images, nothing for one of text."""
    images = result.workload.images
    if not images:
        return ()
    tokens = f"{images}: {images.tokens} of the {result.workload.prompt_tokens} tokens"
    advice = _advice(images.images[0], result.images, units) if result.images else ()
    return (tokens, *advice)


def _advice(first: "ImageSize", advice: "ImageAdvice", units: Units) -> Iterator[str]:
    if advice.largest is None:
        yield "not even a small image fits with this prompt"
    elif advice.any_size:
        yield "an image of any size fits: the model's processor reduces it"
    else:
        yield f"the largest of this shape that fits: {advice.largest}"
    if advice.most:
        many = f"{advice.most} or more" if advice.most == advice.searched else str(advice.most)
        yield f"images of {first.width}x{first.height} that fit together: {many}"
    for each in advice.smaller:
        sides = f"{max(1, first.width // each.divisor)} {max(1, first.height // each.divisor)}"
        yield (
            f"mlx_vlm.generate --resize-shape {sides}: {each.image_tokens} tokens, peak"
            f" {size(each.peak_bytes, units)}"
        )
