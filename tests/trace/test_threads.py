"""A trace in one thread of a process does not affect the others."""

import _thread
import contextlib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.trace.graph_format import Trace

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memfit.estimators.trace.traced_model import TracedShapes  # noqa: E402
from tests.trace.test_graph import LLAMA, METAL, case  # noqa: E402
from tests.trace.tracing import record, trace_shapes  # noqa: E402

WORKLOAD = Workload(prompt_tokens=70, max_tokens=2)
OTHER_MODEL = "mlx_lm.models.olmo3"
CLASS_FILE = str(Path("mlx_lm", "models", "llama.py"))
PATIENCE_SECONDS = 60


def traced(name: str) -> tuple[TracedShapes, Trace]:
    config = case(name)
    return trace_shapes(config, WORKLOAD), record(config, WORKLOAD, target=METAL)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def test_traces_in_two_threads_give_the_same_figures_as_one() -> None:
    pairs = [("qwen3", "gemma3n"), ("qwen3_moe", "mamba2")]
    alone = {name: traced(name) for pair in pairs for name in pair}
    start = threading.Barrier(2)

    def together(name: str) -> tuple[TracedShapes, Trace]:
        start.wait(PATIENCE_SECONDS)
        return traced(name)

    with switching_often(), ThreadPoolExecutor(2) as threads:
        for pair in pairs * 2:
            assert list(threads.map(together, pair)) == [alone[name] for name in pair]


class Profile:
    """Calls ``action`` once in a trace of llama, when its class calls a function."""

    def __init__(self, function: str, action: Callable[[], None]) -> None:
        self._function, self._action = function, action
        self.reached = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or self.reached or code.co_name != self._function:
            return
        if code.co_filename.endswith(CLASS_FILE):
            self.reached = True
            self._action()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def process_state() -> dict[str, object]:
    """Return the process state that a trace could change."""
    parts = [mx, mx.fast, mx.metal, mx.random, mx.array, importlib.import_module("mlx.nn").Module]
    return {
        **{
            f"{part}.{name}": id(getattr(part, name))
            for part in parts
            for name in vars(part)
            if name not in ("__dict__", "__weakref__")
        },
        **{name: id(sys.modules.get(name)) for name in (*KNOWN_MODULES, "resource")},
        "mlx": list(vars(sys.modules["mlx"])),
        "stdout": sys.stdout,
        "collecting": gc.isenabled(),
        "stack": threading.stack_size(),
        "threads": [thread.name for thread in threading.enumerate()],
    }


KNOWN_MODULES = {name for name in sys.modules if name.partition(".")[0] in ("mlx", "mlx_lm")}


def real_work() -> dict[str, Any]:
    """Return values computed by MLX and mlx-lm with functions that a trace replaces."""
    rows = mx.arange(8, dtype=mx.float32).reshape(2, 4)
    heads = (mx.arange(64, dtype=mx.float32) / 64).reshape(1, 2, 4, 8)
    sources = importlib.import_module(OTHER_MODEL)
    mx.random.seed(7)
    model = sources.Model(sources.ModelArgs.from_dict(case("olmo3")))
    logits = model(mx.array([[1, 2, 3]]))
    mx.eval(logits)
    return {
        "norm": mx.fast.rms_norm(rows, mx.ones(4), 1e-5).tolist(),
        "layer norm": mx.fast.layer_norm(rows, None, mx.zeros(4), 1e-5).tolist(),
        "rope": mx.fast.rope(heads, 8, traditional=False, base=1e4, scale=1.0, offset=3).tolist(),
        "attention": mx.fast.scaled_dot_product_attention(heads, heads, heads, scale=1.0).tolist(),
        "compiled": mx.compile(lambda x: x * 2 + 1)(rows).tolist(),
        "item": rows[1, 2].item(),
        "truth": bool(rows.sum() > 3),
        "slice": rows[:, 1:].tolist(),
        "seeded": mx.random.uniform().item(),
        "device": (str(mx.default_device()), mx.metal.is_available()),
        "logits": logits.tolist(),
        "class": sources.mx is mx and model.__class__.__module__ == OTHER_MODEL,
        "nn": sources.nn is sys.modules["mlx.nn"],
    }


