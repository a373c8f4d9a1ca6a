"""A run of mlx-vlm with images: its own generate_step inside one export, cut where it evaluates.

What it is given are real arrays (vision_inputs.py); weights are placeholders.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.trace.cache_stepper import Stepper
from memfit.estimators.trace.graph_format import Array, Call
from memfit.estimators.trace.isolation import ANSWERS, array_stubs, original
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for, recorded
from memfit.estimators.trace.leaves import Leaf, Modules
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.loop_guard import MAX_SLICES, LoopError, few_slices
from memfit.estimators.trace.recording import GraphError, record_call
from memfit.estimators.trace.schedule import unmerged
from memfit.estimators.trace.vision_inputs import inputs
from memfit.estimators.trace.vision_loops import (
    BY_POSITION,
    OWN,
    TOKENS,
    batch_generating,
    denoising,
    few_places,
)

# At each end of a prompt: a first chunk and one after others, a whole last one and what is left.
_RECORDED_CHUNKS = 2
_NO_ARRAYS = (str, bytes, int, float, type, FunctionType, ModuleType)

# What classes compute again in each layer from the same array. Export would merge it into one node.
_AGAIN = (
    *("arange", "broadcast_to", "concatenate", "cos", "exp", "expand_dims", "full", "outer"),
    *("repeat", "sin", "take", "tile", "where"),
)
_AGAIN_BY_METHOD = ("astype",)

Kind = Literal["eval", "async_eval", "clear_cache"]


class RunStep(NamedTuple):
    """One evaluation of a run, or the return of freed buffers."""

    kind: Kind
    evaluated: tuple[int, ...]
    """Positions of arrays, as are those that Python refers to then."""
    held: tuple[int, ...]


class VisionRun(NamedTuple):
    """The graph of a run and its cuts."""

    call: Call
    """All nodes; ``held`` are the embeddings with the features of the images."""
    cuts: tuple[RunStep, ...]
    decodes: int
    """The position of the first cut that belongs to decoding."""


class _OpenStep(NamedTuple):
    kind: Kind
    evaluated: list[Any]
    held: list[Any]


def record_vision(
    model: Any,
    modules: Modules,
    plan: ImagePlan,
    workload: Workload,
    target: TraceTarget,
    caches: list[Any],
) -> VisionRun:
    """Return the run of a prompt until its second token; call it inside `tracing`.

    ``caches`` are empty, and filled by it. The model has to be restored afterwards.

    Raises:
        GraphError: when the class computes something from values that a trace does not have.
    """
    recorder = _RunRecorder(model, plan, workload, target, caches)
    leaves = [leaf for leaf in modules.leaves() if not _is_value(leaf)]
    recorder.weights = lambda: {id(leaf.owner[leaf.key]) for leaf in leaves}
    try:
        graph = record_call(recorder.run, leaves, computes=True)
    except LoopError:
        raise GraphError("the class loops over tokens or patches, too many to trace") from None
    embedded, *groups, _ = _split(graph.outputs, recorder.counts)
    call = Call(
        phase="first_chunk",
        tokens=workload.prompt_tokens,
        position=0,
        arrays=_with_roles(graph.arrays, recorder.given),
        nodes=graph.nodes,
        evaluated=tuple(i for group in groups for i in group),
        held=embedded,
    )
    pairs = zip(recorder.cuts, groups[::2], groups[1::2], strict=True)
    cuts = tuple(RunStep(cut.kind, ends, tuple(dict.fromkeys(held))) for cut, ends, held in pairs)
    return VisionRun(unmerged(call), cuts, recorder.decodes)


def _is_value(leaf: Leaf) -> bool:
    """Whether it is a vector of the class itself, which keeps its values.

    llava_next.py turns its image_newline into an array of NumPy.
    """
    import mlx.core as mx

    if "." in leaf.name or len(leaf.array.shape) != 1:
        return False
    mx.eval(leaf.array)
    return True


class _RunRecorder:
    """One call of mlx-vlm's generate_step, or of its loop that denoises a canvas."""

    weights: Callable[[], set[int]]
    """Return the placeholders, which are never freed."""

    def __init__(
        self,
        model: Any,
        plan: ImagePlan,
        workload: Workload,
        target: TraceTarget,
        caches: list[Any],
    ) -> None:
        self._model, self._workload, self._target = model, workload, target
        self._caches = caches
        self._library = library_for(target.backend)
        diffusion = self._library.load("mlx_vlm.generate.diffusion")
        self._denoises = diffusion.is_diffusion_model(model)
        if self._denoises and workload.batch > 1:
            raise GraphError("mlx-vlm denoises one prompt at a time: leave out batch")
        self._loop = self._library.load("mlx_vlm.generate.ar")
        one = self._loop.generate_step if workload.batch == 1 else self._loop._generate_batch
        self._step = diffusion.stream_diffusion_generate if self._denoises else one
        self.given = inputs(model, plan, workload)
        features = sum(image.feature_count - image.added for image in plan.images)
        self._features = features * workload.batch
        self.cuts: list[_OpenStep] = []
        self.decodes = self._tokens = 0
        self.counts: list[int] = []
        self._embedded: list[Any] = []
        self._sampled: set[int] = set()
        self._made: list[Any] = []
        self._placeholders: set[int] = set()
        self._stepper = Stepper(caches, workload)
        self._chunks = 0

    def run(self) -> list[Any]:
        """Return the embeddings, then what each cut evaluates and what Python holds then."""
        self._placeholders = self.weights()
        hooks = {
            "eval": self._hook("eval"),
            "async_eval": self._hook("async_eval"),
            "clear_cache": self._hook("clear_cache"),
        }
        # Of each call that is recorded, as in a trace of mlx-lm.
        chunks = ceil_div(self._workload.prompt_tokens - 1, self._workload.prefill_step)
        core, kind, language = self._library.core, type(self._model), self._model.language_model
        methods = {name: self._computed(name) for name in ANSWERS}
        methods |= {name: self._apart(original(name)) for name in _AGAIN_BY_METHOD}
        # The loop that denoises has the prompt embedded by the encoder.
        owner, embed = kind, "get_input_embeddings"
        made = {}
        if self._denoises:
            made = {"make_cache": lambda _: self._caches}
            owner, embed = type(self._model.model.encoder), "_embed_inputs"
        with (
            recorded(self._target),
            few_slices(MAX_SLICES * max(1, min(chunks, 2 * _RECORDED_CHUNKS))),
            array_stubs(methods),
            changed(core, hooks | {name: self._apart(getattr(core, name)) for name in _AGAIN}),
            changed(owner, {embed: self._embed(getattr(owner, embed))}),
            changed(kind, made),
            changed(self._loop, OWN),
            few_places(sys.modules[kind.__module__], self.given["input_ids"].size, self._features),
            changed(type(language), {"__call__": self._few_chunks(type(language).__call__)}),
        ):
            for _ in self._generate():
                pass
        groups = [self._embedded]
        for cut in self.cuts:
            groups += [cut.evaluated, cut.held]
        groups.append(self._made)
        self.counts = [len(group) for group in groups]
        return [array for group in groups for array in group]

    def _generate(self) -> Iterator[Any]:
        workload = self._workload
        if self._denoises:
            return denoising(self._step, self._model, self.given, workload.prefill_step)
        if workload.batch > 1:
            return batch_generating(self._loop, self._model, self.given, workload)
        rest = {name: array for name, array in self.given.items() if name not in BY_POSITION}
        ids, pixels, mask = map(self.given.get, BY_POSITION)
        steps: Iterator[Any] = self._step(
            ids,
            self._model,
            pixels,
            mask,
            max_tokens=TOKENS,
            temperature=0.0,
            prompt_cache=self._caches,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
            **rest,
        )
        return steps

    def _hook(self, kind: Kind) -> Callable[..., None]:
        def cut(*trees: Any) -> None:
            if kind == "clear_cache":
                self.cuts.append(_OpenStep(kind, [], []))
                return
            self._sampled.update(map(id, _arrays(trees)))
            held = [self.given, _variables(sys._getframe(1), self._step.__code__)]
            self.cuts.append(_OpenStep(kind, self._now(trees), self._now(held)))

        return cut

    def _now(self, tree: Any) -> list[Any]:
        """Return arrays as they are: a later assignment to a slice changes the array itself."""
        return [copy(array) for array in _arrays(tree) if id(array) not in self._placeholders]

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with results that export merges with no others: it keeps outputs."""
        import mlx.core as mx

        def made(*args: Any, **named: Any) -> Any:
            out = function(*args, **named)
            if isinstance(out, mx.array):
                self._made.append(copy(out))
            return out

        return made

    def _embed(self, embed: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            out = embed(*args, **named)
            self._embedded += self._now(out)
            return out

        return watched

    def _few_chunks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the language model's call without the chunks in the middle of a long prompt.

        None is larger than the last whole one, so that caches alone go on.
        """
        workload = self._workload
        count = ceil_div(workload.prompt_tokens - 1, workload.prefill_step)
        left_out = range(_RECORDED_CHUNKS, count - _RECORDED_CHUNKS)

        def called(language: Any, *args: Any, **named: Any) -> Any:
            nonlocal left_out
            if language is not self._model.language_model:
                return call(language, *args, **named)
            if "n_to_process" not in named:
                self._tokens += 1
                if self._tokens == TOKENS and not self._denoises:
                    self.decodes = len(self.cuts)
                return call(language, *args, **named)
            self._chunks += 1
            chunk = self._chunks - 1
            if left_out and chunk == left_out[0]:
                try:
                    self._stepper.caches = named["cache"]  # the loop's own, of a batch
                    self._stepper.learn()
                except UnsupportedError:  # how a cache goes on is not known
                    left_out = range(0)
            if chunk not in left_out:
                return call(language, *args, **named)
            if chunk == left_out[-1]:
                self._stepper.jump(left_out.stop * workload.prefill_step)
            return None

        return called

    def _computed(self, name: str) -> Callable[..., Any]:
        """Return a method of mx.array that computes what does not depend on a weight."""
        compute = original(name)

        def answer(array: Any) -> Any:
            try:
                return compute(array)
            except (RuntimeError, ValueError):
                if self._denoises and self.cuts:
                    # Of a canvas the loop reads what is accepted, which evaluates it.
                    self.decodes = self.decodes or len(self.cuts)
                    self._hook("eval")(array)
                    return ANSWERS[name](array)
                # The loop and some classes read the token that was sampled; any one will do.
                if id(array) in self._sampled or (self._sampled and _is_token(array)):
                    return ANSWERS[name](array)
                text = "the class computes with values of features, which a trace does not have"
                raise GraphError(text) from None

        return answer


