"""Weights as vLLM keeps them: packed formats stay packed.

Source: vLLM 0.33.0 (4ba787ec9), model_executor/layers/quantization, and the load_weights of its
models.
"""

import re
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.fields import config_fields
from memfit.estimators.arch.model import Model, Part
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base import dtypes
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import round_up
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.vllm.formats import Packing, packing_of, quantization_method
from memfit.estimators.weights.derived import WeightTotals, part_of, tensor_bytes
from memfit.estimators.weights.footprint import WeightFootprint, bounded_by_name
from memfit.estimators.weights.quantization_plan import foreign_block
from memfit.estimators.weights.sanitize import ties_head

_VOCABULARY_PADDING = 64  # layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
# The widest tiles of kernels for MXFP4 experts: hidden and intermediate size are rounded up
# (fused_moe/oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size).
_MXFP4_HIDDEN, _MXFP4_INTERMEDIATE = 256, 128
# Frequencies are computed, and layers that predict further tokens are not loaded by themselves.
_SKIPPED = re.compile(r"(rotary_emb|rope)\.inv_freq|(^|\.)(mtp|nextn)")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d{1,9})\.")
# auto_gptq.py takes symmetric formats alone, and its kernels neither of the two.
_GPTQ_SKIPPED = (".g_idx", ".qzeros")
_MLX_FORMAT = Note(
    "warning",
    "not-loadable",
    "vllm loads no weights in MLX's formats: a checkpoint in one of its own has other sizes",
)


def vllm_footprint(checkpoint: Checkpoint, model: Model, known: WeightFootprint) -> WeightFootprint:
    """Return the weights as vLLM keeps them; ``known`` has what the headers say of the parts.

    Raises:
        ConfigError: when the quantisation block is malformed.
        UnsupportedError: when vLLM has no such quantisation.
    """
    block = config_fields(
        {"quantization_config": foreign_block(checkpoint.config) or {}}, checkpoint.config_name
    ).section("quantization_config")
    if known.plan and (known.plan.converting or "quant_method" not in block):
        return replace(known, notes=(_MLX_FORMAT,))
    method = quantization_method(block)
    if checkpoint.tensors is None:
        totals = _derived(model, packing_of(block) if method else None)
        known = replace(
            known,
            nbytes=totals.nbytes,
            by_part={part.value: totals.by_part[part] for part in Part},
            sizes=totals.sizes,
            unloaded_by_part={},
        )
    else:
        # vLLM goes by the config where mlx-lm goes by the files (models/gemma3.py, load_weights).
        by_files = bool(row_or_default(model.model_type).own_head) and ties_head(checkpoint.config)
        tied = by_files or model.tied_head
        kept, left = _stored(model, checkpoint.tensors, method, tied=tied)
        known = replace(known, sizes=kept, unloaded_by_part=left)
    sizes = known.sizes + Counter(filter(None, _additions(model, method)))
    # Kernels of different GPUs pad the experts of MXFP4 to different tiles.
    basis: Basis = "bound" if method == "mxfp4" else "derived"
    known = replace(known, sizes=sizes, basis=basis, plan=None, notes=())
    if method or checkpoint.tensors is not None:
        return known
    return bounded_by_name(known, checkpoint.id, computed_dtype(model))


def _derived(model: Model, packing: Packing | None) -> WeightTotals:
    """The tensors of a config alone."""
    totals = WeightTotals()
    for path, module in model.all_modules():
        if packing:
            nbytes = packing.nbytes(path, module, computed_dtype(model))
        else:
            nbytes = sum(tensor_bytes(module, computed_dtype(model), None))
        totals.add(module.part, nbytes, parameters=module.elements + module.bias)
    return totals


def computed_dtype(model: Model) -> str:
    """Return the type that vLLM computes in: a float32 model is cast (config/model.py)."""
    return "BF16" if model.dtype == "F32" else model.dtype


def _stored(
    model: Model, tensors: tuple[Tensor, ...], method: str, *, tied: bool
) -> tuple[Counter[int], Counter[str]]:
    """The sizes of the tensors that are kept, and the bytes of the others by part."""
    sizes: Counter[int] = Counter()
    left: Counter[str] = Counter()
    for name, dtype, _, nbytes in tensors:
        layer = _LAYER.match(name)
        later = layer is not None and int(layer[1]) >= len(model.layers)
        is_copy = tied and name.endswith("lm_head.weight")
        repacked = method == "gptq" and name.endswith(_GPTQ_SKIPPED)
        if later or is_copy or repacked or _SKIPPED.search(name):
            left[part_of(name).value] += nbytes
        else:
            sizes[nbytes // 2 if dtype == model.dtype == "F32" else nbytes] += 1
    return sizes, left


def _additions(model: Model, method: str) -> Iterator[int]:
    """What loading adds: padding, and the latent's matrices once more for decoding."""
    dtype = computed_dtype(model)
    for module in model.modules:
        if module.part in (Part.EMBEDDING, Part.HEAD) and len(module.shape) > 1:
            vocabulary, hidden = module.shape[-2:]
            yield dtypes.nbytes(-vocabulary % _VOCABULARY_PADDING * hidden, dtype)
    for mixer in model.mixers():
        match mixer:
            case LatentAttention():
                # layers/attention/mla_attention.py keeps kv_b_proj, and W_UK_T and W_UV out of it.
                outputs = mixer.heads * (mixer.nope_dim + mixer.value_dim)
                yield dtypes.nbytes(outputs * mixer.latent_dim, dtype)
            case Attention() | GatedDelta() | Recurrent():
                pass
            case TracedMixer():
                raise UnsupportedError(
                    f"{model.model_type}: what vLLM keeps is not described for a model that only"
                    " mlx-lm describes"
                )
            case _:
                assert_never(mixer)
    if method == "mxfp4":
        yield from _tile_padding(model)


def _tile_padding(model: Model) -> Iterator[int]:
    for _, module in model.all_modules():
        if module.part is Part.EXPERTS and len(module.shape) > 2:
            experts, *sides = module.shape
            padded = experts
            for side in sides:
                tile = _MXFP4_HIDDEN if side == model.hidden_size else _MXFP4_INTERMEDIATE
                padded *= round_up(side, tile)
            more = padded - module.elements
            yield more // 2 + more // 32
