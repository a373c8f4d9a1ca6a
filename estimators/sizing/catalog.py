"""The models of one command: each checkpoint is opened once, each conversion sized once."""

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MemfitError, UnsupportedError
from memfit.estimators.base.files import path_near
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.kinds import (
    MTP_TARGETS,
    block_size,
    is_mtp_head,
    prediction_head,
)
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import HUB, has_prefix, open_checkpoint, require_no_sample
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.questions.target import DRAFT_TOKENS, MARGIN_BYTES, Draft
from memfit.estimators.runtimes.facets import HeadDrafting
from memfit.estimators.runtimes.registry import (
    native_runtime,
    offers,
    runtime_for_images,
    with_versions,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import MethodSetting, Recorded, Traced

# Imported where it is used: a checkpoint on the Hub is fetched while the library is imported.
if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter
    from memfit.estimators.sizing.resolved import ResolvedTarget, TargetQuestion
    from memfit.estimators.sizing.sized_model import SizedModel

Made = TypeVar("Made")


class Catalog:
    """Sized models by reference and settings; an error is kept and raised again each time."""

    def __init__(
        self,
        directory: Path | None = None,
        progress: Progress = NULL_PROGRESS,
        versioned: Callable[[Runtime], Runtime] | None = None,
        *,
        guess_hub: bool = True,
    ) -> None:
        """Start empty; a relative reference is first looked up in ``directory``.

        Without ``guess_hub`` only references that begin with ``hub:`` are names on the Hub.
        ``versioned`` sets the versions of a runtime that is not named.
        """
        self._directory, self._guess_hub = directory, guess_hub
        self._versioned = versioned
        self._progress = progress
        self._answers: dict[Hashable, Any] = {}

    def add(self, checkpoint: Checkpoint) -> str:
        """Keep a checkpoint that is already open, and return the reference to it."""
        self._answers[checkpoint.id] = checkpoint
        return checkpoint.id

    def checkpoint(self, reference: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            MemfitError: as `open_checkpoint`.
        """
        return self._once(reference, lambda: self._open(reference))

    def native_runtime(self, reference: str) -> Runtime:
        """Return the runtime that a checkpoint is sized for where none is named.

        Raises:
            MemfitError: as `open_checkpoint` and ``versioned``.
        """
        runtime = native_runtime(self.checkpoint(reference))
        return self._versioned(runtime) if self._versioned else runtime

    def sized(
        self,
        reference: str,
        *,
        quantize: Quantization | None = None,
        device: Device | None = None,
        runtime: Runtime | None = None,
        method: MethodSetting = "auto",
        adapter: Path | None = None,
        draft: Draft | None = None,
        margin_bytes: int = MARGIN_BYTES,
        as_type: str | None = None,
    ) -> "SizedModel":
        """Return a model on a device under a runtime, the checkpoint's native one by default.

        The checkpoint is read and its weights are counted once for each conversion; other devices
        and runtimes reuse them.

        Raises:
            MemfitError: as `open_checkpoint`, `read_adapter`, `size` and `with_runtime`.
        """
        if runtime is None:
            runtime = self.native_runtime(reference)
        from memfit.estimators.sizing.opening import size
        from memfit.estimators.sizing.sized_model import with_runtime

        versions = runtime.versions
        settings = (quantize, method, adapter, draft, margin_bytes, as_type)
        head = self._head(draft, runtime) if draft else None
        # A head is no draft for another runtime.
        conversion = (reference, *settings, versions, *([runtime] if head else []))

        def make() -> "SizedModel":
            sized_by = partial(
                size,
                self.checkpoint(reference),
                device=device,
                margin_bytes=margin_bytes,
                quantize=quantize,
                adapter=self.adapter(adapter) if adapter else None,
                as_type=as_type,
                versions=versions,
            )
            alone = sized_by(method=method)
            if draft is None:
                return alone
            if head:
                return self._with_head(with_runtime(alone, runtime), head, draft)
            # Calls of one model alone are recorded.
            if isinstance(alone.runtime_model.source, Recorded):
                alone = sized_by(method="trace")
            return self._with_draft(alone, draft, method, versions)

        base = self._once(conversion, make)
        placed = self._once(
            (conversion, device), lambda: base if base.device == device else base.on(device)
        )
        return self._once((conversion, device, runtime), lambda: with_runtime(placed, runtime))

    def resolve(
        self,
        question: "TargetQuestion",
        measured: "Callable[[SizedModel, Workload], SizedModel] | None" = None,
    ) -> "ResolvedTarget":
        """Return the model, machine and workload of a question.

        It is resolved once, but with measurements each time: a later one replaces them.

        Raises:
            MemfitError: as `sized_for` and `resolved`.
        """
        from memfit.estimators.sizing.resolved import resolved

        def make() -> "ResolvedTarget":
            return resolved(
                self.sized_for(question),
                question.workload,
                question.ranks,
                keeps_runtime=question.runtime is not None and question.keeps_runtime,
                measured=measured,
            )

        return make() if measured else self._once(question, make)

    def sized_for(self, question: "TargetQuestion") -> "SizedModel":
        """Return the model of a question on its machine, without its workload and ranks.

        Raises:
            MemfitError: as `sized`.
        """
        runtime = question.runtime
        if runtime is None:
            runtime = self.native_runtime(question.reference)
            if question.workload.has_images:
                runtime = runtime_for_images(runtime)
        if not (question.runtime and question.keeps_runtime) and self.drafts_with_head(question):
            runtime = runtime_for_images(runtime)
        return self.sized(
            question.reference,
            quantize=question.quantize,
            device=question.device,
            runtime=with_versions(
                runtime, mlx=question.mlx_version, mlx_lm=question.mlx_lm_version
            ),
            method=question.method,
            adapter=question.adapter,
            draft=question.draft,
            margin_bytes=question.margin_bytes,
            as_type=question.as_type,
        )

    def _with_draft(
        self, alone: "SizedModel", draft: Draft, method: MethodSetting, versions: MlxVersions
    ) -> "SizedModel":
        from memfit.estimators.sizing.sized_model import with_draft

        native = native_runtime(self.checkpoint(draft.reference))
        other = self.sized(
            draft.reference,
            quantize=draft.quantize,
            device=alone.device,
            runtime=with_versions(native, mlx=versions.mlx, mlx_lm=versions.mlx_lm, strict=False),
            # The calls of both follow one another, so that both are traced or neither is.
            method="trace" if isinstance(alone.runtime_model.source, Traced) else method,
        )
        return with_draft(alone, other, draft.tokens or DRAFT_TOKENS)

    def drafts_with_head(self, question: "TargetQuestion") -> bool:
        """Whether a draft is a head by itself, or in the files of a model that has such heads.

        Raises:
            MemfitError: as `open_checkpoint`.
        """
        if question.draft is None:
            return False
        names = (question.reference, question.draft.reference)
        own, other = (self.checkpoint(name) for name in names)
        types = [each.config.get("model_type") for each in (own, other)]
        return is_mtp_head(other) or all(each in MTP_TARGETS for each in types)

    def _head(self, draft: Draft, runtime: Runtime) -> Checkpoint | None:
        """Return the prediction layers that a runtime drafts with; None for a language model."""
        checkpoint = self.checkpoint(draft.reference)
        if not is_mtp_head(checkpoint) and not offers(runtime, HeadDrafting):
            return None
        head = prediction_head(checkpoint)
        if head is None and checkpoint.config.get("model_type") in MTP_TARGETS:
            raise UnsupportedError(
                f"{checkpoint.id}: no MTP layers are in its files or its config, as after"
                " conversions that leave them out; name the original, or a head of its own"
            )
        return head

    def _with_head(self, alone: "SizedModel", head: Checkpoint, draft: Draft) -> "SizedModel":
        from memfit.estimators.sizing.opening import size_head
        from memfit.estimators.sizing.sized_model import with_draft

        if draft.quantize:
            raise UnsupportedError(
                f"{setting('draft_quantize')}: how mlx-vlm converts MTP layers is not described;"
                " name the converted head"
            )
        sized = size_head(head, alone.device, alone.runtime_model.runtime)
        return with_draft(alone, sized, draft.tokens or block_size(head.config) - 1)

    def adapter(self, directory: Path) -> "Adapter":
        """Return an adapter.

        Raises:
            MemfitError: as `read_adapter`.
        """
        from memfit.estimators.checkpoint.adapters import read_adapter

        return self._once(("adapter", directory), lambda: read_adapter(directory))

    def _open(self, reference: str) -> Checkpoint:
        guesses = self._guess_hub and not reference.startswith(HUB)
        is_path = guesses or not has_prefix(reference)
        place = path_near(self._directory, reference) if is_path else reference
        if place != reference and not self._guess_hub:
            require_no_sample(reference)
        return open_checkpoint(place, progress=self._progress, guess_hub=self._guess_hub)

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._answers:
            try:
                self._answers[key] = make()
            except MemfitError as error:
                self._answers[key] = error
        answer: Made | MemfitError = self._answers[key]
        if isinstance(answer, MemfitError):
            raise answer
        return answer
