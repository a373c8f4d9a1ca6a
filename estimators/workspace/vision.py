"""What images add to a run by the formula: an upper bound on the work of the vision tower.

Every operation of a block allocates its output; few of them would write over an input in its
place. Sources: vision.py and the model's own file in mlx_vlm/models of qwen2_vl, qwen2_5_vl,
qwen3_vl (also of qwen3_5), gemma3, gemma4, llama4, llava, pixtral (also of mistral3).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.plan import ImagePlan, InputArray
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.kernels import AttentionCall, fused_kernel, has_nax
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.workspace.schedule import formula_limits, transient_peak
from memfit.estimators.workspace.tape import Program, Tape

_BLOCK = re.compile(r"(?!.*(?:merger|audio))(.*?\.\d+)\.(.+)")
_LAYER_INPUTS = "per_layer_model_projection"
_FLOAT32 = 4
_INT64 = 8
# Widths that mlx_vlm/models/base.py, ensure_fused_sdpa, pads queries, keys and values to.
_PADDED_WIDTHS = (64, 80, 128)


class Traits(Struct, frozen=True):
    """What one class does in addition to the blocks that all have."""

    pads_heads: bool = False
    """Whether attention is padded to a width with a fused kernel."""
    masks_patches: bool = False
    """Whether a mask of all patches by all patches is an array."""
    one_hot_positions: bool = False
    """Whether positions of patches are multiplied as one-hot rows, in float32."""
    tower: str = ""
    """The one type of tower that mlx-vlm's class takes of those that are described."""


TRAITS = {
    "qwen2_vl": Traits(),
    "qwen2_5_vl": Traits(),
    "qwen3_vl": Traits(pads_heads=True),
    "qwen3_vl_moe": Traits(pads_heads=True),
    "qwen3_5": Traits(pads_heads=True),
    "qwen3_5_moe": Traits(pads_heads=True),
    "gemma3": Traits(),
    "gemma4": Traits(pads_heads=True, masks_patches=True, one_hot_positions=True),
    "llama4": Traits(),
    "llava": Traits(tower="clip_vision_model"),
    "mistral3": Traits(masks_patches=True),
    "pixtral": Traits(masks_patches=True),
}


class VisionWork(NamedTuple):
    """What images add, in bytes."""

    kept: int
    """From the start to the end of the prompt: pixels, embeddings, features of deep stacks."""
    transient: int
    """While the tower runs, in addition to what is kept."""
    largest: int
    """The largest single allocation."""
    largest_name: str


def embedded_bytes(model: Model, workload: Workload) -> int:
    """Return the bytes of a prompt's embeddings, which mlx-vlm makes before its first chunk.

    They stay to the end (mlx_vlm/generate/ar.py, generate_step), as do the inputs of each layer of
    Gemma 3n and 4 (gemma4/language.py, project_per_layer_inputs).
    """
    each_layer = (m.shape[0] for m in model.modules if m.path.endswith(_LAYER_INPUTS))
    elements = model.hidden_size + sum(each_layer)
    return dtypes.nbytes(workload.batch * workload.prompt_tokens * elements, model.dtype)


def has_formula(checkpoint: Checkpoint, model: Model) -> bool:
    """Whether the operations of the checkpoint's tower are described."""
    traits = TRAITS.get(str(checkpoint.config.get("model_type")))
    if traits is None or not any(m.part is Part.VISION for _, m in model.all_modules()):
        return False
    section = config_fields(checkpoint.config, checkpoint.config_name).untracked("vision_config")
    return traits.tower in ("", section.text("model_type", ""))


def vision_work(
    checkpoint: Checkpoint,
    model: Model,
    plan: ImagePlan,
    workload: Workload,
    device: Device | None,
    versions: MlxVersions,
) -> VisionWork:
    """Return a bound on what the images of a workload add.

    Raises:
        UnsupportedError: when no formula has the operations of the tower.
    """
    return _Tower(checkpoint, model, plan, workload, device or ANY_MAC, versions).work()


