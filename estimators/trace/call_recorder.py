"""One model of mlx-lm and its caches, run call by call as mlx-lm's loop would."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.mlx.call_plan import PREFILL, PlannedCall, planned_calls
from memfit.estimators.trace.cache_stepper import Stepper, batched
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for, recorded
from memfit.estimators.trace.leaves import Leaf, Modules, caches_of
from memfit.estimators.trace.loop_guard import LoopError, few_slices
from memfit.estimators.trace.recording import (
    count_nodes,
    record_call,
    reject_large_loop,
    run_unrecorded,
)

# Tokens that show what a cache holds; more than any convolution looks back.
_LEARNING_TOKENS = 32
# Tokens of two short calls: their nodes show what a loop over tokens adds for each.
_PROBES = (8, 16)
# Nodes of the calls that are kept for other workloads: about 70 MB, and a run of Falcon-H1 7B.
_MAX_KEPT = 64_000


class KeptCalls:
    """Recorded calls of a model: runs of other prompts share the first, other GPUs get the same."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Call] = {}
        self.probed: dict[Hashable, tuple[int, ...]] = {}
        """Nodes of the two short calls, where a class loops over tokens."""

    def get(self, key: Hashable) -> Call | None:
        """Return the call that was kept under a key."""
        call = self._calls.pop(key, None)
        if call is not None:
            self._calls[key] = call
        return call

    def keep(self, key: Hashable, call: Call) -> None:
        """Keep a call, and drop those unused for longest while there are too many.

        First calls are the last to go: other prompts have the same.
        """
        self._calls[key] = call
        while sum(len(each.nodes) for each in self._calls.values()) > _MAX_KEPT:
            later = (kept for kept, each in self._calls.items() if each.position)
            del self._calls[next(later, next(iter(self._calls)))]


