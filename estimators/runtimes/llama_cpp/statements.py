"""What is said of llama.cpp's figures, and the command that they are of."""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import open_limit, open_size
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.facets import (
    Commands,
)
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.llama_cpp.caches import (
    cache_lines,
    cache_types,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.host import host_text
from memfit.estimators.runtimes.llama_cpp.layout import LlamaCppLayout
from memfit.estimators.runtimes.llama_cpp.overrides import as_text
from memfit.estimators.runtimes.llama_cpp.placement import (
    layer_lines,
)
from memfit.estimators.runtimes.llama_cpp.reserved import (
    prediction_note,
    projector_note,
)
from memfit.estimators.runtimes.llama_cpp.settings import LLAMA_CPP


class Stated(LlamaCppLayout, Commands, frozen=True):
    """llama.cpp with its notes, assumptions and command."""

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield whether a Mac has room for what is on its GPU and on its host together."""
        yield from super()._notes(workload, figures)
        if note := projector_note(self._projector_bytes):
            yield note
        predicts = self.is_gguf and self._blocks > len(self.subject.model.layers)
        if predicts and not self.settings.drafted:
            yield prediction_note(recurrent_bytes(self.subject.model, workload.batch))
        wanted = min(workload.prefill_step, workload.batch * workload.total_tokens)
        if wanted > self.settings.batch:
            text = (
                f"llama.cpp computes at most its batch at once, {self.settings.batch} tokens;"
                f" for a micro-batch of {wanted} give -b {wanted} too"
            )
            yield Note("warning", "micro-batch", text)
        device, both = self.subject.device, self.shared_bytes(figures)
        need = self.host_need(figures.host_bytes)
        if need and need.is_undecided:
            text = (
                f"the host has to hold {open_size(need.nbytes)}, and its memory is not"
                " known: --host-memory gives it"
            )
            yield Note("warning", "host-memory", text)
        if device and both > device.memory_bytes:
            text = (
                f"GPU and host share {open_limit(device.memory_bytes)} here; together they"
                f" need {open_size(both)}"
            )
            yield Note("warning", "runtime-budget", text)

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return the command of llama-server (common/arg.cpp); its context is of all sequences."""
        if not self.is_gguf:
            return ()
        types, sequences = cache_types(workload, self.settings.types), workload.batch
        context = sequences * workload.total_tokens
        command = ["llama-server", "-m", model, "-c", str(context), "-np", str(sequences)]
        if self.settings.batch != LLAMA_CPP.batch:
            command += ["-b", str(self.settings.batch)]
        command += ["-ub", str(workload.prefill_step)]
        if types != cache_types(replace(workload, kv_bits=None), None):
            command += ["-ctk", types.keys, "-ctv", types.values]
        if not self.settings.flash:
            command += ["-fa", "off"]
        command += ["--kv-unified"] * self.settings.unified
        command += ["--swa-full"] * self.settings.swa_full
        if tokens := self.settings.drafted:
            command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(tokens)]
        placement = self.placement
        # Without it, --fit moves layers to the host where less than 1 GiB is left (common/fit.cpp).
        if self.host or self.settings.gpu_layers is not None:
            command += ["-ngl", str(placement.gpu_layers)]
        if placement.host_experts:
            command += ["-ncmoe", str(placement.host_experts)]
        if self.settings.overrides:
            command += ["-ot", as_text(self.settings.overrides)]
        command += ["--no-kv-offload"] * (not self.settings.kv_offload)
        command += ["--no-mmproj-offload"] * (not self.settings.projector_offload)
        return (shlex.join(command),)

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        context = self._context(workload)
        if not self.is_gguf:
            yield from super()._assumptions(workload)
        yield (
            f"llama.cpp's context is as long as the workload: {context.room.full} cells for"
            f" {'all' if context.room.unified else 'each'} of {context.room.sequences} sequences,"
            f" keys in {context.types.keys} and values in {context.types.values}"
        )
        yield f"flash attention is {'on' if context.flash else 'off'}; {self._placed()}"
        if self.host and self.is_split:
            yield host_text(self.host)
        yield self._logits(workload)
        basis, percent = self.basis("workspace", workload)
        if basis == "derived":
            yield (
                f"the compute buffers are within {percent} % of those of llama.cpp"
                f" {self.runtime.version}; other builds were not compared"
            )

    def _logits(self, workload: Workload) -> str:
        if self.settings.all_logits:
            return (
                "the compute buffers have room for the logits of a whole micro-batch, as llama.cpp"
                " reserves them for a library; llama-server needs less"
            )
        own = replace(self, runtime=replace(self.settings, all_logits=True))
        all_, few = (each._compute(each._context(workload)).nbytes for each in (own, self))
        return (
            "the compute buffers have room for the logits of one token of each sequence, as"
            f" llama-server reserves them; a library's context takes {open_size(all_ - few)} more"
            f" ({setting('all_logits')})"
        )

    def _placed(self) -> str:
        placement = self.placement
        if not self.is_split:
            return "everything is in one memory"
        text = f"{placement.gpu_layers} of {placement.blocks + 1} layers are on the GPU"
        if self.settings.host_experts:
            text += f", the experts of the first {self.settings.host_experts} on the host"
        if not self.settings.kv_offload:
            text += ", all caches on the host"
        if self.settings.automatic:
            text += ", the most that leave 1 GiB free, as --fit does"
        return f"{text}; the figures are of the GPU's memory"

    def _allocation(self) -> Iterator[str]:
        if not self.is_gguf:
            yield f"llama.cpp: {self.runtime.allocates}"
            yield "llama.cpp loads GGUF files: a conversion's weights will have other sizes"

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        footprint = self.subject.footprint
        where = "those on the GPU, the head's included" if self.is_split else "all"
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} tensors rounded up to 32 bytes, {where}"
            f" = {self.resident_bytes()} bytes"
        )
        room, types, flash, *_ = self._context(workload)
        tokens = workload.total_tokens
        yield from cache_lines(self.subject.model, room, types, tokens, flash=flash)
        if self.is_split:
            yield from layer_lines(self.weights, self.placement, len(self.subject.model.layers))
