"""Small calls written by hand, for tests of the simulation that need no MLX."""

from memfit.estimators.base.workload import CallPhase
from memfit.estimators.trace.graph_format import Argument, Array, Call, Node, Role, Trace


class Sketch:
    """Collects arrays and nodes; every method returns the position of an array."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.nodes: list[Node] = []

    def given(self, *shape: int, role: Role = "tokens", dtype: str = "F32") -> int:
        """An array that exists before the call."""
        self.arrays.append(Array(shape, dtype, role))
        return len(self.arrays) - 1

    def run(
        self,
        name: str,
        inputs: tuple[int, ...],
        *shape: int,
        arguments: tuple[Argument, ...] = (),
        dtype: str = "F32",
    ) -> int:
        """One node with one output."""
        self.arrays.append(Array(shape, dtype))
        made = len(self.arrays) - 1
        self.nodes.append(Node(name, inputs, (made,), arguments))
        return made

    def chain(self, name: str, start: int, count: int, *shape: int) -> int:
        """``count`` nodes, each reading the one before."""
        for _ in range(count):
            start = self.run(name, (start,), *shape)
        return start

    def call(
        self,
        *evaluated: int,
        held: tuple[int, ...] | None = None,
        phase: CallPhase = "first_chunk",
        tokens: int = 4,
        position: int = 0,
    ) -> Call:
        """The call; evaluated arrays are also kept, unless ``held`` is given."""
        return Call(
            phase,
            tokens,
            position,
            tuple(self.arrays),
            tuple(self.nodes),
            evaluated,
            evaluated if held is None else held,
        )


def trace_of(*calls: Call, weights: int = 0) -> Trace:
    return Trace("llama", "cpu", {"mlx": "0.32.4"}, {"weight": weights}, calls)
