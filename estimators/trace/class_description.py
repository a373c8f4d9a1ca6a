"""A model as a class of mlx-lm or mlx-vlm describes it: parameters, experts and what it keeps.

It is what a family of arch/families writes by hand, for a class that none describes. The
operations are not among it: they are the trace's.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model, Module, Part
from memfit.estimators.arch.specs import (
    KVBuffer,
    MixtureOfExperts,
    StateBuffer,
    TracedMixer,
)
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import DEFAULTS, Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.trace.cache_stepper import (
    STATE_CACHES,
    Rows,
    buffer_of,
    leaves,
    rows_of,
    undescribed,
)
from memfit.estimators.trace.kernel_stubs import attention_widths
from memfit.estimators.trace.leaves import Leaf, caches_of
from memfit.estimators.trace.libraries import changed
from memfit.estimators.weights.derived import part_of

_FLOAT32_BYTES = 4
_NUMBERED = re.compile(r"(.+)\.(\d+)")
# Routed experts: mlx-lm models/switch_layers.py. SwitchLinear alone is also used for groups of
# heads (deepseek_v41.py).
_ROUTED = frozenset({"SwitchGLU", "SwitchMLP"})
# Experts, outputs and inputs of a matrix.
_EXPERT_AXES = 3
# Routed experts as a list of modules, and the attribute that says how many a token takes.
_LISTED, _LISTED_TOP_K = "experts", "num_experts_per_tok"  # mlx-lm models/dbrx.py


class FirstCall(NamedTuple):
    """What a class shows of itself in its first call, on one sequence of a few tokens."""

    caches: list[Any]
    """The caches after it."""
    top_k: Mapping[str, int]
    """The experts that a token took, by the path of the experts' matrices."""
    widths: frozenset[tuple[int, int]] = frozenset()
    """Of keys and values that attention was called with; a cache may keep a latent instead."""
    kv_quantizable: bool = True
    """Whether another call ran over the caches when they were quantised."""


class DescribedClass(NamedTuple):
    """A model of a class, and where it has what a description needs."""

    model: Any
    layers: list[Any]
    makes_own_cache: bool
    """Whether the class has a ``make_cache``."""
    predicate: Callable[[str, Any], Any]
    """What the converter asks of each module: whether, or how, to quantise it."""
    has_towers: bool = False
    """Whether modules are named as towers because they are, as in mlx-vlm."""


def mlx_lm_class(model: Any) -> DescribedClass:
    """Return a model of mlx-lm with its own predicate, which may be None."""
    predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)
    return DescribedClass(model, model.layers, hasattr(model, "make_cache"), predicate)


class Seen(NamedTuple):
    """What calls have shown."""

    taken: dict[int, int]
    """How many rows each matrix of experts was given last, by the id of its module."""
    widths: set[tuple[int, int]]
    """Of keys and values that attention was called with."""


@contextmanager
def watching(switch: Any) -> Iterator[Seen]:
    """Yield what calls inside the block show.

    ``switch`` is the module with the classes of experts, switch_layers.py of mlx-lm or mlx-vlm.
    """
    taken: dict[int, int] = {}

    def counting(call: Any) -> Any:
        def counted(module: Any, x: Any, indices: Any, *rest: Any, **options: Any) -> Any:
            # Of all tokens: many of them are sorted, and lose the axis of one token.
            taken[id(module)] = indices.size
            return call(module, x, indices, *rest, **options)

        return counted

    calls = (f"{kind}.__call__" for kind in ("SwitchLinear", "QuantizedSwitchLinear"))
    with (
        changed(switch, {call: counting(attrgetter(call)(switch)) for call in calls}),
        attention_widths() as widths,
    ):
        yield Seen(taken, widths)


def first_call(model: Any, caches: list[Any], seen: Seen, tokens: int) -> FirstCall:
    """Return what was seen in a call on ``tokens``."""
    # An adapter's module has the matrix as its ``linear`` (mlx-lm tuner/lora.py).
    top_k = {
        path.removesuffix(".linear"): seen.taken[id(module)] // tokens
        for path, module in model.named_modules()
        if id(module) in seen.taken
    }
    return FirstCall(caches, top_k, frozenset(seen.widths))


