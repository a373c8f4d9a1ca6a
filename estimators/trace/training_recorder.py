"""mlx-lm's trainer on batches of one shape, recorded call by call.

mlx_lm/tuner/trainer.py runs as it is, but for what it shows and saves. The function that it gives
to mlx.compile is recorded whenever the trainer calls it, and fused as MLX fuses it
(compiled_functions.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Recipe
from memfit.estimators.trace.compiled_functions import fuse
from memfit.estimators.trace.gradient_stubs import evaluated_checkpoint, resolved, training_stubs
from memfit.estimators.trace.graph_format import Array, Call, Node
from memfit.estimators.trace.kernel_stubs import RANDOM, TraceTarget, library_for, recorded
from memfit.estimators.trace.leaves import Leaf, leaves_of
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.loop_guard import MAX_SLICES, LoopError, few_slices, shortened
from memfit.estimators.trace.recording import MAX_NODES, RecordedGraph, TooLargeError, record_call
from memfit.estimators.trace.schedule import unmerged

# Of a step whose loops over tokens are traced whole, before operations are fused: about 4 s.
_MAX_LOOP_NODES = 90_000
# Steps with an accumulation are of three kinds, whatever their number.
KINDS = 3
_NEVER = 10**9
OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "muon": "Muon",
    "sgd": "SGD",
    "adafactor": "Adafactor",
}
TrainingPhase = Literal["validation", "first", "later"]
GRADIENTS, LOGITS = "gradients", "logits and loss"


class TrainingCall(NamedTuple):
    """One call of the trainer, with names for some of its arrays."""

    phase: TrainingPhase
    call: Call
    labels: Mapping[int, str]


class Training(NamedTuple):
    """A recorded run: the bytes of every parameter, and the calls."""

    frozen: Mapping[str, int]
    trained: Mapping[str, int]
    optimizer: Mapping[str, int]
    calls: tuple[TrainingCall, ...]
    constants: int
    """Buffers that the compiled steps keep for each length of batches."""


def record_training(
    model: Any,
    recipe: Recipe,
    tokens: int,
    target: TraceTarget,
    *,
    validated: int | None = None,
    is_whole: bool = False,
    loops: bool = False,
    iterations: int | None = None,
) -> Training:
    """Return the steps of a run on batches of ``tokens`` tokens; call it inside `tracing`.

    ``validated`` is the length of the longest batch of the validation, None without one. The steps
    until the first update are there if it ``is_whole``: they are almost the same, without a loop.
    A class that ``loops`` over tokens is traced with fewer of its frozen layers, of which only one
    is computed at a time; with ``iterations`` its loops end after that many. The model has to be
    restored afterwards.

    Raises:
        GraphError: when a step cannot be recorded.
        UnsupportedError: when there are fewer layers than the recipe trains, or nothing to train.
    """
    library = library_for(target.backend)
    repeated = _repeated_layers(model.layers, recipe) if loops else 0
    optimizer = prepare(library.load, model, recipe)
    run = _Run(library, model, recipe, target, loops=loops, iterations=iterations)
    with _refusals(model):
        checked = () if validated is None else (run.validation(validated),)
        with _without_first(model, repeated):
            steps = tuple(run.steps(optimizer, tokens, is_whole=is_whole))
    frozen, trained = _parameters(model)
    state = {leaf.name: leaf.array.nbytes for leaf in leaves_of({"": optimizer.state}, "", "cache")}
    return Training(frozen, trained, state, (*checked, *steps), run.constants)


@contextmanager
def _refusals(model: Any) -> Iterator[None]:
    kind = type(model).__module__.rpartition(".")[2]
    try:
        yield
    except (LoopError, TooLargeError):
        text = f"{kind}: a training step has more operations than can be traced"
        raise TooLargeError(text) from None
    except RuntimeError as error:
        # mlx/primitives.cpp, QuantizedMatmul::vjp
        if "no gradient wrt the quantized" not in str(error):
            raise
        text = "full: quantised weights have no gradient; train an adapter, or unquantised weights"
        raise UnsupportedError(text) from None
    except ValueError as error:
        # mlx/primitives.cpp; a kernel that a class writes in Python has no gradient.
        if "vjp] Not implemented" not in str(error):
            raise
        text = f"{kind}: mlx-lm cannot train it: one of its operations has no gradient"
        raise UnsupportedError(text) from None


def _repeated_layers(layers: Any, recipe: Recipe) -> int:
    """Return how many of the first layers are frozen, and are there again in the same order."""
    from mlx.utils import tree_flatten

    flat: Any = [tree_flatten(layer.parameters()) for layer in layers]
    kinds = [[(path, array.shape, array.dtype) for path, array in each] for each in flat]
    # Each kind of layer has to stay; with all layers trained none can go.
    trained = recipe.num_layers if recipe.num_layers > 0 else len(kinds)
    repeats = (count for count in range(1, len(kinds)) if kinds[count:] == kinds[:-count])
    period = next(repeats, len(kinds))
    return max(0, len(kinds) - max(trained, period)) // period * period


@contextmanager
def _without_first(model: Any, count: int) -> Iterator[None]:
    """Take the first layers out of the list of all, of which ``model.layers`` may be a copy."""
    last = model.layers[-1]
    children = (child for module in model.modules() for child in module.values())
    layers = next(child for child in children if isinstance(child, list) and last is child[-1])
    removed = layers[:count]
    del layers[:count]
    try:
        yield
    finally:
        layers[:0] = removed


def prepare(load: Callable[[str], Any], model: Any, recipe: Recipe) -> Any:
    """Freeze the model and add what is trained, as mlx_lm/lora.py does; return the optimizer.

    ``load`` imports a module of MLX or mlx-lm.

    Raises:
        UnsupportedError: when there are fewer layers than the recipe trains, or nothing to train.
    """
    if recipe.num_layers > len(model.layers):
        raise UnsupportedError(
            f"num_layers {recipe.num_layers}: the model has {len(model.layers)} layers, -1 is all"
        )
    model.freeze()
    if recipe.fine_tune_type == "full":
        for layer in model.layers[-max(recipe.num_layers, 0) :]:
            layer.unfreeze()
    else:
        settings = {"rank": recipe.rank, "scale": recipe.scale, "dropout": recipe.dropout}
        keys = {} if recipe.keys is None else {"keys": recipe.keys}
        load("mlx_lm.tuner.utils").linear_to_lora_layers(
            model, recipe.num_layers, settings | keys, use_dora=recipe.fine_tune_type == "dora"
        )
    if not _parameters(model)[1]:
        raise UnsupportedError("keys: the trained layers have no such module, nothing is trained")
    kind = getattr(load("mlx.optimizers"), OPTIMIZERS[recipe.optimizer])
    return kind(learning_rate=1e-5)


def _parameters(model: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of the frozen and of the trained parameters by path."""
    from mlx.utils import tree_flatten

    every: Any = tree_flatten(model.parameters())
    trained: Any = dict(tree_flatten(model.trainable_parameters()))
    frozen = {path: array.nbytes for path, array in every if path not in trained}
    return frozen, {path: array.nbytes for path, array in trained.items()}