def _is_token(array: Any) -> bool:
    import mlx.core as mx

    return bool(array.size == 1 and mx.issubdtype(array.dtype, mx.integer))


def _split(outputs: Sequence[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
    groups, start = [], 0
    for count in counts:
        groups.append(tuple(outputs[start : start + count]))
        start += count
    return groups


def _with_roles(arrays: Sequence[Array], given: Mapping[str, Any]) -> tuple[Array, ...]:
    """Mark what the run was given: it is there as long as the run."""
    shapes = [tuple(array.shape) for array in _arrays(given)]
    result = []
    for array in arrays:
        if array.role == "constant" and not array.name and array.shape in shapes:
            shapes.remove(array.shape)
            result.append(array._replace(role="tokens"))
        else:
            result.append(array)
    return tuple(result)


def _variables(frame: Any, code: Any) -> list[dict[str, Any]]:
    """Return the variables of a running function, and of all that it has called."""
    result = []
    while frame is not None:
        # The recorder's own frames are not there in a run.
        if frame.f_globals is not globals():
            result.append(dict(frame.f_locals))
        if frame.f_code is code:
            break
        frame = frame.f_back
    return result


def _arrays(tree: Any) -> Iterator[Any]:
    """Yield the arrays that Python reaches from a value, each once."""
    import mlx.core as mx

    waiting, seen = [tree], set[int]()
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _NO_ARRAYS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, (list, tuple, set)):
            waiting += reversed(list(value))
        else:
            if isinstance(value, dict):
                waiting += reversed(list(value.values()))
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
