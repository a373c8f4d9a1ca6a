"""What images add to a run by the formula: an upper bound on the work of the vision tower.

Every operation of a block allocates its output; few of them would write over an input in its
place. Sources: vision.py and the model's own file in mlx_vlm/models of qwen2_vl, qwen2_5_vl,
qwen3_vl (also of qwen3_5), gemma3, gemma3n, gemma4, glm4v, glm4v_moe, glm_ocr, internvl_chat,
llama4, llava, mllama, pixtral (also of mistral3).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model, Part
from memfit.estimators.arch.registry import VisionTraits, class_row
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.kernels import AttentionCall, fused_kernel, has_nax
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.workspace.tape import Program, Tape, formula_limits, transient_peak

_BLOCK = re.compile(r"(?!.*(?:merger|audio))(.*?\.\d+)\.(.+)")
_ATTENTION = re.compile("attn|attention")  # the latter in pixtral.py
_LAYER_INPUTS = "per_layer_model_projection"
_FLOAT32 = 4
_INT64 = 8
# gemma3n/vision.py: what halves the sides, the stride at which the last stages are joined, and the
# steps of a norm with its activation: square, mean, two products, activation, copy.
_STRIDED = re.compile(r"conv_stem|\.0\.(conv_exp|dw_mid)")
_FUSED_STRIDE = 16
_NORM_STEPS = 5
_HEAD_DIM = 64
# Widths that mlx_vlm/models/base.py, ensure_fused_sdpa, pads queries, keys and values to.
_PADDED_WIDTHS = (64, 80, 128)


# A class that only the trace describes.
_PIXTRAL = VisionTraits(masks_patches=True, joins="all")


def _traits_of(kind: str) -> VisionTraits | None:
    row = class_row(kind)
    return row.vision if row else _PIXTRAL if kind == "pixtral" else None


class VisionWork(NamedTuple):
    """What images add, in bytes."""

    kept: int
    """From the start to the end of the prompt: pixels, embeddings, features of deep stacks."""
    transient: int
    """While the tower runs, in addition to what is kept."""
    largest: int
    """The largest single allocation."""
    largest_name: str
    crossing: int = 0
    """In a call of a text model that attends to the features, added to twice what text takes."""


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
    traits = _traits_of(str(checkpoint.config.get("model_type")))
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
    *,
    is_packed: bool,
) -> VisionWork:
    """Return a bound on what the images of a workload add to a model, packed or not.

    Raises:
        UnsupportedError: when no formula has the operations of the tower.
    """
    tower = _Tower(checkpoint, model, plan, workload, device or ANY_MAC, versions)
    return tower.work(is_packed=is_packed)


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
        traits = _traits_of(kind)
        if traits is None or not has_formula(checkpoint, model):
            raise UnsupportedError(
                f"{checkpoint.id}: no formula has the work of a vision tower of type {kind}; take"
                f" {setting('method')} trace, with mlx-vlm installed"
            )
        self._traits, self._model, self._workload = traits, model, workload
        self._plan, self._device, self._versions = plan, device, versions
        self._width = dtypes.nbytes(1, model.dtype)
        self._blocks, self._others = _matrices(model)
        self._hidden = next((first[0][1] for first in self._blocks.values()), 1)
        if self._traits.float32:
            self._width = _FLOAT32
        section = config_fields(checkpoint.config, checkpoint.config_name).untracked(
            "vision_config"
        )
        key = "num_heads" if section.has("num_heads") else "num_attention_heads"
        self._heads = section.count(key, 16, most=4096)
        self._positions = section.count("position_embedding_size", 10240)
        self._sequences = list(_sequences(plan, self._traits, workload.batch))
        self._rows = sum(count * length for count, length in self._sequences)
        self._largest = (0, "")

    def work(self, *, is_packed: bool) -> VisionWork:
        """Return the bytes."""
        programs = list(self._programs())
        limits = formula_limits(self._device)
        crossing = [self._crossing(is_packed=is_packed)] if self._traits.crosses else []
        for program in (*programs, *crossing):
            self._largest = max(self._largest, (program.largest, program.largest_name))
        transient, crossed = (
            transient_peak([program.steps for program in each], limits)
            for each in (programs, crossing)
        )
        return VisionWork(self._kept(), transient, *self._largest, crossed)

    def _kept(self) -> int:
        pixels = self._workload.batch * sum(map(array_bytes, self._plan.arrays))
        embeddings = embedded_bytes(self._model, self._workload)
        stacked = sum("deepstack" in path and path.endswith("fc2") for path, *_ in self._others)
        features = sum(image.feature_count for image in self._plan.images)
        stacked *= self._workload.batch * features
        if self._traits.crosses:
            stacked += self._rows
        return pixels + embeddings + stacked * self._model.hidden_size * self._width

    def _programs(self) -> Iterator[Program]:
        if self._traits.convolves:
            yield from self._convolutions()
            yield from [self._merging()] * self._traits.merges
            return
        yield self._embedding()
        block = self._block(next(iter(self._blocks.values())))  # all blocks of a tower are equal
        yield from (block,) * len(self._blocks)
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
        # Channels in whole blocks (mlx backend/metal/conv.cpp, pad_and_slice_conv_3D_gpu).
        patches = tape.allocate((turned,), pixels // CHANNELS * 16, name="pixels")
        wide = self._rows * self._hidden
        if self._traits.one_hot_positions:
            cells = 2 * self._rows * self._positions
            equal = tape.allocate((), cells, nbytes=cells)
            floats = tape.allocate((equal,), cells, nbytes=cells * _FLOAT32, name="positions")
            tape.allocate((tape.allocate((floats,), cells),), 2 * wide)
        # Positions between four neighbours, each with its weight (qwen3_vl/vision.py, kernels.py).
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
        """Scores of all heads."""
        return self._heads * sum(count * length**2 for count, length in self._sequences)

    def _is_fused(self, head_dim: int) -> bool:
        """Whether no scores are held: by a kernel of this width, or the one it is padded to."""
        traits = self._traits
        if traits.pads_heads:
            head_dim = next((width for width in _PADDED_WIDTHS if head_dim <= width), head_dim)
        keys = max(length for _, length in self._sequences)
        call = AttentionCall(
            backend=self._device.backend,
            nax=has_nax(self._device),
            query_tokens=keys,
            key_tokens=keys,
            key_dim=head_dim,
            value_dim=head_dim,
            heads=self._heads,
            kv_heads=self._heads,
            mask="array" if traits.masks_patches or traits.masks_each_block else "none",
            batch=self._workload.batch,
        )
        return fused_kernel(call, self._versions.mlx) is not None

    def _block(self, matrices: list[tuple[str, int, int]]) -> Program:
        """A block: norms, attention with rotated queries and keys, and the feed-forward part."""
        tape, wide = self._tape(), self._rows * self._hidden
        attention = [matrix for matrix in matrices if _ATTENTION.search(matrix[0])]
        head_dim = max(1, attention[-1][1] // self._heads)
        normed = tape.allocate((0,), wide, nbytes=wide * _FLOAT32)
        queries = mixed = self._product(tape, (normed,), attention[:-1])
        if self._traits.norms_heads:
            queries = mixed = tape.allocate((mixed,), tape.elements[mixed])
        if self._traits.rotates:
            # In float32: the products with cosine and sine, the turned half, their sum.
            rotated = tape.elements[mixed] * 2 // 3
            turned = tape.allocate((mixed,), rotated)
            for each in (mixed, turned):
                cast = tape.allocate((each,), rotated, nbytes=rotated * _FLOAT32)
                queries = tape.allocate((queries, cast), rotated, nbytes=rotated * _FLOAT32)
            queries = tape.allocate((queries,), rotated, nbytes=rotated * _FLOAT32)
            queries = tape.allocate((queries,), rotated)
        if self._traits.pads_heads:
            queries = tape.allocate((queries,), 2 * tape.elements[mixed])
        scores = self._scores()
        if self._traits.masks_each_block:
            made = tape.allocate((), scores // self._heads, name="mask")
            made = tape.allocate((made,), scores // self._heads, name="mask")
            queries = tape.allocate((queries, made), 0, nbytes=scores * self._width, name="mask")
        if not self._is_fused(head_dim):
            queries = tape.allocate((queries,), scores, counts=ops.SCORES, name="attention scores")
            tape.inplace(queries)
        attended = tape.allocate((queries, mixed), 2 * wide, counts=ops.MATMUL)
        joined = tape.allocate((attended,), wide)
        x = tape.allocate((0, self._product(tape, (joined,), attention[-1:])), wide)
        inner = tape.allocate((x,), wide, nbytes=wide * _FLOAT32)
        ups: list[int] = []
        for matrix in matrices:
            if not _ATTENTION.search(matrix[0]):
                ups.append(self._product(tape, (*ups[-2:], inner), [matrix]))
                # The activation has a few steps; one that is compiled writes its result alone.
                ups.append(tape.allocate((ups[-1],), self._rows * matrix[2]))
        tape.retain(tape.allocate((x, *ups[-1:]), wide))
        if self._traits.stacks_blocks:
            tape.retain(0)
        return tape.program()

    def _convolutions(self) -> Iterator[Program]:
        """Each convolution with its norm and activation, on pixels halved by those with a stride.

        Source: mlx_vlm/models/gemma3n/vision.py; strides as gemma3n_mobilenet_def has them.
        """
        images = self._workload.batch * sum(image.tiles for image in self._plan.images)
        whole = side = max(image.width for image in self._plan.images)
        for path, module in self._model.all_modules():
            if module.part is not Part.VISION or len(module.shape) != 4 or "audio" in path:
                continue
            outputs, kernel, _, inputs = module.shape
            is_dense = inputs > 1
            if "msfa" in path:
                side = whole // _FUSED_STRIDE
            read = images * (side + kernel) ** 2 * (inputs if is_dense else outputs)
            if _STRIDED.search(path):
                side = ceil_div(side, 2)
            cells = images * side**2 * outputs
            tape = Tape(self._device.backend, self._width, 0)
            cast = tape.allocate((), module.elements, weight=module.elements)
            padded = tape.allocate((), read)
            # Winograd's products of 8 by 8 for 6 by 6 results (mlx backend/metal/conv.cpp); on the
            # CPU the windows are written out.
            tiled = read * kernel**2 if self._device.backend == "cpu" else 2 * (read + cells)
            tiled *= _FLOAT32 if is_dense and kernel > 1 else 0
            windows = tape.allocate((padded,), 0, nbytes=tiled)
            x = tape.allocate((padded, cast, windows), cells)
            for _ in range(_NORM_STEPS):
                x = tape.allocate((x,), cells)
            if "query" in path and not self._is_fused(_HEAD_DIM):
                tape.allocate((x,), cells // _HEAD_DIM * side**2, name="attention scores")
            yield tape.program()

    def _product(
        self, tape: Tape, inputs: tuple[int, ...], matrices: list[tuple[str, int, int]]
    ) -> int:
        """Products of all patches with matrices, which are cast where the tower is wider."""
        weight = sum(inner * outputs for _, inner, outputs in matrices)
        made = self._rows * sum(outputs for *_, outputs in matrices)
        if self._traits.float32:
            inputs += (tape.allocate((), weight, weight=weight, name="weight in float32"),)
            weight = 0
        return tape.allocate(inputs, made, weight=weight, counts=ops.MATMUL)

    def _merging(self) -> Program:
        """Patches merged and projected, and the embeddings of the prompt with them put in."""
        tape = self._tape()
        x = tape.allocate((0,), self._rows * self._hidden)
        if self._traits.stacks_blocks:
            stack = tape.allocate((), len(self._blocks) * self._rows * self._hidden)
            taken = self._rows * max(inputs for _, inputs, _ in self._others)
            x = tape.allocate((x, tape.allocate((stack,), taken)), taken)
        for _, inputs, outputs in self._others:
            # Features of one patch are side by side where blocks are stacked, else of several.
            patch = inputs if self._traits.stacks_blocks else self._hidden
            rows = self._rows * patch // max(inputs, patch)
            x = tape.allocate((tape.allocate((x,), rows * outputs),), rows * outputs)
        tokens = self._workload.batch * self._workload.prompt_tokens * self._model.hidden_size
        embedded = tape.allocate((), tokens)
        widened = tape.allocate((embedded,), tokens, nbytes=tokens * _FLOAT32)
        mask = tape.allocate((), tokens, nbytes=3 * tokens)
        place = tape.allocate((mask,), tokens, nbytes=tokens * _FLOAT32)
        put = tape.allocate((widened, place, x), tokens, nbytes=tokens * _FLOAT32)
        tape.allocate((put,), tokens)
        return tape.program()

    def _crossing(self, *, is_packed: bool) -> Program:
        """Keys and values of the features, then weights of layers and head cast to float32.

        Of packed ones those are the scales and biases, of groups of 32 or more.
        """
        tape = Tape(self._device.backend, _FLOAT32, 0)
        for mixer in [m for m in self._model.mixers() if not m.owns_cache][:2]:
            for buffer in mixer.kv_buffers():
                cells = self._rows * buffer.heads * (buffer.key_dim + buffer.value_dim)
                tape.allocate((tape.allocate((), cells),), cells)
        path = f"{self._model.layers_path}.{len(self._model.layers) - 1}."
        last = [m for p, m in self._model.all_modules() if p.startswith(path)]
        head = [m for m in self._model.modules if m.part is Part.HEAD]
        for module in (*last, *last, *head):
            cells = module.elements // (16 if is_packed else 1)
            tape.allocate((tape.allocate((), cells, name="weight in float32"),), module.shape[0])
        return tape.program()


def _sequences(plan: ImagePlan, traits: VisionTraits, batch: int) -> Iterator[tuple[int, int]]:
    """Yield how many sequences attend to themselves, and of how many patches; in all prompts."""
    sizes = [(image.tiles, image.patches // image.tiles) for image in plan.images] * batch
    sizes = [(tiles, round_up(patches, traits.patch_multiple)) for tiles, patches in sizes]
    if traits.joins == "tiles":
        sizes = [(1, tiles * patches) for tiles, patches in sizes]
    apart = {"all": 0, "rest": 2}.get(traits.joins, len(sizes))
    yield from sizes[:apart]
    if rest := sum(tiles * patches for tiles, patches in sizes[apart:]):
        yield 1, rest


def _matrices(
    model: Model,
) -> tuple[dict[str, list[tuple[str, int, int]]], list[tuple[str, int, int]]]:
    """The matrices of each block of the tower, and of what follows: path, inputs, outputs."""
    blocks: dict[str, list[tuple[str, int, int]]] = {}
    others = []
    for path, module in model.all_modules():
        # What is packed with the text model: towers_llama.py, intern_vit.
        is_adapter = module.part is Part.OTHER and "language_model" not in path
        if module.part is not Part.VISION and not is_adapter:
            continue
        if len(module.shape) != 2 or "audio" in path:
            continue
        sizes = (module.shape[1], module.shape[0])
        if result := _BLOCK.fullmatch(path):
            blocks.setdefault(result[1], []).append((result[2], *sizes))
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
