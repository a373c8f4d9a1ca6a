"""mlx-vlm: the text model as in mlx-lm, the vision tower resident with it; images by a bound."""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Part, linear
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div, open_size
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import has_tower, image_plan
from memfit.estimators.mlx.data.changes import CHANGES
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.mlx.kv_cache import kv_cache
from memfit.estimators.mlx.versions import MLX_VERSION, MLX_VLM_VERSION, format_version
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, PeakMoment
from memfit.estimators.runtimes.facets import (
    BoundByTrace,
    Commands,
    HeadDrafting,
    Images,
    LoadedWeights,
    OwnWeights,
)
from memfit.estimators.runtimes.held import without_held
from memfit.estimators.runtimes.interface import (
    DraftFigures,
    Figure,
    MemoryFigures,
    RuntimeModel,
    Subject,
)
from memfit.estimators.runtimes.mlx_lm import MlxModel
from memfit.estimators.runtimes.mlx_lm_commands import option, settings_flags
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.source import Formula, Interpolated
from memfit.estimators.weights.conversion import cast_to, conversion_type
from memfit.estimators.weights.derived import part_of, tensor_bytes, tensor_groups
from memfit.estimators.workspace.peak import ERROR_PERCENT
from memfit.estimators.workspace.vision import VisionWork, embedded_bytes, has_formula, vision_work

MLX_VLM = Runtime(
    name="mlx-vlm",
    version=format_version(MLX_VLM_VERSION),
    mlx_version=MLX_VERSION,
    mlx_vlm_version=MLX_VLM_VERSION,
    prefill_step=2048,  # mlx_vlm/generate/common.py, DEFAULT_PREFILL_STEP_SIZE
    kv_step=256,  # mlx_vlm/models/cache.py takes KVCache from mlx-lm
    kv_group_size=64,  # mlx_vlm/generate/common.py, DEFAULT_KV_GROUP_SIZE
    quantized_kv_start=5000,  # mlx_vlm/generate/common.py, DEFAULT_QUANTIZED_KV_START
    growth="steps",
    charges="its own caches",
    budget=Budget("working_set", 90),  # mlx_vlm/generate/common.py, wired_limit warns above it
    keeps="everything in unified memory, the vision tower included",
    allocates="caches as mlx-lm's, and the embeddings of the whole prompt at once",
    source="https://github.com/Blaizzy/mlx-vlm, mlx_vlm/generate and mlx_vlm/utils.py",
)


# Classes whose images make the hidden states float32, and so the caches: pixels are float32, and
# what the tower makes of them is not cast. mlx-vlm 0.7.10, each run on the CPU in bfloat16; kimi_vl
# and mllama as in its models/kimi_vl/kimi_vl.py and models/mllama/mllama.py. In mllama it is all
# layers from the first that attends to images on: all count, which is a bound.
FLOAT32_CACHES = frozenset(
    ("hunyuan_vl", "kimi_vl", "llava-qwen2", "llava_bunny", "mllama", "paligemma")
)


# Classes that got logits of one token before the loop did, and prefill images in one call.
_GEMMA4 = frozenset(("gemma4", "gemma4_unified"))


def as_cached(checkpoint: Checkpoint, model: Model, workload: Workload) -> Model:
    """Return a text model in the element type that its caches have in a run."""
    is_wide = workload.images and checkpoint.config.get("model_type") in FLOAT32_CACHES
    return replace(model, dtype="F32") if is_wide else model


