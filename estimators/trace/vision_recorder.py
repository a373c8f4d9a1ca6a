"""A run of mlx-vlm with images: its own generate_step inside one export, cut where it evaluates.

Ids, grids and masks are real arrays, because classes compute shapes from them; weights are
placeholders. Pixels are real too, all equal, so that they take no memory.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.plan import ImagePlan, InputArray
from memfit.estimators.trace.cache_stepper import Stepper
from memfit.estimators.trace.graph_format import Array, Call
from memfit.estimators.trace.isolation import ANSWERS, array_stubs, original
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for, recorded
from memfit.estimators.trace.leaves import Leaf, Modules
from memfit.estimators.trace.libraries import Absent, Silent, changed
from memfit.estimators.trace.loop_guard import LoopError, few_slices
from memfit.estimators.trace.recording import GraphError, record_call
from memfit.estimators.trace.schedule import unmerged

# The first token and the one after it: all others are equal.
_TOKENS = 2
# Of a canvas: one from noise alone, one with the logits before it, and the last one.
_DENOISING_STEPS = 3
_TEXT_TOKEN = 1
# Of the embeddings of all tokens; a list of tokens is shorter.
_LARGE_MASK = 2**20
# At each end of a prompt: a first chunk and one after others, a whole last one and what is left.
_RECORDED_CHUNKS = 2
# Placeholders of classes that look for other ids than their config names.
_PLACEHOLDERS = {"phi3_v": -1}
# Of generate_step by position; stream_generate passes the rest on to the class.
_BY_POSITION = ("input_ids", "pixel_values", "attention_mask")
_NO_ARRAYS = (str, bytes, int, float, type, FunctionType, ModuleType)

# What classes compute again in each layer from the same array. Export would merge it into one node.
_AGAIN = (
    *("arange", "broadcast_to", "concatenate", "cos", "exp", "expand_dims", "full", "outer"),
    *("repeat", "sin", "take", "tile", "where"),
)
_AGAIN_BY_METHOD = ("astype",)

# A loop looks for functions and classes in the process, which may have imported mlx-vlm too.
_OWN = {"_generate_module_override": lambda _, own: own}

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


class _NoDraft(Silent):
    """mlx-vlm's SpeculativePrefill without a draft model, which keeps nothing."""

    kwargs: Mapping[str, Any] = {}

    def finish(self, output: Any) -> Any:
        return output


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
            few_slices(),
            array_stubs(methods),
            changed(core, hooks | {name: self._apart(getattr(core, name)) for name in _AGAIN}),
            changed(owner, {embed: self._embed(getattr(owner, embed))}),
            changed(kind, made),
            changed(self._loop, _OWN),
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
        rest = {name: array for name, array in self.given.items() if name not in _BY_POSITION}
        ids, pixels, mask = map(self.given.get, _BY_POSITION)
        steps: Iterator[Any] = self._step(
            ids,
            self._model,
            pixels,
            mask,
            max_tokens=_TOKENS,
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
                if self._tokens == _TOKENS and not self._denoises:
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


@contextmanager
def few_places(module: ModuleType, tokens: int, features: int) -> Iterator[None]:
    """Give a class a NumPy that does not list which embeddings features replace: any will do.

    ``features`` of the ``tokens`` are replaced. The list, and the mask that it is made of, take
    gigabytes for a long prompt.
    """
    import mlx.core as mx

    numpy: Any = getattr(module, "np", None)

    def where(mask: Any, *rest: Any) -> Any:
        if rest or not isinstance(mask, mx.array) or mask.size < _LARGE_MASK or mask.size % tokens:
            return numpy.where(mask, *rest)
        places = mx.broadcast_to(mx.array(0, mx.uint32), (mask.size // tokens * features,))
        mx.eval(places)
        return (places,)

    replaced = {"np": SimpleNamespace(**{**vars(numpy), "where": where})} if numpy else {}
    with changed(module, replaced):
        yield


def denoising(
    step: Callable[..., Iterator[Any]], model: Any, given: Mapping[str, Any], prefill_step: int
) -> Iterator[Any]:
    """Return a run of mlx-vlm's stream_diffusion_generate, which ends after a whole canvas."""
    rest = {name: array for name, array in given.items() if name not in _BY_POSITION}
    no_words = SimpleNamespace(reset=bool, finalize=bool, last_segment="")
    return step(
        model,
        SimpleNamespace(detokenizer=no_words),
        SimpleNamespace(stopping_criteria=lambda _: True),
        *map(given.get, _BY_POSITION),
        max_tokens=_TOKENS,
        skip_special_token_ids=(),
        temperature=0.0,
        max_denoising_steps=_DENOISING_STEPS,
        diffusion_full_canvas=True,
        prefill_step_size=prefill_step,
        **rest,
    )


def batch_generating(
    loop: Any, model: Any, given: Mapping[str, Any], workload: Workload
) -> Iterator[Any]:
    """Run mlx-vlm's batch_generate until its second token, on what its processor would give."""
    replaced = _OWN | {
        "prepare_inputs": lambda *_, **__: given,
        "apply_chat_template": lambda *_, **__: "",
        "should_add_special_tokens": lambda *_: False,
        "SpeculativePrefill": _NoDraft,
        "wired_limit": Silent,
    }
    with changed(loop, replaced):
        texts, _ = loop._generate_batch(
            model,
            Absent,  # it stops at the first token, when the second is computed
            [""] * workload.batch,
            max_tokens=_TOKENS,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
        )
    return iter(texts)


def inputs(model: Any, plan: ImagePlan, workload: Workload) -> dict[str, Any]:
    """Return the arrays of a prompt that begins with its images."""
    import mlx.core as mx

    ids: list[int] = []
    rows, plan = workload.batch, replace(plan, arrays=tuple(_of_rows(plan, workload.batch)))
    for image in plan.images:
        for run in image.tokens:
            ids += [_token(model, run.kind)] * run.count
    ids += [_TEXT_TOKEN] * max(1, workload.prompt_tokens - plan.added - len(ids))
    given: dict[str, Any] = {
        "input_ids": mx.array([ids] * rows),
        "attention_mask": mx.ones((rows, len(ids)), mx.int32),
    }
    for name in dict.fromkeys(array.name for array in plan.arrays):
        result = [_input(array, plan) for array in plan.arrays if array.name == name]
        given[name] = result[0] if len(result) == 1 else result
    if model.config.model_type == "diffusion_gemma":
        # By it an image attends to all of itself.
        given["mm_token_type_ids"] = (given["input_ids"] == _token(model, "image")).astype(mx.int32)
    if "images_spatial_crop" in given:
        # deepseek_vl_v2.py and those of DeepSeek-OCR put features where it is true.
        given["images_seq_mask"] = given["input_ids"] == _token(model, "image")
        crops = given["images_spatial_crop"]
        if crops.ndim > 2:
            # It reads a row for each tile, also beyond the end; a row of zeros ends its loop.
            rest = given["pixel_values"].shape[1] - crops.shape[1]
            given["images_spatial_crop"] = mx.pad(crops, [(0, 0), (0, rest), (0, 0)])
    mx.eval(given)
    return given


def _of_rows(plan: ImagePlan, rows: int) -> Iterator[InputArray]:
    """Yield the arrays of prompts with the same images: longer ones, or a longer list of them."""
    names = [array.name for array in plan.arrays]
    if len(set(names)) < len(names):
        yield from plan.arrays * rows
        return
    for array in plan.arrays:
        first, *others = array.shape
        yield replace(array, shape=(first * rows, *others), values=array.values * rows)


def _input(array: InputArray, plan: ImagePlan) -> Any:
    import mlx.core as mx

    dtype = getattr(mx, array.dtype)
    shapes = next((each.values for each in plan.arrays if each.name == "spatial_shapes"), ())
    if array.name == "pixel_attention_mask" and shapes:
        # Of each image the patches that it has; the others fill the row.
        patches = mx.array([[height * width] for height, width in shapes])
        return (mx.arange(array.shape[1]) < patches).astype(dtype)
    if array.values:
        return mx.array(array.values, dtype)
    # One element in memory, whatever the shape.
    return mx.broadcast_to(mx.array(1, dtype), array.shape)


def _token(model: Any, kind: str) -> int:
    """Return the id of a placeholder, and set every name of it in the class's config to that."""
    if kind == "text":
        return _TEXT_TOKEN
    if own := _PLACEHOLDERS.get(model.config.model_type):
        return own
    names = (f"{kind}_token_index", f"{kind}_token_id", f"{kind}_patch_id")
    tokens = {name: getattr(model.config, name, None) for name in names}
    given = {name: token for name, token in tokens.items() if isinstance(token, int)}
    token = next(iter(given.values()), _TEXT_TOKEN)
    for name in given:  # Where a config has two of them, the class reads either.
        setattr(model.config, name, token)
    return token


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
