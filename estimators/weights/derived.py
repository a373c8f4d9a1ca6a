"""The tensors of a model by part and group, and their bytes derived from the architecture."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from msgspec import Struct, field

from memfit.estimators.arch.model import Layer, Model, Module, Part
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.checkpoint.manifest import Tensor


class QuantizationPlan(Struct, frozen=True):
    """Which module is quantised, and how (mlx-lm utils.py, quantize_model and load_model)."""

    default: Quantization
    """The format of every matrix that has no entry of its own."""
    overrides: Mapping[str, Quantization | None] = field(default_factory=dict)
    """A published config's entries by path; None: not quantised."""
    converting: bool = False
    """Whether the class's own ``quant_predicate`` decides the bits, as in mlx_lm.convert; a
    published config already contains its answers, so that only refusals still count."""

    def quantization(self, path: str, module: Module) -> Quantization | None:
        """Return the format of a module's weight, None when it stays as it is.

        Raises:
            UnsupportedError: when the group size given for this matrix does not divide its rows.
        """
        chosen = self._chosen(path, module)
        if chosen and module.shape[-1] % chosen.group_size:
            raise UnsupportedError(
                f"{path}: mlx-lm cannot quantise rows of {module.shape[-1]} in the groups of"
                f" {chosen.group_size} it asks for here; take another group size"
            )
        return chosen

    def layer_formats(self, prefix: str, layer: Layer) -> tuple[Quantization | None, ...]:
        """Return what equal layers can differ in: the formats of modules with entries."""
        if not self.overrides:
            return ()
        return tuple(self.quantization(prefix + m.path, m) for m in layer.modules)

    def _chosen(self, path: str, module: Module) -> Quantization | None:
        if not module.quantizable:
            return None
        # An entry of the config decides before any predicate (mlx-lm utils.py, class_predicate).
        if path in self.overrides:
            return self.overrides[path]
        # Rows that do not divide into groups stay as they are (quantize_model).
        if module.predicate is False or module.shape[-1] % self.default.group_size:
            return None
        if self.converting and isinstance(module.predicate, Quantization):
            return module.predicate
        return self.default


class WeightTotals(Struct):
    """Sums over the tensors of a model."""

    parameters: int = 0
    """Numbers before packing."""
    by_part: Counter[Part] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    """How many loaded tensors there are of each size in bytes."""
    unloaded_by_part: Counter[Part] = field(default_factory=Counter)
    """Bytes of what the runtime drops at load."""
    unloaded_parameters: int = 0

    def add(
        self, part: Part, nbytes: int, *, parameters: int, loaded: bool = True, count: int = 1
    ) -> None:
        """Count equal tensors; bytes and parameters are of one."""
        self.parameters += count * parameters
        self.by_part[part] += count * nbytes
        if loaded:
            self.sizes[nbytes] += count
        else:
            self.unloaded_by_part[part] += count * nbytes
            self.unloaded_parameters += count * parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those the runtime drops included."""
        return self.by_part.total()

    @property
    def unloaded(self) -> int:
        """Bytes of what the runtime drops at load."""
        return self.unloaded_by_part.total()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors the runtime keeps."""
        return sum(size * count for size, count in self.sizes.items())


def derive(model: Model, plan: QuantizationPlan | None) -> WeightTotals:
    """Return the totals of a model built from its config alone, as mlx-lm would write it."""
    totals = WeightTotals()
    for module, quantization, count in formats(model, plan):
        # mlx_lm.convert loads before it writes: what mlx-lm drops is not written.
        if plan and plan.converting and not module.loaded:
            continue
        parameters = module.elements + module.bias
        for nbytes in tensor_bytes(module, model.dtype, quantization):
            totals.add(
                module.part, nbytes, parameters=parameters, loaded=module.loaded, count=count
            )
            # Counted with the weight: scales and biases of its groups are no parameters.
            parameters = 0
    return totals


def formats(
    model: Model, plan: QuantizationPlan | None
) -> Iterator[tuple[Module, Quantization | None, int]]:
    """Yield each kind of module with its format, and how many modules have both.

    Raises:
        UnsupportedError: when a group size given for a matrix does not divide its rows.
    """
    for module, paths in model.module_paths.items():
        if plan is None:
            yield module, None, len(paths)
        elif plan.overrides:
            found = Counter(plan.quantization(path, module) for path in paths)
            yield from ((module, format_, count) for format_, count in found.items())
        else:
            yield module, plan.quantization(paths[0], module), len(paths)


def tensor_bytes(module: Module, dtype: str, quantization: Quantization | None) -> Iterator[int]:
    """Yield the bytes of a module's tensors: weight, scales, biases, and its own bias."""
    # Parameters that a class keeps in float32, whatever the type of the model.
    own_dtype = "F32" if module.float32 else dtype
    if quantization:
        yield from quantization.tensors(module.elements, dtypes.nbytes(1, own_dtype))
    else:
        yield dtypes.nbytes(module.elements, own_dtype)
    if module.bias:
        yield dtypes.nbytes(module.bias, own_dtype)


