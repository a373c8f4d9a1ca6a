"""What MLX exports of a call, as arrays and nodes with numbers for names."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from io import StringIO
from itertools import chain
from typing import Any, NamedTuple

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.trace.compiled_functions import without_borders
from memfit.estimators.trace.graph_format import Argument, Array, Node
from memfit.estimators.trace.kernel_stubs import kernel_name
from memfit.estimators.trace.leaves import Leaf

# A trace keeps about 1.1 kB per node: 92,592 nodes (Falcon-H1 7B) took 154 MB and 2.4 s in all.
MAX_NODES = 200_000
# A loop over tokens also keeps arrays: 49,620 nodes (Jamba 1.5 mini) took 264 MB and 2.3 s.
MAX_LOOP_NODES = 60_000
_NOT_EXPORTED = "Unable to get state for primitive "
# MLX needs about 400 bytes for each node in a row. Of a stack only the used pages take memory.
_DEEP_STACK_BYTES = 2**30


class GraphError(UnsupportedError):
    """The graphs of a run are too large to record, or MLX does not export one of them."""


class TooLargeError(GraphError):
    """The graphs of a run are too large to record."""


class RecordedGraph(NamedTuple):
    """The graph of one exported call."""

    arrays: tuple[Array, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    """Positions of the arrays that the function returned."""
    constants: int = 0
    """Arrays made outside of any argument; equal scalars are one (mlx compile.cpp)."""


def record_call(
    function: Callable[[], list[Any]],
    leaves: Sequence[Leaf],
    *,
    recorded_before: int = 0,
    computes: bool = False,
) -> RecordedGraph:
    """Return the graph of ``function``, called with a placeholder in place of every leaf.

    It ``computes`` if it evaluates arrays that do not depend on a placeholder.

    Raises:
        GraphError: when it and ``recorded_before`` have more nodes than ``MAX_NODES``, or MLX has
            no row for one of its primitives.
    """
    recorder = _Recorder(leaves, MAX_NODES - recorded_before)
    placed: list[tuple[Leaf, Any]] = []

    def call(*placeholders: Any) -> list[Any]:
        placed.extend(zip(leaves, placeholders, strict=True))
        for leaf, placeholder in placed:
            leaf.put(placeholder)
        return function()

    try:
        # An array that is not an argument would be exported as a constant.
        _export(recorder.take, call, [leaf.array for leaf in leaves], computes=computes)
    except ValueError as error:
        # mlx/export.cpp names the primitive.
        if _NOT_EXPORTED not in str(error):
            raise
        primitive = printable(str(error).rpartition(_NOT_EXPORTED)[2])
        raise GraphError(f"MLX does not export its operation {primitive}") from None
    finally:
        for leaf, placeholder in placed:
            # What the call itself has put into a cache stays there.
            if leaf.role != "cache" or leaf.owner[leaf.key] is placeholder:
                leaf.put(leaf.array)
    return recorder.finish()


def count_nodes(function: Callable[[], list[Any]]) -> int:
    """Return how many nodes compute the arrays that ``function`` returns; none is kept."""
    import mlx.core as mx

    drawing = StringIO()
    # One label for each primitive, and no Python object for any of them.
    run_unrecorded(lambda: mx.export_to_dot(drawing, *function()))
    return drawing.getvalue().count("[label")


def reject_large_loop(nodes: int) -> None:
    """Raise `GraphError` when the graphs of a loop over tokens have too many ``nodes``."""
    if nodes > MAX_LOOP_NODES:
        raise _too_large(f"would have about {nodes} operations, above the {MAX_LOOP_NODES}")


def _too_large(what: str) -> TooLargeError:
    return TooLargeError(
        f"the graphs of the run {what} that are traced; shorten the prompt or the prefill step"
    )


def _export(
    take: Callable[[Any], None],
    function: Callable[..., Any],
    arrays: list[Any],
    *,
    computes: bool = False,
) -> None:
    import mlx.core as mx

    stream = mx.default_stream(mx.default_device())

    def export() -> None:
        # MLX makes a stream for each thread and keeps it: the thread uses the caller's stream.
        # Only its own can compute.
        if not computes:
            mx.set_default_stream(stream)
        try:
            mx.export_function(take, function, *arrays)
        finally:
            if computes:
                mx.clear_streams()

    _deeply(export)


def _deeply(function: Callable[[], None]) -> None:
    """Call ``function`` on a deep stack: MLX walks graphs by recursion, and nothing checks it."""
    tasks, raised = [function], list[BaseException]()
    is_started = threading.Event()

    def call() -> None:
        # Until the caller is past starting it: an interrupt before that leaves no tasks to run.
        is_started.wait()
        try:
            for task in tasks:
                task()
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            raised.append(error)

    # In the caller's context the thread is part of the trace: isolation.py.
    thread = threading.Thread(target=copy_context().run, args=(call,), name="memfit-trace")
    try:
        _start_deep(thread)
        is_started.set()
        thread.join()
    except BaseException as error:  # Ctrl-C: nothing is put back while the thread still traces
        if is_started.is_set():
            _raise_in(thread, type(error))
            thread.join()
        tasks.clear()
        is_started.set()
        raise
    if raised:
        raise raised.pop()


def _start_deep(thread: threading.Thread) -> None:
    # The size is a setting of the process for threads that start from now on.
    before = threading.stack_size(_DEEP_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    import ctypes

    # Python raises an interrupt in the main thread only; this is how another gets it.
    identity = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(error))


class _EnoughError(Exception):
    """Ends an export once the function has run."""


def run_unrecorded(function: Callable[[], None]) -> None:
    """Run ``function`` as `record_call` would, and keep no graph."""

    def call() -> None:
        function()
        raise _EnoughError

    # Raised inside the function, it reaches the caller before MLX walks any graph.
    with suppress(_EnoughError):
        _export(lambda _: None, call, [])


class _Recorder:
    """Takes MLX's messages: inputs, outputs, constants, then every primitive."""

    def __init__(self, leaves: Sequence[Leaf], room: int) -> None:
        self._leaves = leaves
        self._room = room
        self._positions: dict[str, int] = {}
        self._arrays: list[Array] = []
        self._alike: dict[tuple[Any, ...], Array] = {}
        self._nodes: list[Node] = []
        self._outputs: list[Any] = []
        self._constants: set[tuple[str, str]] = set()

    def take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "primitive":
            self._take_node(message)
        elif kind == "inputs":
            # MLX lists inputs in the order of the arguments.
            for leaf, (key, shape, dtype) in zip(self._leaves, message["inputs"], strict=True):
                self._add(key, Array(tuple(shape), _name(dtype), leaf.role, leaf.name))
        elif kind == "outputs":
            self._outputs = message["outputs"]
        elif kind == "constants":
            for key, array in message["constants"]:
                name = _name(array.dtype)
                self._constants.add((name, str(array.item()) if array.ndim == 0 else key))
                self._add(key, Array(tuple(array.shape), _name(array.dtype), "constant"))

    def finish(self) -> RecordedGraph:
        outputs = tuple(map(self._made, self._outputs))
        # Only now are all functions complete.
        nodes, ends = without_borders(self._nodes, outputs, self._arrays)
        arrays, count = tuple(self._arrays), len(self._constants)
        return RecordedGraph(arrays, tuple(nodes), tuple(ends), count)

    def _take_node(self, message: dict[str, Any]) -> None:
        # In the callback: MLX stops at the exception, and memory does not grow further.
        if len(self._nodes) == self._room:
            raise _too_large(f"have more operations than the {MAX_NODES}")
        name, arguments = message["name"], message["arguments"]
        if name == "CustomKernel":
            name, arguments = kernel_name(arguments[0]), ()
        inputs = tuple(map(self._made, message["inputs"]))
        outputs = tuple(map(self._made, message["outputs"]))
        values = tuple(chain.from_iterable(map(_plain, arguments))) if arguments else ()
        self._nodes.append(Node(name, inputs, outputs, values))

    def _made(self, described: tuple[str, Any, Any]) -> int:
        """Return the position of an array, a new one where a node computes it."""
        position = self._positions.get(described[0])
        if position is not None:
            return position
        # An array that no message has named before is the output of this node.
        key, shape, dtype = described
        kind = *shape, dtype
        # Layers repeat: one object for all equal arrays.
        if kind not in self._alike:
            self._alike[kind] = Array(tuple(shape), _name(dtype))
        return self._add(key, self._alike[kind])

    def _add(self, key: str, array: Array) -> int:
        position = self._positions[key] = len(self._arrays)
        self._arrays.append(array)
        return position


def _plain(argument: Any) -> tuple[Argument, ...]:
    if isinstance(argument, (bool, int, float, str)):
        return (argument,)
    if isinstance(argument, (list, tuple)):
        return (tuple(argument),) if all(type(a) is int for a in argument) else (str(argument),)
    return () if argument is None else (str(argument).removeprefix("mlx.core."),)


_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


@cache
def _name(dtype: Any) -> str:
    return _NAMES[str(dtype).removeprefix("mlx.core.")]