def describe(of: DescribedClass, first: FirstCall, *, model_type: str, dtype: str) -> Model:
    """Return the description of a model that was built unquantised, with parameters of ``dtype``.

    Modules of towers are among those outside the layers, and not loaded: a runtime for images adds
    them.

    Raises:
        UnsupportedError: for a cache or a list of experts that is not described, by its name.
    """
    model = of.model
    modules = tuple(_modules(of, dtype))
    # MLX promotes what a wider array touches, and with it keys and values.
    if any(_width(cache) == _FLOAT32_BYTES for cache in leaves(first.caches)):
        dtype = "F32"
    root, count = _layers_root(of)
    own: list[list[Module]] = [[] for _ in range(count)]
    outside: list[Module] = []
    for module in modules:
        layer, rest = _inside(module.path, root)
        (outside if layer is None else own[layer]).append(replace(module, path=rest))
    embedding = next(m for m in modules if m.part is Part.EMBEDDING)
    routed = _experts(model, root, first.top_k, embedding.shape[-1])
    mixers = [tuple(_mixers(cache, dtype)) for cache in first.caches]
    # A class may have more caches than layers (iquestloopcoder.py, afm7.py).
    # A rank of a pipeline has none of the layers before its own.
    start = next((index for index, result in enumerate(own) if result), 0)
    last = count - start - 1
    mixers[last:] = [tuple(mixer for cache in mixers[last:] for mixer in cache)]
    layers = tuple(
        Layer(
            mixers[index - start] if index - start < len(mixers) else (),
            _with_shared(routed.get(index), own[index], embedding.shape[-1]),
            tuple(own[index]),
        )
        for index in range(start, count)
    )
    return Model(
        model_type=model_type,
        vocab_size=embedding.shape[0],
        hidden_size=embedding.shape[-1],
        layers=layers,
        # The embedding is first in the files of a conversion too.
        modules=tuple(sorted(outside, key=lambda m: m.part is not Part.EMBEDDING)),
        layers_path=root,
        first_layer=start,
        makes_own_cache=of.makes_own_cache,
        attention_widths=first.widths,
        kv_quantizable=first.kv_quantizable,
        dtype=dtype,
    )


def _layers_root(of: DescribedClass) -> tuple[str, int]:
    """Return the path of the list of layers, the longer one of two, and the end of its numbers."""
    paths = {id(module): path for path, module in of.model.named_modules()}
    result = [_NUMBERED.fullmatch(paths.get(id(layer), "")) for layer in of.layers]
    [(root, _)] = Counter(match[1] for match in result if match).most_common(1)
    # The layers of another rank are None in the list, and not in ``model.layers``.
    return root, 1 + max(int(match[2]) for match in result if match and match[1] == root)


def _inside(path: str, root: str) -> tuple[int | None, str]:
    """Return the layer that a path is in, and the path inside it."""
    number, _, rest = path.removeprefix(f"{root}.").partition(".")
    inside = path.startswith(f"{root}.") and number.isdigit()
    return (int(number), rest) if inside else (None, path)


def _modules(of: DescribedClass, dtype: str) -> Iterator[Module]:
    from mlx.utils import tree_flatten

    owners: dict[str, Any] = dict(of.model.named_modules())
    flat: Any = tree_flatten(of.model.parameters())
    arrays: dict[str, Any] = dict(flat)
    routed = tuple(f"{path}." for path, module in owners.items() if _is_routed(module))
    for name, array in arrays.items():
        path, _, last = name.rpartition(".")
        has_weight = f"{path}.weight" in arrays
        # A class may pack a matrix itself (prism_hadamard_qwen35.py).
        is_packed = has_weight and f"{path}.scales" in arrays
        if (last == "bias" and has_weight) or (last in ("scales", "biases") and is_packed):
            continue  # counted with the weight
        is_tower = of.has_towers and part_of(name) is Part.VISION
        part = Part.VISION if is_tower else _part(name, owners.get(path), routed)
        is_float32 = _is_float32(array, dtype, name)
        if last != "weight":
            shape = tuple(array.shape)
            yield Module(name, shape, part, 0, False, True, is_float32, loaded=not is_tower)
            continue
        quantizable = hasattr(owners.get(path), "to_quantized")
        bias = arrays.get(f"{path}.bias")
        yield Module(
            path,
            _unpacked(array, owners[path]) if is_packed else tuple(array.shape),
            part,
            0 if bias is None else bias.size,
            quantizable,
            _predicate(of.predicate(path, owners[path])) if quantizable else True,
            is_float32,
            loaded=not is_tower,
        )


