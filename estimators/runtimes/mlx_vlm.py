"""mlx-vlm with a text prompt: the text model as in mlx-lm, the vision tower resident with it."""

from collections.abc import Iterator

from memfit.estimators.arch.modules import Part
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.interface import MemoryFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.weights.derived import tensor_bytes
from memfit.estimators.weights.parts import part_of

MLX_VLM = Runtime(
    name="mlx-vlm",
    version="0.7.10",
    mlx_version=MLX_VERSION,
    prefill_step=2048,  # mlx_vlm/generate/common.py, DEFAULT_PREFILL_STEP_SIZE
    kv_step=256,  # mlx_vlm/models/cache.py takes KVCache from mlx-lm
    kv_group_size=64,  # mlx_vlm/generate/common.py, DEFAULT_KV_GROUP_SIZE
    quantized_kv_start=5000,  # mlx_vlm/generate/common.py, DEFAULT_QUANTIZED_KV_START
    rotating_keep=4,  # mlx_vlm/models/cache.py, make_prompt_cache
    growth="steps",
    charges="its own caches",
    budget=Budget("working_set", 90),  # mlx_vlm/generate/common.py, wired_limit warns above it
    keeps="everything in unified memory, the vision tower included",
    allocates="caches as mlx-lm's, of a text prompt",
    source="https://github.com/Blaizzy/mlx-vlm, mlx_vlm/generate and mlx_vlm/utils.py",
)


class MlxVlm(MlxLm, frozen=True):
    """mlx-vlm; what it does with an image is not estimated."""

    tower_sizes: tuple[int, ...] = ()
    """Bytes of each array of the towers, which mlx-lm does not load; none for a text model."""

    defaults = MLX_VLM
    is_mlx_lm = False

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> RuntimeModel:
        """Return the model under mlx-vlm.

        Raises:
            UnsupportedError: when mlx-vlm cannot load it, or for a conversion of a model with
                towers, which mlx_vlm.convert makes by rules of its own.
        """
        cls.loads(subject.checkpoint)
        sizes = tuple(_tower_sizes(subject))
        plan = subject.footprint.plan
        if sizes and plan and plan.converting:
            raise UnsupportedError(
                f"{subject.checkpoint.id}: conversions by mlx_vlm.convert are not described; size"
                " the converted model"
            )
        return cls(runtime, subject, sizes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of text model and towers, each array rounded as MLX's allocator rounds it."""
        backend = self.subject.backend
        towers = sum(allocated(nbytes, backend) for nbytes in self.tower_sizes)
        return self.subject.allocated_bytes + towers

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors of text model and towers."""
        return self.subject.footprint.loaded_bytes + sum(self.tower_sizes)

    @property
    def unloaded_bytes(self) -> int:
        """Bytes of the tensors that belong to neither, such as rotary tables."""
        return max(0, self.subject.footprint.unloaded_bytes - sum(self.tower_sizes))

    def explain(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        """Yield the lines of the text model, and one for the towers."""
        text = MlxLm(self.runtime, self.subject)
        yield from text.explain(workload, figures)
        yield (
            f"with towers of {sum(self.tower_sizes)} bytes in {len(self.tower_sizes)} arrays,"
            f" rounded in the same way = {self.resident_bytes} bytes"
        )

    def notes(self, workload: Workload, figures: MemoryFigures, units: Units) -> Iterator[Note]:
        """Yield that an image takes more than the figures say."""
        if not self.tower_sizes:
            return
        text = (
            "the figures are for a text prompt: an image adds the work of the vision tower, which"
            " memfit tune --image measures"
        )
        yield Note("warning", "image", text)


def _tower_sizes(subject: Subject) -> Iterator[int]:
    """Yield the bytes of each array of the towers.

    Headers give them exactly. From a config they have the model's type: mlx_vlm.convert leaves a
    tower unquantised (mlx_vlm/utils.py, skip_multimodal_module).
    """
    if subject.checkpoint.tensors is not None:
        named = subject.checkpoint.tensors
        yield from (tensor.nbytes for tensor in named if part_of(tensor.name) is Part.VISION)
        return
    for _, module in subject.model.all_modules():
        if module.part is Part.VISION and not module.loaded:
            yield from tensor_bytes(module, subject.model.dtype, None)