class _Tower:
    """A tower at one plan; sequences of a batch have the same images."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Model,
        plan: ImagePlan,
        workload: Workload,
        device: Device,
        versions: MlxVersions,
    ) -> None:
        kind = str(checkpoint.config.get("model_type"))
        if not has_formula(checkpoint, model):
            raise UnsupportedError(
                f"{checkpoint.id}: no formula has the work of a vision tower of type {kind}; take"
                " --method trace, with mlx-vlm installed"
            )
        self._traits, self._model, self._workload = TRAITS[kind], model, workload
        self._plan, self._device, self._versions = plan, device, versions
        self._width = dtypes.nbytes(1, model.dtype)
        self._blocks, self._others = _matrices(model)
        first = next(iter(self._blocks.values()))
        self._hidden = first[0][1]
        section = config_fields(checkpoint.config, checkpoint.config_name).untracked(
            "vision_config"
        )
        key = "num_heads" if section.has("num_heads") else "num_attention_heads"
        self._heads = section.count(key, 16, most=4096)
        self._positions = section.count("position_embedding_size", 10240)
        self._rows = workload.batch * sum(image.patches for image in plan.images)
        self._largest = (0, "")

    def work(self) -> VisionWork:
        """Return the bytes."""
        programs = list(self._programs())
        steps = [program.steps for program in programs]
        limits = formula_limits(self._device)
        for program in programs:
            self._largest = max(self._largest, (program.largest, program.largest_name))
        return VisionWork(self._kept(), transient_peak(steps, limits), *self._largest)

    def _kept(self) -> int:
        pixels = self._workload.batch * sum(map(array_bytes, self._plan.arrays))
        embeddings = embedded_bytes(self._model, self._workload)
        stacked = sum("deepstack" in path and path.endswith("fc2") for path, *_ in self._others)
        features = sum(image.feature_count for image in self._plan.images)
        stack = stacked * self._workload.batch * features * self._model.hidden_size * self._width
        return pixels + embeddings + stack

    def _programs(self) -> Iterator[Program]:
        yield self._embedding()
        block = None
        for matrices in self._blocks.values():
            block = block or self._block(matrices)  # all blocks of a tower are alike
            yield block
        yield self._merging()

    def _tape(self) -> Tape:
        return Tape(self._device.backend, self._width, self._rows * self._hidden)

    def _embedding(self) -> Program:
        """Pixels cast and transposed, the convolution, positions added."""
        tape = self._tape()
        pixels = sum(array_bytes(a) for a in self._plan.arrays if a.dtype == "float32")
        pixels = self._workload.batch * pixels // _FLOAT32
        cast = tape.allocate((), pixels, nbytes=pixels * _FLOAT32)
        turned = tape.allocate((cast,), pixels, nbytes=pixels * _FLOAT32)
        patches = tape.allocate((turned,), pixels)
        wide = self._rows * self._hidden
        if self._traits.one_hot_positions:
            cells = 2 * self._rows * self._positions
            equal = tape.allocate((), cells, nbytes=cells)
            floats = tape.allocate((equal,), cells, nbytes=cells * _FLOAT32, name="positions")
            tape.allocate((tape.allocate((floats,), cells),), 2 * wide)
        # Positions between four neighbours, each with its weight (qwen3_vl/vision.py).
        corners = tape.allocate((), 4 * wide)
        weighted = tape.allocate((corners,), 4 * wide)
        summed = tape.allocate((weighted,), wide)
        x = tape.allocate((patches,), wide, counts=ops.MATMUL)
        tape.retain(tape.allocate((x, summed), wide))
        if self._traits.masks_patches:
            cells = self._scores() // self._heads
            tape.retain(tape.allocate((), cells, nbytes=cells * self._width, name="mask"))
        return tape.program()

    def _scores(self) -> int:
        """Scores of all heads: patches attend to those of their tile, of one sequence."""
        batch = self._workload.batch
        if self._traits.masks_patches:
            return batch * self._heads * (self._rows // batch) ** 2
        each = ((image.patches // image.tiles) ** 2 * image.tiles for image in self._plan.images)
        return batch * self._heads * sum(each)

    def _is_fused(self, head_dim: int) -> bool:
        """Whether no scores are held: by a kernel of this width, or the one it is padded to."""
        if self._traits.pads_heads:
            head_dim = next((width for width in _PADDED_WIDTHS if head_dim <= width), head_dim)
        keys = max(image.patches // image.tiles for image in self._plan.images)
        call = AttentionCall(
            backend=self._device.backend,
            nax=has_nax(self._device),
            query_tokens=keys,
            key_tokens=keys,
            key_dim=head_dim,
            value_dim=head_dim,
            heads=self._heads,
            kv_heads=self._heads,
            mask="array" if self._traits.masks_patches else "none",
            batch=self._workload.batch,
        )
        return fused_kernel(call, self._versions.mlx) is not None

    def _block(self, matrices: list[tuple[str, int, int]]) -> Program:
        """A block: norms, attention with rotated queries and keys, and the feed-forward part."""
        tape, wide = self._tape(), self._rows * self._hidden
        attention = [matrix for matrix in matrices if "attn" in matrix[0]]
        mixed = sum(outputs for _, _, outputs in attention[:-1])
        head_dim = max(1, attention[-1][1] // self._heads)
        normed = tape.allocate((0,), wide, nbytes=wide * _FLOAT32)
        queries = tape.allocate((normed,), self._rows * mixed, counts=ops.MATMUL)
        # Rotated in float32: the products with cosine and sine, the turned half, their sum.
        rotated = self._rows * mixed
        first = tape.allocate((queries,), rotated, nbytes=rotated * _FLOAT32)
        turned = tape.allocate((queries,), rotated)
        second = tape.allocate((turned,), rotated, nbytes=rotated * _FLOAT32)
        total = tape.allocate((first, second), rotated, nbytes=rotated * _FLOAT32)
        cast = tape.allocate((total,), rotated)
        padded = tape.allocate((cast,), rotated * (2 if self._traits.pads_heads else 1))
        if not self._is_fused(head_dim):
            scores = self._scores()
            padded = tape.allocate((padded,), scores, counts=ops.SCORES, name="attention scores")
            padded = tape.allocate((padded,), scores, name="attention scores")
        attended = tape.allocate((padded,), 2 * wide, counts=ops.MATMUL)
        joined = tape.allocate((attended,), wide)
        x = tape.allocate((0, tape.allocate((joined,), wide, counts=ops.MATMUL)), wide)
        inner = tape.allocate((x,), wide, nbytes=wide * _FLOAT32)
        ups: list[int] = []
        for path, _, outputs in matrices:
            if "attn" not in path:
                ups.append(tape.allocate((*ups[-2:], inner), self._rows * outputs))
                # The activation has a few steps; one that is compiled writes its result alone.
                ups.append(tape.allocate((ups[-1],), self._rows * outputs))
        tape.retain(tape.allocate((x, *ups[-1:]), wide))
        return tape.program()

    def _merging(self) -> Program:
        """Patches merged and projected, and the embeddings of the prompt with them put in."""
        tape = self._tape()
        x = tape.allocate((0,), self._rows * self._hidden)
        for _, inputs, outputs in self._others:
            rows = self._rows * self._hidden // max(inputs, self._hidden)
            x = tape.allocate((tape.allocate((x,), rows * outputs),), rows * outputs)
        tokens = self._workload.batch * self._workload.prompt_tokens * self._model.hidden_size
        embedded = tape.allocate((), tokens)
        widened = tape.allocate((embedded,), tokens, nbytes=tokens * _FLOAT32)
        mask = tape.allocate((), tokens, nbytes=3 * tokens)
        place = tape.allocate((mask,), tokens, nbytes=tokens * _FLOAT32)
        put = tape.allocate((widened, place, x), tokens, nbytes=tokens * _FLOAT32)
        tape.allocate((put,), tokens)
        return tape.program()


def _matrices(
    model: Model,
) -> tuple[dict[str, list[tuple[str, int, int]]], list[tuple[str, int, int]]]:
    """The matrices of each block of the tower, and of what follows: path, inputs, outputs."""
    blocks: dict[str, list[tuple[str, int, int]]] = {}
    others = []
    for path, module in model.all_modules():
        if module.part is not Part.VISION or len(module.shape) != 2 or "audio" in path:
            continue
        sizes = (module.shape[1], module.shape[0])
        if found := _BLOCK.fullmatch(path):
            blocks.setdefault(found[1], []).append((found[2], *sizes))
        elif "embed" not in path.rpartition(".")[2]:
            others.append((path, *sizes))
    return blocks, others


def array_bytes(array: InputArray) -> int:
    """Return the bytes of an array that the model is given."""
    width = _INT64 if array.dtype == "int64" else _FLOAT32
    cells = 1
    for side in array.shape:
        cells *= side
    return cells * width
