"""A model of mlx-lm, built from its config and run without computing anything."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memfit.estimators.trace.libraries import load_utils, mlx_lm_for, versions
from memfit.estimators.trace.nodes import Call, Phase, Trace
from memfit.estimators.trace.recording import Leaf, record_call
from memfit.estimators.trace.standins import Target, library_changes, recorded
from memfit.estimators.workload import Workload


def record(config: Mapping[str, Any], workload: Workload, *, target: Target) -> Trace:
    """Return the graphs of a workload's calls as ``target`` would build them."""
    installed = versions()
    with mlx_lm_for(target.backend, library_changes(target)):
        utils = load_utils()
        import mlx.core as mx
        from mlx.utils import tree_flatten

        model_class, args_class = utils._get_classes(dict(config))
        model = model_class(args_class.from_dict(dict(config)))
        model.eval()
        predicate = getattr(model, "cast_predicate", lambda _: True)
        casted = [
            (k, v.astype(mx.bfloat16))
            for k, v in tree_flatten(model.parameters())
            if mx.issubdtype(v.dtype, mx.floating) and predicate(k)
        ]
        model.load_weights(casted, strict=False)
        weights = {k: v.nbytes for k, v in tree_flatten(model.parameters())}
        calls = tuple(_calls(model, workload, target))
    return Trace(str(config["model_type"]), target.backend, installed, weights, calls)


def _calls(model: Any, workload: Workload, target: Target) -> Iterator[Call]:
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model, workload.max_kv_size)
    chunks = list(workload.prefill_chunks())
    position = 0
    for index, tokens in enumerate(chunks):
        phase: Phase = "first_chunk" if index == 0 else "last_chunk"
        yield _call(model, caches, workload, target, phase, tokens, position)
        position += tokens
    yield _call(model, caches, workload, target, "last_token", 1, position)
    if workload.max_tokens:
        yield _call(model, caches, workload, target, "decode", 1, position + 1)


def _call(
    model: Any,
    caches: list[Any],
    workload: Workload,
    target: Target,
    phase: Phase,
    tokens: int,
    position: int,
) -> Call:
    import mlx.core as mx

    leaves = [*_weights(model), *_cached(caches)]
    given: dict[str, Any] = {}
    shape = (workload.batch, tokens)
    leaves.append(
        Leaf(mx.zeros(shape, mx.int32), "tokens", "tokens", lambda v: given.update(tokens=v))
    )
    sampling = phase not in ("first_chunk", "last_chunk")
    left: list[Any] = []
    counts: list[int] = []

    def run() -> list[Any]:
        with recorded(target):
            logits = model(given["tokens"], cache=caches)
            _quantize(caches, workload)
            states = [leaf.array for leaf in _cached(caches)]
            evaluated = _sampled(logits) if sampling else states
        counts.append(len(evaluated))
        left.extend(_cached(caches))
        return [*evaluated, *(states if sampling else ())]

    graph = record_call(run, leaves)
    for leaf in left:  # the next call begins with the caches as this one left them
        leaf.put(mx.zeros(leaf.array.shape, leaf.array.dtype))
    evaluated = graph.outputs[: counts[0]]
    return Call(phase, tokens, position, graph.arrays, graph.nodes, evaluated, graph.outputs)


def _sampled(logits: Any) -> list[Any]:
    import mlx.core as mx

    logits = logits[:, -1, :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)]


def _quantize(caches: list[Any], workload: Workload) -> None:
    """Source: mlx-lm generate.py, maybe_quantize_kv_cache."""
    if workload.kv_bits is None:
        return
    for index, cache in enumerate(caches):
        if hasattr(cache, "to_quantized") and cache.offset >= workload.quantized_kv_start:
            caches[index] = cache.to_quantized(
                group_size=workload.kv_group_size, bits=workload.kv_bits
            )


def _weights(model: Any) -> Iterator[Leaf]:
    for path, module in model.named_modules():
        for key, value in module.items():
            yield from _arrays_in(module, key, value, "weight", f"{path}.{key}" if path else key)


def _cached(caches: list[Any]) -> Iterator[Leaf]:
    for index, cache in enumerate(caches):
        for key, value in vars(cache).items():
            yield from _arrays_in(vars(cache), key, value, "cache", f"{index}.{key}")


def _arrays_in(owner: Any, key: Any, value: Any, role: Any, name: str) -> Iterator[Leaf]:
    import mlx.core as mx

    if isinstance(value, mx.array):
        yield Leaf(value, role, name, _setter(owner, key))
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        pass


def _setter(owner: Any, key: Any) -> Callable[[Any], None]:
    return lambda value: owner.__setitem__(key, value)