class Running:
    """A built model under one workload; to be used inside `tracing`.

    The model is first made what its ``modules`` were before any call. ``sampled`` makes of logits
    what is evaluated. Calls that are ``kept`` are not recorded again.
    """

    def __init__(
        self,
        model: Any,
        modules: Modules,
        workload: Workload,
        target: TraceTarget,
        sampled: "Sample | None" = None,
        kept: KeptCalls | None = None,
    ) -> None:
        self._model, self._modules = model, modules
        self._workload, self._target = workload, target
        self._sampled = sampled or sampled_token
        self._kept = kept or KeptCalls()
        self._reset()

    def _reset(self) -> None:
        self._modules.restore()
        self.caches = self._new_caches()
        self._stepper = Stepper(self.caches, self._workload)
        self._is_first, self._is_back = True, False
        self._recorded_nodes = self._counted = 0
        self._leaves: list[Leaf] = []
        self._first: Hashable = None
        self._begun = self._modules
        self._left: set[tuple[int, ...]] = set()

    def begins(self, workload: Workload, target: TraceTarget, first: PlannedCall) -> bool:
        """Go back to the end of the first call, if a run of ``workload`` begins with the same."""
        # The caches of a batch are cut when it begins to generate.
        if workload.batch > 1 or target != self._target or self._first is None:
            return False
        self._workload = self._stepper.workload = workload
        if self._first != self._key(first):
            return False
        self._begun.restore()
        self._recorded_nodes = self._counted = 0
        self._is_back = True
        return True

    def _begin(self, first: PlannedCall) -> None:
        """Keep what the first call has left."""
        self._first, self._left = self._key(first), self._cached_shapes()
        self._begun = Modules(self._model)

    def _new_caches(self) -> list[Any]:
        cache = library_for(self._target.backend).load("mlx_lm.models.cache")
        return batched(
            cache.make_prompt_cache(self._model, self._workload.max_kv_size), self._workload
        )

    def finish(self) -> None:
        """Bring the caches to where they are when the workload ends, recording nothing."""
        total = self._workload.total_tokens
        self.begin()
        # One call at the end grows and trims the caches as mlx-lm would.
        if total > 1:
            self._stepper.jump(total - 1)
            self._push(1)
        self._stepper.quantize()

    def skip_to_end(self) -> None:
        """Bring the caches to where they are when the workload ends, after any call."""
        self._stepper.jump(self._workload.total_tokens)

    def begin(self) -> int:
        """Fill the caches with a few tokens, recording nothing; return how many."""
        tokens = min(_LEARNING_TOKENS, max(1, self._workload.prompt_tokens - 1))
        self._push(tokens)
        return tokens

    def runs_quantised(self) -> bool:
        """Whether the model runs over its caches once they are quantised.

        Caches that mlx-lm cannot quantise do not decide: kv_cache.py names them.
        """
        self.begin()
        try:
            changed = self._stepper.quantize()
        except (NotImplementedError, ValueError):
            return True
        # A class that takes keys for one array may raise anything.
        with suppress(Exception):
            # A chunk, and a token.
            for tokens in (2, 1) if changed else ():
                self._push(tokens)
            return True
        return False

    def _push(self, tokens: int) -> None:
        import mlx.core as mx

        zeros = mx.zeros((self._workload.batch, tokens), mx.int32)

        def run() -> None:
            with recorded(self._target):
                self._model(zeros, cache=self.caches)

        run_unrecorded(run)
        self._learn()

    def _push_first(self, tokens: int) -> None:
        given = self._given_modules()
        self._push(tokens)
        # As a recorded call leaves them (record_call): gemma3n.py changes some.
        for leaf in given:
            leaf.put(leaf.array)

    def _learn(self) -> None:
        if self._is_first:
            self._stepper.learn()
            self._is_first = False

    def calls(self, planned: Sequence[PlannedCall]) -> Iterator[Call]:
        """Yield planned calls in their order, the first of them on empty caches."""
        for call in planned:
            # Only the first call finds the caches as they are; for the others they are set.
            # planned_calls knows where a buffer may grow; the caches know whether it does.
            if call.phase == "growing" and not self._stepper.grows_at(call.position):
                continue
            yield self._recorded(call)

    def skips(self, first: PlannedCall, after: PlannedCall) -> bool:
        """Bring the caches to where they are after a run's first call, if it need not be recorded.

        That is so if the next recorded call, ``after`` it, takes on nothing that it leaves.
        """
        # The CPU closes its tasks by all that was run before (mlx/scheduler.py).
        on_cpu = self._target.backend == "cpu"
        is_next = after.position == first.position + first.tokens or after.phase not in PREFILL
        if on_cpu or is_next or self._kept.get(self._key(first)):
            return False
        if self._is_first:
            try:
                with few_slices():
                    self._push_first(first.tokens)
            except LoopError:
                self._reset()
                return False
            self._stepper.quantize()
            self._begin(first)
        self._stepper.jump(after.position)
        # The trace hands caches on by their shape (peak.py).
        if self._left.isdisjoint(self._cached_shapes()):
            self._is_back = False
            return True
        self._reset()
        return False

    def _cached_shapes(self) -> set[tuple[int, ...]]:
        return {(*leaf.array.shape, leaf.array.itemsize) for leaf in caches_of(self.caches)}

    def _recorded(self, planned: PlannedCall) -> Call:
        call = self._kept.get(self._key(planned))
        if self._is_back and call is None:
            self._reset()
        is_first, is_back = self._is_first, self._is_back
        self._is_back = False
        if not is_first and not is_back:
            self._stepper.jump(planned.position)
        if call is None:
            call = self._first_call(*planned) if is_first else self._call(*planned)
            self._kept.keep(self._key(planned), call)
        else:
            # Later calls are made from what the first leaves.
            if is_first:
                self._push_first(planned.tokens)
            self._tidy(call)
        if is_first:
            self._begin(planned)
        return call

    def _key(self, planned: PlannedCall) -> Hashable:
        """Return what a call depends on: of the prompt, where it begins and whether it samples."""
        others = replace(self._workload, prompt_tokens=1, max_tokens=0)
        samples = self._samples(planned.tokens, planned.position)
        return others, self._target, planned, samples and self._sampled

    def _samples(self, tokens: int, position: int) -> bool:
        """Whether a token is sampled: from the last of the prompt on."""
        return position + tokens >= self._workload.prompt_tokens

    def _tidy(self, call: Call) -> None:
        """Bring caches and counts to where they are when a call was recorded."""
        import mlx.core as mx

        self._stepper.quantize()
        self._recorded_nodes += len(call.nodes)
        self._stepper.forget(lambda array: mx.zeros(array.shape, array.dtype))

    def _first_call(self, phase: CallPhase, tokens: int, position: int) -> Call:
        if self._probe_key not in self._kept.probed:
            with suppress(LoopError):
                return self._call(phase, tokens, position, few=True)
        # Two short calls show how large the graph would be, before any time is spent on it.
        reject_large_loop(self._expected_nodes())
        self._reset()
        return self._call(phase, tokens, position)

    def _expected_nodes(self) -> int:
        """Return the nodes that a loop adds for the tokens of all calls, from two short ones."""
        # What the two have in common is mostly how the weights were made, which is not recorded.
        key, probed = self._probe_key, self._kept.probed
        if key not in probed:
            probed[key] = tuple(map(self._count, _PROBES))
        (few, many), (base, more) = _PROBES, probed[key]
        calls = planned_calls(self._workload, self._target.versions)
        tokens = sum(call.tokens for call in calls)
        return (more - base) * tokens // (many - few)

    @property
    def _probe_key(self) -> Hashable:
        return self._workload.batch, self._workload.max_kv_size, self._target

    def _call(self, phase: CallPhase, tokens: int, position: int, *, few: bool = False) -> Call:
        """Record one call; with ``few``, only as long as it takes few slices of arrays."""
        import mlx.core as mx

        given: dict[str, Any] = {}
        leaves = [*self._given_modules(), *caches_of(self.caches)]
        zeros = mx.zeros((self._workload.batch, tokens), mx.int32)
        leaves.append(Leaf(zeros, "tokens", "tokens", given, "tokens"))
        counts: list[int] = []

        def run() -> list[Any]:
            # In mlx-lm's order: the model, the conversion of caches, then what is evaluated.
            with recorded(self._target), few_slices() if few else nullcontext():
                if phase == "last_token":
                    self._stepper.select_all()
                logits = self._model(given["tokens"], cache=self.caches)
                self._learn()
                self._stepper.quantize()
                ends = _states(self.caches)
                if self._samples(tokens, position):
                    ends = self._sampled(logits)
            # What the caches hold is returned as well, or the export would drop what makes it.
            counts.append(len(ends))
            return ends + [leaf.array for leaf in caches_of(self.caches)]

        graph = record_call(run, leaves, recorded_before=self._recorded_nodes)
        call = Call(
            phase=phase,
            tokens=tokens,
            position=position,
            arrays=graph.arrays,
            nodes=graph.nodes,
            evaluated=graph.outputs[: counts[0]],
            held=tuple(dict.fromkeys(graph.outputs)),
        )
        self._tidy(call)
        return call

    def _count(self, tokens: int) -> int:
        """Return the nodes of a first call of ``tokens``."""
        import mlx.core as mx

        self._modules.restore()
        caches, batch = self._new_caches(), self._workload.batch

        def run() -> list[Any]:
            with recorded(self._target):
                logits = self._model(mx.zeros((batch, tokens), mx.int32), cache=caches)
            return [logits, *_states(caches)]

        return count_nodes(run)

    def _given_modules(self) -> list[Leaf]:
        count = self._modules.count()
        # A call can add arrays to modules, such as tables of frequencies.
        if count != self._counted:
            self._counted, self._leaves = count, list(self._modules.leaves())
        if self._is_first:
            # What a class makes for itself is computed by the first call that needs it, once.
            return [leaf for leaf in self._leaves if leaf.role == "weight"]
        return self._leaves


