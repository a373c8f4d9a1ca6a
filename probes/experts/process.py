"""A process that runs a model with a part of its experts: the parent's part."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins

from memfit.estimators.base.quantities import Bytes, Count
from memfit.probes.agreement import Agreement
from memfit.probes.experts.prepacked import Manifest
from memfit.probes.experts.runner import ExpertSetup
from memfit.probes.process import ModelProcess


class ExpertLayerInfo(Struct, frozen=True, kw_only=True):
    layer: Count
    experts: Count
    nbytes: Bytes
    """Of all experts."""
    largest_nbytes: Bytes
    """Of the largest stacked tensor."""
    unreadable: str | None
    """A tensor that no single expert can be read from, None when there is none."""


class LayerRouting(Struct, frozen=True, kw_only=True):
    """How often each expert of a layer was used: pairs of an expert and a number."""

    layer: Count
    top_k: Count
    tokens: tuple[tuple[Count, Count], ...]
    prompts: tuple[tuple[Count, Count], ...]


class ExpertProcess(ModelProcess):
    """A context manager around one process with the experts of ``setup``."""

    def __init__(
        self,
        path: Path,
        setup: ExpertSetup,
        *,
        memory_limit_bytes: int | None = None,
        timeout_seconds: float,
    ) -> None:
        super().__init__(
            path, memory_limit_bytes=memory_limit_bytes, timeout_seconds=timeout_seconds
        )
        self._experts = setup

    def prompts(self, texts: Sequence[str]) -> list[int]:
        """Tokenise texts; return the number of tokens of each.

        Raises:
            InputError: when a text is empty, or the model has no tokenizer.
        """
        counts: list[int] = self._call("prompts", texts=texts)
        return counts

    def choose(self, prompt: int) -> None:
        """Run this prompt from now on."""
        self._call("choose", prompt=prompt)

    def layers(self) -> tuple[tuple[ExpertLayerInfo, ...], tuple[str, ...]]:
        """Return the layers with experts of the loaded model, and notes on how it runs."""
        answer = self._call("layers")
        return convert(answer["layers"], tuple[ExpertLayerInfo, ...]), tuple(answer["notes"])

    def routing(self, prompts: Sequence[int], step: int) -> tuple[LayerRouting, ...]:
        """Run prompts, ``step`` tokens at a time; return what the routers chose."""
        return convert(
            self._call("routing", prompts=list(prompts), step=step), tuple[LayerRouting, ...]
        )

    def save_reference(self, file: Path, tokens: int, step: int) -> None:
        """Generate greedily, and save the logits for `agreement`."""
        self._call("agreement", reference=str(file), tokens=tokens, step=step, is_reference=True)

    def agreement(self, file: Path, tokens: int, step: int) -> Agreement:
        """Compare the logits with saved ones, along their tokens."""
        answer = self._call(
            "agreement", reference=str(file), tokens=tokens, step=step, is_reference=False
        )
        return convert(answer, Agreement)

    def pack(self, directory: Path, manifest: Manifest) -> Manifest:
        """Write the loaded weights to a directory; return its manifest with the checksums.

        Raises:
            InputError: when it cannot be written.
            MachineError: when the disk is too full.
        """
        answer = self._call(
            "pack", directory=str(directory.absolute()), manifest=to_builtins(manifest)
        )
        return convert(answer, Manifest)

    def _setup(self) -> dict[str, Any]:
        return {**super()._setup(), "experts": to_builtins(self._experts)}
