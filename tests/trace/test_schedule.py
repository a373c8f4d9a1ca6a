"""The order of evaluation, and what unfinished work of the device keeps alive."""

from memfit.estimators.machine.device import Device
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import Operation
from memfit.estimators.trace.schedule import WIDTH, evaluation_order, unmerged
from memfit.estimators.trace.streams import Stream
from tests.trace.calls import Sketch

MAX = Device("a Max", "metal", 0, 0, None, "flag", "s", 16)
CPU = Device("this host", "cpu", 0, 0, None, "flag")
BASE = Device("a base chip", "metal", 0, 0, None, "flag", "g", 16)


def names(call: Call) -> list[str]:
    return [call.nodes[position].name for position in evaluation_order(call)]


def test_an_operation_is_evaluated_after_all_its_inputs() -> None:
    sketch = Sketch()
    start = sketch.given(4)
    left = sketch.run("Exp", (start,), 4)
    right = sketch.run("Sin", (left,), 4)
    call = sketch.call(sketch.run("Add", (left, right), 4))
    assert names(call) == ["Exp", "Sin", "Add"]


def test_an_unused_operation_is_not_evaluated() -> None:
    sketch = Sketch()
    start = sketch.given(4)
    sketch.run("Exp", (start,), 4)
    assert names(sketch.call(sketch.run("Sin", (start,), 4))) == ["Sin"]


def test_few_branches_are_evaluated_in_turn() -> None:
    sketch = Sketch()
    start = sketch.given(4)
    call = sketch.call(sketch.chain("Exp", start, 3, 4), sketch.chain("Sin", start, 3, 4))
    assert names(call) == ["Sin", "Exp"] * 3


def test_beyond_the_width_the_last_branches_are_evaluated_to_their_ends() -> None:
    sketch = Sketch()
    start = sketch.given(4)
    ends = [sketch.chain("Exp", start, 2, 4) for _ in range(WIDTH)]
    late = sketch.chain("Sin", start, 2, 4)
    assert names(sketch.call(*ends, late))[:2] == ["Sin", "Sin"]


def test_a_broadcast_scalar_is_created_for_each_user() -> None:
    sketch = Sketch()
    array, scalar = sketch.given(4), sketch.given(role="constant")
    stretched = sketch.run("Broadcast", (scalar,), 4)
    first = sketch.run("Add", (array, stretched), 4)
    second = sketch.run("Multiply", (first, stretched), 4)
    assert sorted(names(unmerged(sketch.call(second)))) == [
        "Add",
        "Broadcast",
        "Broadcast",
        "Multiply",
    ]


def give(
    ahead: Stream, memory: Allocator, *constants: View, elements: int = 1, kernels: int = 1
) -> None:
    """Give the device an operation on an array without other users, and constants."""
    op = Operation(memory)
    view = View((elements,), 4)
    buffer = memory.allocate(view.nbytes)
    buffer.references = 1
    view.buffer = buffer
    op.inputs, op.outputs = [view, *constants], [view]
    op.kernels = kernels
    ahead.after(op, [buffer], memory)


def test_the_cpu_waits_when_more_than_ten_tasks_of_ten_dispatches_are_open() -> None:
    memory, ahead = Allocator("cpu"), Stream(CPU)
    # A kernel and an empty dispatch for each: the 55th operation ends the eleventh task.
    for _ in range(54):
        give(ahead, memory)
    assert memory.active == 4 * 54
    give(ahead, memory)
    assert memory.active == 4 * 50


def test_after_other_work_a_first_task_may_end_at_any_dispatch() -> None:
    memory, ahead = Allocator("cpu"), Stream(CPU, after_others=True)
    # Ten full tasks and nine dispatches of another may be under way: of 112 three are done.
    for _ in range(55):
        give(ahead, memory)
    assert memory.active == 4 * 55
    give(ahead, memory)
    assert memory.active == 4 * 55


def test_views_after_a_kernel_finish_with_it_on_the_cpu() -> None:
    memory, ahead = Allocator("cpu"), Stream(CPU)
    for _ in range(5):
        give(ahead, memory)
    for _ in range(100):
        give(ahead, memory, kernels=0)
    assert memory.active == 0


def test_a_command_buffer_closes_after_fifty_one_kernels_on_a_max() -> None:
    memory, ahead = Allocator("metal"), Stream(MAX)
    # Eleven are closed before MLX waits for the first; then its memory is free.
    for _ in range(11 * 51 - 1):
        give(ahead, memory)
    assert memory.active == 4 * (11 * 51 - 1)
    give(ahead, memory)
    assert memory.active == 4 * 10 * 51


def test_a_command_buffer_closes_after_forty_one_kernels_on_a_base_chip() -> None:
    memory, ahead = Allocator("metal"), Stream(BASE)
    for _ in range(11 * 41):
        give(ahead, memory)
    assert memory.active == 4 * 10 * 41


def test_a_command_buffer_closes_after_fifty_one_mebi_elements() -> None:
    memory, ahead = Allocator("metal"), Stream(MAX)
    for _ in range(11):
        give(ahead, memory, elements=51 << 20)
    assert memory.active == 4 * 10 * (51 << 20)


def test_a_cuda_graph_counts_an_input_at_every_read() -> None:
    hopper = Device("an H100", "cuda", 0, 0, None, "flag", None, 90)
    memory, ahead = Allocator("cuda"), Stream(hopper)
    for _ in range(11 * 101):
        give(ahead, memory)
    assert memory.active == 8 * 10 * 101
    large, graphs = Allocator("cuda"), Stream(hopper)
    for _ in range(11):
        give(graphs, large, elements=1001 << 20)
    assert large.active == 4 * 10 * (1001 << 20)


def test_a_scalar_that_is_broadcast_inside_a_kernel_touches_no_elements() -> None:
    memory, ahead = Allocator("metal"), Stream(MAX)
    for _ in range(11):
        give(ahead, memory, View((51 << 20,), 4))
    assert memory.active == 4 * 11


def test_views_are_not_kernels_and_touch_no_elements() -> None:
    memory, ahead = Allocator("metal"), Stream(MAX)
    for _ in range(1000):
        give(ahead, memory, elements=51 << 20, kernels=0)
    assert memory.active == 4 * 1000 * (51 << 20)
    ahead.drain(memory)
    assert memory.active == 0