class _Run:
    def __init__(
        self,
        library: Any,
        model: Any,
        recipe: Recipe,
        target: TraceTarget,
        *,
        loops: bool,
        iterations: int | None,
    ) -> None:
        self._library, self._model, self._recipe = library, model, recipe
        self._target, self._is_loop, self._iterations = target, loops, iterations
        # What `record_call` leaves out of MAX_NODES; the shortened loops have few enough.
        self._before = MAX_NODES - _MAX_LOOP_NODES if loops and iterations is None else 0
        self._trainer = library.load("mlx_lm.tuner.trainer")
        self._random: list[Any] = []
        # Steps until the first update of the optimizer.
        self._first = 0
        self._calls: list[TrainingCall] = []
        self._constants: list[int] = []
        # Of one call: the gradients that the optimizer gets, and the elements of the logits.
        self._gradients: list[Any] = []
        self._logits = 0

    @property
    def constants(self) -> int:
        """Constants of the graphs that mx.compile keeps for one length (trainer.py, step).

        They differ by whether gradients are given, and whether the optimizer updates.
        """
        most = max(self._constants, default=0)
        return most * min(KINDS, self._recipe.grad_accumulation_steps)

    def validation(self, tokens: int) -> TrainingCall:
        """Return one batch of the validation (trainer.py, evaluate)."""
        given = self._batch(tokens)
        state: list[Any] = [self._model]
        self._model.eval()

        def run() -> list[Any]:
            with (
                recorded(self._target),
                changed(self._library.core, stubs),
                self._loops(tokens),
            ):
                loss, count = self._trainer.default_loss(self._model, *given["batch"])
            return [loss * count, count]

        stubs = {"checkpoint": evaluated_checkpoint}
        with self._changed_class(), self._watched():
            if self._recipe.grad_checkpoint:
                self._trainer.grad_checkpoint(self._model.layers[0])
            leaves = leaves_of(state, 0, "weight"), leaves_of(given, "batch", "tokens")
            read = [leaf for each in leaves for leaf in each]
            graph = record_call(run, read, recorded_before=self._before)
        call = unmerged(_call(graph, graph.outputs))
        return TrainingCall("validation", call, self._labels(call, ()))

    def steps(self, optimizer: Any, tokens: int, *, is_whole: bool) -> list[TrainingCall]:
        """Return the steps until the second update, or those after the first one."""
        import mlx.core as mx

        accumulation = min(KINDS, self._recipe.grad_accumulation_steps)
        self._first = accumulation if is_whole else 0
        if not is_whole:
            optimizer.init(self._model.trainable_parameters())
        arguments = self._trainer.TrainingArgs(
            batch_size=self._recipe.batch_size,
            iters=accumulation + self._first,
            steps_per_report=_NEVER,
            steps_per_save=_NEVER,
            grad_checkpoint=self._recipe.grad_checkpoint,
            grad_accumulation_steps=accumulation,
        )
        self._random = [mx.zeros((2,), mx.uint32)]
        stubs = {
            **training_stubs(self._target),
            **{f"random.{name}": self._drawn(getattr(mx.random, name)) for name in RANDOM},
            "random.state": self._random,
            "compile": self._compile,
            "clear_cache": lambda: None,
            "set_wired_limit": lambda _: 0,
            "save_safetensors": lambda *_: None,
        }
        batches = [self._batch(tokens)["batch"]] * arguments.iters
        with self._changed_class(), self._watched(), changed(self._library.core, stubs):
            self._trainer.train(
                self._model, optimizer, [], None, arguments, iterate_batches=lambda **_: batches
            )
        return self._calls

    @contextmanager
    def _loops(self, tokens: int) -> Iterator[None]:
        """Limit loops over the tokens of a batch, of which the last is only predicted."""
        few = self._iterations
        with (
            # The nodes of a loop are counted when it is exported.
            few_slices(2 * MAX_SLICES * (1 + bool(few)) if self._is_loop else MAX_SLICES),
            shortened(self._library, tokens - 1, few) if few else nullcontext(),
        ):
            yield

    def _batch(self, tokens: int) -> dict[str, Any]:
        import mlx.core as mx

        count = self._recipe.batch_size
        return {"batch": [mx.zeros((count, tokens), mx.int32), mx.zeros((count, 2), mx.int32)]}

    def _changed_class(self) -> Any:
        # The trainer gives the class of the first layer another __call__ (grad_checkpoint).
        kind = type(self._model.layers[0])
        return changed(kind, {"__call__": kind.__call__})

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """See the logits and the gradients of each call."""
        average = self._trainer.average_gradients
        entropy = self._trainer.nn.losses.cross_entropy

        def averaged(gradients: Any) -> Any:
            self._gradients = _arrays(gradients)
            return average(gradients)

        def measured(logits: Any, targets: Any, **settings: Any) -> Any:
            self._logits = logits.size
            return entropy(logits, targets, **settings)

        with changed(
            self._trainer, {"average_gradients": averaged, "nn.losses.cross_entropy": measured}
        ):
            yield

    def _drawn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a random function that takes a key of its own, as MLX's global state gives."""

        def draw(*args: Any, key: Any = None, **named: Any) -> Any:
            import mlx.core as mx

            if key is None:
                self._random[0], key = mx.random.split(self._random[0])
            return original(*args, key=key, **named)

        return draw

    def _compile(self, step: Any = None, *, inputs: Any = (), **_: Any) -> Any:
        if step is None:
            return lambda function: self._compile(function, inputs=inputs)
        # What a class compiles inside the step is part of it (compile.cpp, compile).
        return (lambda *args: self._step(step, inputs, args)) if inputs else step

    def _step(self, step: Any, state: Any, args: Any) -> tuple[Any, Any, Any]:
        import mlx.core as mx

        batch, gradients, updates = args
        given = {"batch": list(batch), "gradients": gradients}
        left: dict[str, Any] = {}
        self._gradients = []

        def run() -> list[Any]:
            with self._loops(batch[0].shape[1]):
                loss, count, left["gradients"] = step(given["batch"], given["gradients"], updates)
            # In the order of a compiled function: its results, then its state.
            results = [loss, count, *_arrays(left["gradients"])]
            left["results"], left["state"] = len(results), len(_arrays(state))
            return [*results, *_arrays(state), *self._gradients]

        graph = record_call(run, self._leaves(state, given), recorded_before=self._before)
        self._constants.append(graph.constants)
        count = left["results"]
        arrays = list(graph.arrays)
        nodes, ends = resolved(graph.nodes, graph.outputs[: count + left["state"]], arrays)
        nodes = fuse(nodes, ends, arrays)
        # The trainer adds up loss and count; it evaluates state, both sums and the gradients.
        sums = [_sum(end, arrays, nodes) for end in ends[:2]]
        evaluated = (*ends[count:], *sums, *ends[2:count])
        made = tuple(dict.fromkeys(i for i in evaluated if arrays[i].role != "weight"))
        known = graph.outputs[count + left["state"] :] or ends[2:count]
        call = _call(RecordedGraph(tuple(arrays), tuple(nodes), made), made)
        phase: TrainingPhase = "first" if len(self._calls) < self._first else "later"
        self._calls.append(TrainingCall(phase, call, self._labels(call, known)))
        # The next step begins with arrays that are computed.
        for tree, keys in ((state, (0, 1, 2)), (left, ("gradients",))):
            for leaf in (leaf for key in keys for leaf in leaves_of(tree, key, "cache")):
                leaf.put(mx.zeros(leaf.array.shape, leaf.array.dtype))
        return mx.array(0), mx.array(0), left["gradients"]

    def _leaves(self, state: Any, given: dict[str, Any]) -> list[Leaf]:
        trained = set(map(id, _arrays(self._model.trainable_parameters())))
        return [
            *(
                leaf._replace(role="cache" if id(leaf.array) in trained else "weight")
                for leaf in leaves_of(state, 0, "weight")
            ),
            *leaves_of(state, 1, "cache"),
            *leaves_of(state, 2, "cache"),
            *leaves_of(given, "gradients", "cache"),
            *leaves_of(given, "batch", "tokens"),
        ]

    def _labels(self, call: Call, gradients: Any) -> dict[int, str]:
        logits = (i for i, array in enumerate(call.arrays) if array.size == self._logits)
        return dict.fromkeys(logits, LOGITS) | dict.fromkeys(gradients, GRADIENTS)


def _sum(term: int, arrays: list[Array], nodes: list[Node]) -> int:
    scalar = arrays[term]
    before, after = len(arrays), len(arrays) + 1
    arrays += [scalar._replace(role="constant"), scalar]
    nodes.append(Node("Add", (before, term), (after,)))
    return after


def _call(graph: RecordedGraph, evaluated: tuple[int, ...]) -> Call:
    return Call(
        # Nothing shows it among the calls of a generation, so it needs no phase of its own.
        phase="first_chunk",
        tokens=0,
        position=0,
        arrays=graph.arrays,
        nodes=graph.nodes,
        evaluated=evaluated,
        held=evaluated,
    )


def _arrays(tree: Any) -> list[Any]:
    return [leaf.array for leaf in leaves_of({"": tree}, "", "cache")]