class MlxVlm(MlxModel, Commands, Images, OwnWeights, BoundByTrace, HeadDrafting, frozen=True):
    """mlx-vlm by formula: with images an upper bound, and exact tokens."""

    tower_sizes: tuple[int, ...] = ()
    """Bytes of each array of the towers, which mlx-lm does not load; none for a text model."""

    defaults = MLX_VLM
    converter = "mlx_vlm.convert"
    reply_tokens = 2048  # mlx_vlm/generate, DEFAULT_MAX_TOKENS

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        # Not by mlx-lm's rule: mlx-vlm has more classes.
        super(MlxModel, cls).loads(checkpoint)

    @classmethod
    def needs_trace(cls, subject: Subject) -> bool:
        """Whether a trace is set, or no formula has the model's tower."""
        return subject.method == "trace" or (subject.method == "auto" and lacks_formula(subject))

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> RuntimeModel:
        return cls.by_formula(runtime, subject)

    @classmethod
    def by_formula(cls, runtime: Runtime, subject: Subject) -> "MlxVlm":
        """Return the model by formula; mlx_vlm.convert leaves its towers as they are.

        Raises:
            UnsupportedError: when mlx-vlm cannot load it.
        """
        cls.loads(subject.checkpoint)
        return cls(runtime, subject, tuple(_tower_sizes(subject)))

    def _refused_files(self) -> str:
        return ""  # mlx_vlm/utils.py, load_model, loads them

    def _library(self) -> str:
        return self.runtime.name if isinstance(self.subject.source, Interpolated) else "mlx-lm"

    def require_tower(self) -> None:
        """Check that the model has a tower.

        Raises:
            UnsupportedError: when it has none.
        """
        checkpoint = self.subject.checkpoint
        if not self.tower_sizes and checkpoint.tensors is None and has_tower(checkpoint):
            raise UnsupportedError(
                f"{checkpoint.id}: no formula has its vision tower; leave out"
                f" {setting('method')} formula, with mlx-vlm installed"
            )
        if not self.tower_sizes:
            where = "config has" if checkpoint.tensors is None else "files have"
            raise UnsupportedError(
                f"{checkpoint.id}: its {where} no vision tower, as after"
                " mlx_lm.convert; take a model that mlx_vlm.convert has made"
            )

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes; its images are there from the start to the end.

        Raises:
            UnsupportedError: when no formula has the work of the tower, or there is none.
        """
        reject_batch_windows(workload)
        workload = self._in_one_call(workload)
        if workload.batch > 1 and workload.kv_bits is not None:
            # mlx_vlm/generate/ar.py, _make_cache: from the first token, all layers but the last.
            raise UnsupportedError(
                "no formula has the quantised caches of mlx-vlm's batches: leave out KV bits, or"
                f" take {setting('method')} trace with mlx-vlm installed"
            )
        figures, subject = MlxModel.figures(self, workload), self.subject
        if workload.batch > 1:  # it is not described when mlx-vlm's batches clear
            figures = without_held(figures)
        if workload.images:
            self.require_tower()
        if isinstance(subject.source, Interpolated):  # of mlx-vlm's own class, with the images
            return self.with_whole_logits(figures, workload)
        if not workload.images:
            moment = _with_embeddings(figures.moment, subject, workload)
            return self.with_whole_logits(replace(figures, moment=moment), workload)
        figures = self._as_cached(figures, workload)
        plan, versions = image_plan(subject.checkpoint, workload.images), self.runtime.versions
        work = vision_work(
            subject.checkpoint,
            subject.model,
            plan,
            workload,
            subject.device,
            versions,
            is_packed=subject.footprint.plan is not None,
        )
        held = figures.kv.nbytes + figures.ssm_bytes
        moment = _with_images(figures.moment, work, self.resident_bytes(), held)
        return self.with_whole_logits(replace(figures, moment=moment), workload)

    def _rule_of_logits(self, workload: Workload) -> str | None:
        """Return the rule by which a version makes the logits of a whole prompt at once."""
        if workload.prompt_tokens > self._in_one_call(workload).prefill_step:
            return None
        is_gemma4 = self.subject.checkpoint.config.get("model_type") in _GEMMA4
        return "logits_of_gemma4" if is_gemma4 else "logits_of_short_prompts"

    def with_whole_logits(self, figures: MemoryFigures, workload: Workload) -> MemoryFigures:
        """Return the figures with the logits of a whole prompt, where this version makes them.

        They are added to the largest moment, as a bound: MLX allocates them while the last layers
        are still computed.
        """
        if not self._has_whole_logits(workload):
            return figures
        moment, nbytes = figures.moment, self._whole_logits(workload)
        if nbytes > moment.largest_buffer_bytes:
            name = "logits of the prompt"
            moment = replace(moment, largest_buffer_bytes=nbytes, largest_buffer=name)
        line = f"logits of all {workload.prompt_tokens} tokens of each prompt = {nbytes:,}"
        moment = replace(
            moment.raised(nbytes),
            workspace_bytes=moment.workspace_bytes + nbytes,
            explanation=(*moment.explanation, line),
        )
        return replace(figures, moment=moment)

    def _has_whole_logits(self, workload: Workload) -> bool:
        rule = self._rule_of_logits(workload)
        return rule is not None and self.runtime.versions.has(rule)

    def _whole_logits(self, workload: Workload) -> int:
        numbers = workload.batch * workload.prompt_tokens * self.subject.model.vocab_size
        return dtypes.nbytes(numbers, self.subject.model.dtype)

    def _in_one_call(self, workload: Workload) -> Workload:
        """Return the workload as it is prefilled: in one call where images see one another.

        Source: mlx_vlm/models/gemma4/language.py, chunked_prefill_policy.
        """
        config = self.subject.checkpoint.config
        text = config.get("text_config")
        sees = text.get("use_bidirectional_attention") if isinstance(text, dict) else None
        if not workload.images or config.get("model_type") not in _GEMMA4 or sees != "vision":
            return workload
        return replace(workload, prefill_step=max(workload.prefill_step, workload.prompt_tokens))

    def require_draft(self, draft: Subject) -> None:
        from memfit.estimators.runtimes.drafting import require_head

        require_head(self.subject, draft)

    def drafted(self, workload: Workload, draft: RuntimeModel, tokens: int) -> DraftFigures:
        from memfit.estimators.runtimes.drafting import head_figures

        return head_figures(self, workload, draft, tokens)

    def _as_cached(self, figures: MemoryFigures, workload: Workload) -> MemoryFigures:
        """Return them with the caches of a run; all that is computed is as wide then, at most."""
        model, moment = self.subject.model, figures.moment
        cached = as_cached(self.subject.checkpoint, model, workload)
        if cached.dtype == model.dtype:
            return figures
        kv, workspace = kv_cache(cached, workload), moment.workspace_bytes
        more = kv.nbytes - figures.kv.nbytes + workspace
        moment = replace(moment.raised(more), workspace_bytes=2 * workspace)
        return replace(figures, kv=kv, moment=moment)

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on; with images the workspace is a bound."""
        is_bound = workload.images and isinstance(self.subject.source, Formula)
        if figure == "workspace" and (is_bound or self._has_whole_logits(workload)):
            return "bound", 0
        return MlxModel.basis(self, figure, workload)

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return the command of mlx_vlm.generate, which runs one prompt; files are the user's."""
        if workload.batch > 1:
            return ()
        command = ["mlx_vlm.generate", *option("--model", model)]
        if workload.images:
            command += ["--image" if workload.images.images else "--video", "FILE"]
        if workload.max_tokens:
            command += ["--max-tokens", str(workload.max_tokens)]
        if workload.max_kv_size is not None:
            command += ["--max-kv-size", str(workload.max_kv_size)]
        return (shlex.join([*command, *settings_flags(workload)]),)

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        """Yield what images become, and where their processor's settings are from."""
        yield from super()._assumptions(workload)
        if self.runtime.versions.mlx_vlm < MLX_VLM_VERSION:
            yield f"the class is that of mlx-vlm {format_version(MLX_VLM_VERSION)}"
        elif rule := self._rule_of_logits(workload):
            until = format_version(CHANGES[rule]["until"])
            yield (
                f"mlx-vlm before {until} also makes the logits of all tokens of such a prompt:"
                f" {open_size(self._whole_logits(workload))} more; see {setting('mlx_vlm_version')}"
            )
        if not workload.images:
            return
        plan = image_plan(self.subject.checkpoint, workload.images)
        yield f"{workload.images}: {plan.token_count} of the prompt's tokens"
        if plan.is_assumed:
            yield "the processor's files are missing: its settings are those of published models"
        if plan.tokens_are_bound:
            yield "tags in text around images or frames count a token a letter, which is a bound"

    def resident_bytes(self) -> int:
        """Return the bytes of text model and towers, as MLX's allocator rounds each array."""
        backend = self.subject.backend
        towers = sum(allocated(nbytes, backend) for nbytes in self.tower_sizes)
        return self.subject.allocated_bytes + towers

    def loaded_weights(self) -> LoadedWeights:
        """Return the bytes of text model and towers, and of what is neither: rotary tables."""
        footprint, towers = self.subject.footprint, sum(self.tower_sizes)
        unloaded_bytes = max(0, footprint.unloaded_bytes - towers)
        return LoadedWeights(footprint.loaded_bytes + towers, unloaded_bytes)

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        """Yield the lines of the text model, and one for the towers."""
        yield from MlxModel(self.runtime, self.subject)._explanation(workload, figures)
        yield (
            f"with towers of {sum(self.tower_sizes)} bytes in {len(self.tower_sizes)} arrays,"
            f" rounded in the same way = {self.resident_bytes()} bytes"
        )

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield what the figures leave out, or that they are a bound."""
        if not self.tower_sizes:
            return
        if workload.images:
            if isinstance(self.subject.source, Formula):
                text = "the work of the vision tower is an upper bound by formula"
                yield Note("info", "image-bound", text)
            return
        text = (
            "the figures are for a text prompt: an image adds the work of the vision tower, as with"
            " --image 1024x768"
        )
        yield Note("warning", "image", text)


def lacks_formula(subject: Subject) -> bool:
    """Whether no formula has the tower of a model, which a trace can have."""
    is_formula = isinstance(subject.source, Formula)
    described = is_formula and has_formula(subject.checkpoint, subject.model)
    adapted = any(module.low_rank for _, module in subject.model.all_modules())
    return has_tower(subject.checkpoint) and not described and not adapted


# Classes with a head that ``sanitize`` makes of the embedding (mlx_vlm/models/gemma3/language.py).
_TIED_HEADS = frozenset({"gemma3"})


def reject_batch_windows(workload: Workload) -> None:
    """Check that a batch has no rotating caches (mlx_vlm/generate/ar.py, _make_cache).

    Raises:
        UnsupportedError: when it has.
    """
    if workload.batch > 1 and workload.max_kv_size is not None:
        raise UnsupportedError("mlx-vlm's batches keep all tokens: leave out max_kv_size, or batch")


def _with_embeddings(text: PeakMoment, subject: Subject, workload: Workload) -> PeakMoment:
    kept = embedded_bytes(subject.model, workload)
    line = f"embeddings of the whole prompt, kept to the end = {kept:,}"
    return replace(
        text.raised(kept),
        workspace_bytes=text.workspace_bytes + kept,
        explanation=(*text.explanation, line),
    )


def _with_images(
    text: PeakMoment, work: VisionWork, resident_bytes: int, cached_bytes: int
) -> PeakMoment:
    """The larger of a text's moment with images kept through it, and of the tower's own."""
    kept = work.kept + ceil_div(text.workspace_bytes * ERROR_PERCENT, 100)
    if work.crossing:
        kept += text.workspace_bytes + cached_bytes + work.crossing
    moment = text.raised(kept)
    tower = resident_bytes + work.kept + work.transient
    line = f"kept of the images = {work.kept:,}; the text's workspace as a bound: {kept:,} in all"
    if tower > moment.nbytes:
        line = (
            f"vision = weights {resident_bytes:,} + kept of the images {work.kept:,} + in flight"
            f" {work.transient:,} = {tower:,}"
        )
    nbytes = max(tower, moment.nbytes)
    largest = max(
        (moment.largest_buffer_bytes, moment.largest_buffer), (work.largest, work.largest_name)
    )
    return replace(
        moment,
        phase="vision" if tower > moment.nbytes else moment.phase,
        nbytes=nbytes,
        workspace_bytes=max(0, nbytes - resident_bytes - cached_bytes),
        largest_buffer_bytes=largest[0],
        largest_buffer=largest[1],
        explanation=(*moment.explanation, line),
        prefill_bytes=max(moment.prefill_bytes or 0, tower),
    )


def _tower_sizes(subject: Subject) -> Iterator[int]:
    """Yield the bytes of each array that mlx-lm does not load: of the towers, and of a head.

    Headers give them exactly, and what a conversion casts them to. From a config they have the
    model's type: mlx_vlm.convert leaves a tower unquantised (mlx_vlm/utils.py,
    skip_multimodal_module). It packs a head that is the embedding a second time.
    """
    model, plan = subject.model, subject.footprint.plan
    packs = plan is not None and (plan.converting or subject.checkpoint.tensors is None)
    if plan and packs and model.tied_head and model.model_type in _TIED_HEADS:
        head = linear("lm_head", model.hidden_size, model.vocab_size, Part.HEAD)
        yield from tensor_bytes(head, model.dtype, plan.default)
    if subject.checkpoint.tensors is not None:
        towers = (t for t in subject.checkpoint.tensors if part_of(t.name) is Part.VISION)
        to = conversion_type(subject.checkpoint.config) if plan and plan.converting else None
        for tower in tensor_groups(towers):
            yield from [cast_to(tower, to).nbytes] * tower.copies
        return
    for _, module in subject.model.all_modules():
        if module.part is Part.VISION and not module.loaded:
            yield from tensor_bytes(module, subject.model.dtype, None)