EXPERTS = ".experts.*."
FLOATING = frozenset({"F16", "BF16", "F32"})
"""The types of floating numbers that MLX computes with."""


class TensorGroup(NamedTuple):
    """A tensor, or several that differ only in the number of their expert."""

    name: str
    """Its name; a star is in the place of the expert's number."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of one copy."""
    copies: int = 1
    """How many tensors there are in the group."""

    def as_type(self, dtype: str) -> "TensorGroup":
        """Return the group with elements of another type."""
        return self._replace(dtype=dtype, nbytes=dtypes.nbytes(prod(self.shape), dtype))


def tensor_groups(tensors: Iterable[Tensor]) -> tuple[TensorGroup, ...]:
    """Return the tensors in order, those of a layer's experts as one group.

    >>> experts = [Tensor(f"layer.experts.{index}.w1", "U8", (2,), 2) for index in range(3)]
    >>> tensor_groups(experts)
    (TensorGroup(name='layer.experts.*.w1', dtype='U8', shape=(2,), nbytes=2, copies=3),)
    """
    counts: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for name, dtype, shape, nbytes in tensors:
        parent, found, rest = name.partition(".experts.")
        if found:
            index, _, place = rest.partition(".")
            # A stacked expert has no number, and is a tensor of its own.
            if index.isdecimal():
                name = f"{parent}{EXPERTS}{place}"
        counts[name, dtype, shape, nbytes] += 1
    return tuple(TensorGroup(*key, copies) for key, copies in counts.items())


def sizes(groups: Iterable[TensorGroup]) -> Counter[int]:
    """Return how many tensors there are of each size in bytes."""
    result: Counter[int] = Counter()
    for group in groups:
        result[group.nbytes] += group.copies
    return result


def part_rules(number: str, *rules: tuple[Part, str]) -> Callable[[str], Part]:
    """Return a function from a tensor's name to its part: the first pattern found decides.

    Layers and experts have the same names except for their numbers: what ``number`` finds counts
    as 0, so that each name is searched once.
    """
    numbers = re.compile(number)

    # Patterns are compiled for the first name that is not the model class's; most models have none.
    # Layers repeat, so a few hundred names remain of a hundred thousand.
    @lru_cache(maxsize=4096)
    def of_shape(name: str) -> Part:
        return next((part for part, pattern in rules if re.search(pattern, name)), Part.OTHER)

    return lambda name: of_shape(numbers.sub("0", name))


# Order matters: shared experts before experts.
_part_of = part_rules(
    r"\d+",
    (
        Part.VISION,
        r"(^|\.)(vision|visual|vit|vqmodel|audio|image|img|speech|sound|multi_modal|multimodal"
        r"|mm_|aligner|patch_merger|perceiver|resampler|conformer)|embed_(vision|audio)"
        r"|^encoder\.(conv|layers|embed)",
    ),
    (
        Part.NORM,
        r"norm\d?(\.(weight|bias|scale|\d+\.weight|\d+\.bias))?$"
        r"|(^|\.)(norm|ln|ln_f|ln_\w{1,4}|final_ln|layernorm\w*)\.(weight|bias)$"
        r"|norm\w*\.(weight|bias)$",
    ),
    (Part.SHARED_EXPERTS, r"shared?_(experts?|mlp)"),
    (
        Part.ROUTER,
        r"router|\.gate\.(weight|scales|biases|bias|wg|gate|gate_proj|qweight|qzeros|e_score\w*"
        r"|expert_bias|router_bias)|expert_bias|e_score_correction_bias|gate\.wg|\.moe\.gate\.",
    ),
    # Not the projections around them, such as pre_expert_proj and routed_expert_up_proj.
    (
        Part.EXPERTS,
        r"experts[._]|(^|\.)expert[._]|switch_(mlp|glu)|input_linear|output_linear|\.moe\.",
    ),
    (Part.HEAD, r"(^|\.)(lm_head|embed_out|output|head)\.[a-z_]+$"),
    (
        Part.EMBEDDING,
        r"(^|\.)(embed_tokens\w*|tok_embeddings|word_embeddings|wte|wpe|embed_in|embeddings?"
        r"|embed_positions)\.",
    ),
    (
        Part.ATTENTION,
        r"attn|attention|mixer|mamba|ssm|conv|temporal_block|time_mix|recurrent|rotary"
        r"|[._](qkvo|qkv|[qkvo])_proj|\.(A_log|D|dt_bias)$",
    ),
    (
        Part.MLP,
        r"mlp|feed_forward|ffn|channel_mix|feedforward|[._](gate|up|down)_proj|\.(fc|w)\d?\.",
    ),
)


def part_of(name: str) -> Part:
    """Return the part that a tensor's name suggests; ``OTHER`` when no rule knows it.

    >>> part_of("model.layers.0.mlp.switch_mlp.up_proj.scales").value
    'experts'
    """
    return _part_of(name)
