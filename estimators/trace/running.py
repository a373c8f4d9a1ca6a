"""One model of mlx-lm and its caches, run call by call as mlx-lm's loop would."""

from collections.abc import Iterator
from typing import Any

from memfit.estimators.trace.leaves import Leaf, caches_of, weights_of
from memfit.estimators.trace.nodes import Call, Phase
from memfit.estimators.trace.recording import count_nodes, record_call, run_unrecorded
from memfit.estimators.trace.standins import Target, recorded
from memfit.estimators.trace.stepping import Stepper
from memfit.estimators.workload import Workload

# Tokens that show what a cache holds; more than any convolution looks back.
_LEARNING_TOKENS = 32
# A chunk of so many tokens is sized up first: some classes loop over tokens in Python.
_LONG_CHUNK = 256
_PROBES = (8, 16)
# Buffers grow in steps of so many tokens: mlx-lm models/cache.py.
_GROWTH_STEP = 256


class Running:
    """A built model under one workload; to be used inside `mlx_lm_for`."""

    def __init__(self, model: Any, workload: Workload, target: Target) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._model, self._workload, self._target = model, workload, target
        self.caches: list[Any] = make_prompt_cache(model, workload.max_kv_size)
        self._stepper = Stepper(self.caches, workload)
        self._is_first = True
        self._nodes_by_tokens: list[int] | None = None

    def finish(self) -> None:
        """Bring the caches to where they are when the workload ends, recording nothing."""
        total = self._workload.total_tokens
        tokens = min(_LEARNING_TOKENS, max(1, self._workload.prompt_tokens - 1))
        self._push(tokens)
        if total > 1:
            self._stepper.jump(total - 1)
            self._push(1)
        self._stepper.quantize()

    def _push(self, tokens: int) -> None:
        import mlx.core as mx

        zeros = mx.zeros((self._workload.batch, tokens), mx.int32)

        def run() -> None:
            with recorded(self._target):
                self._model(zeros, cache=self.caches)

        run_unrecorded(run)
        self._learn()

    def _learn(self) -> None:
        if self._is_first:
            self._stepper.learn()
            self._is_first = False

    def calls(self) -> Iterator[Call]:
        """Yield the calls that decide the peak, in the order mlx-lm makes them."""
        first, *others = self._points()
        yield self._call(*first)
        for phase, tokens, position in others:
            if phase != "growing" or self._stepper.grows_at(position):
                self._stepper.jump(position)
                yield self._call(phase, tokens, position)

    def _points(self) -> list[tuple[Phase, int, int]]:
        """Return phase, tokens and position of each call; `growing` may turn out not to be."""
        prompt, step = self._workload.prompt_tokens, self._workload.prefill_step
        end = self._workload.total_tokens - 1
        points: dict[int, tuple[Phase, int]] = {}
        if self._workload.max_tokens:
            growing = end - end % _GROWTH_STEP
            if growing >= prompt:
                points[growing] = ("growing", 1)
            points[end] = ("decode", 1)
        points[prompt - 1] = ("last_token", 1)
        if prompt > 1:
            last = (prompt - 2) // step * step
            points[last] = ("last_chunk", prompt - 1 - last)
            if last > step and prompt - 1 - last < step:
                points[last - step] = ("full_chunk", step)
            points[0] = ("first_chunk", min(step, prompt - 1))
        converting = self._converting()
        if converting is not None:
            points.setdefault(
                converting, ("converting", min(step, max(1, prompt - 1 - converting)))
            )
        return [(phase, tokens, position) for position, (phase, tokens) in sorted(points.items())]

    def _converting(self) -> int | None:
        """Return where the call begins after which mlx-lm quantises the caches."""
        workload = self._workload
        if workload.kv_bits is None or workload.quantized_kv_start > workload.total_tokens:
            return None
        start = max(1, workload.quantized_kv_start)
        if start >= workload.prompt_tokens:
            return start - 1
        return (start - 1) // workload.prefill_step * workload.prefill_step

    def _call(self, phase: Phase, tokens: int, position: int) -> Call:
        import mlx.core as mx

        given: dict[str, Any] = {}
        leaves = [leaf for leaf in weights_of(self._model) if self._is_given(leaf)]
        leaves += caches_of(self.caches)
        zeros = mx.zeros((self._workload.batch, tokens), mx.int32)
        leaves.append(Leaf(zeros, "tokens", "tokens", lambda array: given.update(tokens=array)))
        counts: list[int] = []

        def run() -> list[Any]:
            with recorded(self._target):
                logits = self._model(given["tokens"], cache=self.caches)
                self._learn()
                self._stepper.quantize()
                ends = _states(self.caches)
                if position >= self._workload.prompt_tokens - 1:
                    ends = _sampled(logits)
            counts.append(len(ends))
            return ends + [leaf.array for leaf in caches_of(self.caches)]

        graph = record_call(run, leaves, expected_nodes=self._expected_nodes(tokens))
        self._stepper.forget(lambda array: mx.zeros(array.shape, array.dtype))
        return Call(
            phase=phase,
            tokens=tokens,
            position=position,
            arrays=graph.arrays,
            nodes=graph.nodes,
            evaluated=graph.outputs[: counts[0]],
            held=tuple(dict.fromkeys(graph.outputs)),
        )

    def _expected_nodes(self, tokens: int) -> int:
        if tokens < _LONG_CHUNK:
            return 0
        if self._nodes_by_tokens is None:
            self._nodes_by_tokens = [self._count(probe) for probe in _PROBES]
        (few, many), (base, more) = _PROBES, self._nodes_by_tokens
        return base + (more - base) * (tokens - few) // (many - few)

    def _count(self, tokens: int) -> int:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(self._model, self._workload.max_kv_size)

        def run() -> list[Any]:
            with recorded(self._target):
                logits = self._model(mx.zeros((1, tokens), mx.int32), cache=caches)
            return [logits, *_states(caches)]

        # What a class makes for itself at its first call is to be made by a recorded one.
        modules = [(m, dict(m), dict(vars(m))) for m in self._model.modules()]
        nodes = count_nodes(run)
        for module, items, attributes in modules:
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)
        return nodes

    def _is_given(self, leaf: Leaf) -> bool:
        # What a class made for itself is computed by the first call that needs it, once.
        return leaf.role == "weight" or not self._is_first


def _states(caches: list[Any]) -> list[Any]:
    """Return what mlx-lm evaluates after a chunk, in its order."""
    import mlx.core as mx

    found: list[Any] = []
    waiting = [cache.state for cache in reversed(caches)]
    while waiting:
        state = waiting.pop()
        if isinstance(state, mx.array):
            found.append(state)
        elif isinstance(state, (list, tuple)):
            waiting += reversed(state)
    return found


def _sampled(logits: Any) -> list[Any]:
    """Return the token and the log probabilities; source: mlx-lm generate.py, _step."""
    import mlx.core as mx

    logits = logits[:, -1, :]
    if len(logits) > 1:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [mx.argmax(logprobs, axis=-1), logprobs]
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)]