@pytest.mark.parametrize("function", ["__init__", "__call__"])
def test_another_thread_using_mlx_during_a_trace_sees_no_stub(
    function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = real_work()
    untouched = (mx.zeros, mx.compile, mx.eval, mx.fast.rms_norm, mx.metal.is_available)
    inside, finished = threading.Event(), threading.Event()

    def wait_here() -> None:
        inside.set()
        assert finished.wait(PATIENCE_SECONDS)

    profile = Profile(function, wait_here)

    def trace() -> None:
        with profile.watching():
            record(LLAMA, WORKLOAD, target=METAL)

    sys.modules.pop(OTHER_MODEL)  # it is imported while the trace runs
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(trace)
        assert inside.wait(PATIENCE_SECONDS)
        try:
            assert real_work() == expected
            seen = (mx.zeros, mx.compile, mx.eval, mx.fast.rms_norm, mx.metal.is_available)
            assert seen == untouched
            sys.stdout.write("a line of another thread\n")
        finally:
            finished.set()
        running.result(PATIENCE_SECONDS)
    assert capsys.readouterr().out == "a line of another thread\n"


def fail() -> None:
    raise ArithmeticError("in the class")


@pytest.mark.parametrize("function", ["__init__", "__call__"])
def test_a_failing_class_leaves_the_process_unchanged(function: str) -> None:
    before = process_state()
    profile = Profile(function, fail)
    with profile.watching(), pytest.raises(UnsupportedError, match="in the class"):
        record(LLAMA, WORKLOAD, target=METAL)
    assert profile.reached
    assert process_state() == before


@pytest.mark.parametrize("function", ["__init__", "__call__"])
def test_ctrl_c_stops_a_trace_and_leaves_the_process_unchanged(function: str) -> None:
    received = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        received.set()
        signal.default_int_handler(number, frame)

    def interrupt() -> None:
        _thread.interrupt_main()
        # The class is still running when the main thread gets the signal, which it may be able
        # to take only when the class is done.
        received.wait(0.2)

    before = process_state()
    profile = Profile(function, interrupt)
    usual = signal.signal(signal.SIGINT, stop)
    try:
        with profile.watching(), pytest.raises(KeyboardInterrupt):
            record(LLAMA, WORKLOAD, target=METAL)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert profile.reached
    assert process_state() == before


class _TooLateError(Exception):
    def __init__(self, seconds: int, why: str) -> None:
        super().__init__(seconds, why)


@pytest.mark.parametrize("function", ["__init__", "__call__"])
@pytest.mark.parametrize(
    "error", [TimeoutError("late"), ValueError("late"), SystemExit(143), _TooLateError(1, "late")]
)
def test_what_a_signal_handler_raises_during_a_trace_is_passed_on(
    error: BaseException, function: str
) -> None:
    received = threading.Event()

    def stop(*_: object) -> None:
        received.set()
        raise error

    def interrupt() -> None:
        _thread.interrupt_main()
        received.wait(0.2)

    before = process_state()
    profile = Profile(function, interrupt)
    usual = signal.signal(signal.SIGINT, stop)
    try:
        with profile.watching(), pytest.raises(type(error)) as raised:
            record(LLAMA, WORKLOAD, target=METAL)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert raised.value is error
    assert profile.reached
    assert process_state() == before


def test_a_trace_does_not_use_the_random_state_of_its_thread() -> None:
    mx.random.seed(1)
    expected = mx.random.uniform().item()
    mx.random.seed(1)
    trace_shapes(LLAMA, WORKLOAD)
    assert mx.random.uniform().item() == expected


def test_a_trace_leaves_no_stream_open() -> None:
    def next_stream() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(stream_number()))
        thread.start()
        thread.join()
        return found[0]

    first = next_stream()
    record(LLAMA, WORKLOAD, target=METAL)
    assert next_stream() == first + 1


def stream_number() -> int:
    return int(str(mx.default_stream(mx.cpu)).rpartition(" ")[2].rstrip(")"))