def _states(caches: list[Any]) -> list[Any]:
    """Return what mlx-lm evaluates after a chunk, in its order."""
    import mlx.core as mx

    result: list[Any] = []
    # mx.eval flattens its argument depth first.
    waiting = [cache.state for cache in reversed(caches)]
    while waiting:
        state = waiting.pop()
        if isinstance(state, mx.array):
            result.append(state)
        elif isinstance(state, (list, tuple)):
            waiting += reversed(state)
    return result


Sample = Callable[[Any], list[Any]]


def checked_tokens(logits: Any) -> list[Any]:
    """Return the tokens of all positions, and their log probabilities.

    Source: mlx-lm generate.py, speculative_generate_step.
    """
    import mlx.core as mx

    logits = logits.squeeze(0)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [mx.argmax(logprobs, axis=-1), logprobs]


def drafted_token(logits: Any) -> list[Any]:
    """Return the token of the last position, the only thing that drafting keeps."""
    return checked_tokens(logits[:, -1:, :])[:1]


def sampled_token(logits: Any) -> list[Any]:
    """Return the token and the log probabilities; source: mlx-lm generate.py, _step."""
    import mlx.core as mx

    logits = logits[:, -1, :]
    if len(logits) > 1:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [mx.argmax(logprobs, axis=-1), logprobs]
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)]