def _unpacked(words: Any, module: Any) -> tuple[int, ...]:
    """Return the shape of the matrix that a module has packed into words."""
    *outer, width = words.shape
    return (*outer, width * 8 * words.itemsize // module.bits)


def _part(name: str, module: Any, routed: tuple[str, ...]) -> Part:
    by_class = {"Norm": Part.NORM, "Embedding": Part.EMBEDDING}
    kind = type(module).__name__
    result = (part for word, part in by_class.items() if kind.endswith(word))
    return next(result, Part.EXPERTS if name.startswith(routed) else part_of(name))


def _predicate(answer: Any) -> Quantization | bool:
    if not isinstance(answer, dict):
        return bool(answer)
    bits, group_size = DEFAULTS[mode := answer.get("mode", "affine")]
    return Quantization(answer.get("bits", bits), answer.get("group_size", group_size), mode)


def _is_float32(array: Any, dtype: str, name: str) -> bool:
    """Whether an array is wider than the type of the model, as float32 is."""
    if array.itemsize not in (_FLOAT32_BYTES, dtypes.nbytes(1, dtype)) and array.ndim > 0:
        return False  # packed by the class itself (bitnet.py): its bytes are the trace's
    return bool(array.itemsize == _FLOAT32_BYTES != dtypes.nbytes(1, dtype))


def _is_routed(module: Any) -> bool:
    return any(each.__name__ in _ROUTED for each in type(module).__mro__)


def _experts(
    model: Any, root: str, top_k: Mapping[str, int], hidden: int
) -> dict[int, MixtureOfExperts]:
    result: dict[int, MixtureOfExperts] = {}
    for path, module in model.named_modules():
        layer, _ = _inside(path, root)
        if layer is None:
            continue
        if _is_routed(module):
            result[layer] = _stacked(path, module, top_k, hidden)
        elif isinstance(listed := module.get(_LISTED), list) and len(listed) > 1:
            result[layer] = _listed(path, module, listed)
    return result


def _stacked(path: str, module: Any, top_k: Mapping[str, int], hidden: int) -> MixtureOfExperts:
    # The experts of muse_spark.py have a norm for all of them too.
    matrices = {
        name: each
        for name, each in module.children().items()
        if "weight" in each and each.weight.ndim == _EXPERT_AXES
    }
    taken = {top_k.get(f"{path}.{name}") for name in matrices}
    if len(taken) != 1 or None in taken:
        raise UnsupportedError(f"{path}: how many experts a token takes is not known")
    experts, intermediate, inputs = next(iter(matrices.values())).weight.shape
    return MixtureOfExperts(
        experts=experts,
        top_k=taken.pop() or 0,
        intermediate=intermediate,
        gated=len(matrices) > 2,
        latent_dim=None if inputs == hidden else inputs,
    )


def _listed(path: str, module: Any, listed: list[Any]) -> MixtureOfExperts:
    taken = getattr(module, _LISTED_TOP_K, None)
    if not isinstance(taken, int):
        raise UnsupportedError(f"{path}.{_LISTED}: how many experts a token takes is not known")
    widths = [each.weight.shape[0] for each in listed[0].children().values()]
    return MixtureOfExperts(experts=len(listed), top_k=taken, intermediate=max(widths))


def _with_shared(
    experts: MixtureOfExperts | None, modules: list[Module], hidden: int
) -> MixtureOfExperts | None:
    """Return the experts with the width of the shared ones added."""
    shared = (m.shape for m in modules if m.part is Part.SHARED_EXPERTS)
    widths = [shape[-1] for shape in shared if len(shape) > 1 and shape[0] == hidden]
    return replace(experts, shared_intermediate=max(widths)) if experts and widths else experts


def _mixers(cache: Any, dtype: str, *, in_cache_list: bool = False) -> Iterator[TracedMixer]:
    kind = type(cache).__name__
    if (nested := getattr(cache, "caches", None)) is not None:
        for each in nested:
            yield from _mixers(each, dtype, in_cache_list=True)
        return
    if (keys_and_values := getattr(cache, "kv_cache", None)) is not None:
        # mlx-vlm quantises no cache of this class (generate/common.py).
        yield from _mixers(keys_and_values, dtype, in_cache_list=True)
    if kind in STATE_CACHES:
        yield TracedMixer(state=tuple(_states(cache, caches_of([cache]), dtype)))
        return
    if kind == "PoolingCache":
        # Of one group, from the first token on.
        groups = (leaf for leaf in caches_of([cache]) if leaf.key != "pooled")
        yield TracedMixer(state=tuple(_states(cache, groups, dtype)))
    buffer, rows = buffer_of(cache), rows_of(cache)
    if buffer:
        yield TracedMixer(buffer=replace(buffer, in_cache_list=in_cache_list))
    for each in rows:
        if (array := getattr(cache, each.name)) is not None:
            yield TracedMixer(buffer=_rows(each, array, dtype))
    if not buffer and not rows and not cache.empty():
        raise undescribed(cache)


def _states(cache: Any, arrays: Iterable[Leaf], dtype: str) -> Iterator[StateBuffer]:
    for array in (leaf.array for leaf in arrays):
        if array.itemsize == dtypes.nbytes(1, dtype):
            yield StateBuffer(array.size)
        elif array.itemsize % _FLOAT32_BYTES == 0:
            # Wider ones, such as token ids (longcat_flash_ngram.py), count as several.
            yield StateBuffer(array.nbytes // _FLOAT32_BYTES, float32=True)
        else:
            raise undescribed(cache)


def _rows(rows: Rows, array: Any, dtype: str) -> KVBuffer:
    # An open row is at most one token short; it is empty when its last token has come.
    shape = list(array.shape)
    del shape[rows.axis]
    elements = ceil_div(prod(shape) * array.itemsize, dtypes.nbytes(1, dtype))
    row_tokens, limit = rows.row_tokens, rows.limit
    if rows.is_open:
        row_tokens, limit = 1, row_tokens - 1
    return KVBuffer(1, elements, 0, rows.growth, limit, True, row_tokens)


def _width(cache: Any) -> int | None:
    """Return the bytes of an element of keys, None where a cache holds no keys."""
    keys = getattr(cache, "keys", None)
    return None if keys is None else int(keys.itemsize)
