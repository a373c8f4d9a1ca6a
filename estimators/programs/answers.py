"""An operation of which both answers are tried: may this buffer be written over, or not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import split_products, vector_attention
from memfit.estimators.mlx.versions import MlxVersions, Version
from memfit.estimators.programs.forks import Path, identity
from memfit.estimators.programs.sizes import Size
from memfit.estimators.programs.steps import TEMPORARY, Layout, Question
from memfit.estimators.trace.layouts import Allocation, View
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import DONATION_SLACK, Operation, Rule


class Buffer(Allocation):
    """A buffer whose bytes may be an expression."""

    __slots__ = ("is_weight", "number")

    def __init__(self, number: int, nbytes: int, *, is_weight: bool = False) -> None:
        super().__init__(nbytes, "", 0)
        self.number, self.is_weight = number, is_weight


class _Tape(Allocator):
    """Notes what is allocated."""

    def __init__(self) -> None:
        super().__init__("metal")
        self.made: list[Buffer] = []

    def allocate(self, nbytes: int) -> Allocation:
        self.made.append(Buffer(TEMPORARY, nbytes))
        return self.made[-1]


class _Splits(NamedTuple):
    """`SplitProducts` of which the parts stay a function of sizes; 0 where there is one part."""

    rules: Any

    def packed(self, *sizes: int) -> int:
        return self._parts("packed", *sizes)

    def plain(self, *sizes: int) -> int:
        return self._parts("plain", *sizes)

    def _parts(self, name: str, *sizes: int) -> int:
        parts = getattr(self.rules, name)(*map(int, sizes))
        parts = parts if parts > 1 else 0
        known = next((size for size in sizes if isinstance(size, Size)), None)
        return parts if known is None else known.called(f"{name}_parts", parts, *sizes)


def functions(device: Device, mlx: Version) -> dict[str, Any]:
    """Return what the expressions of a lowered call may call."""
    splits = _Splits(split_products(device, MlxVersions(mlx)))
    return {
        "packed_parts": splits.packed,
        "plain_parts": splits.plain,
        "bit_length": int.bit_length,
        "bool": bool,
    }


class Trial(Operation):
    """An operation whose open questions are answered by a script, and with yes after its end."""

    __slots__ = ("asked", "script", "tape")

    def __init__(self, device: Device, mlx: Version) -> None:
        versions = MlxVersions(mlx)
        splits: Any = _Splits(split_products(device, versions))
        self.tape = _Tape()
        super().__init__(
            self.tape,
            splits=splits,
            vector_attention=vector_attention(device, versions),
            compiled_copies=versions.has("compiled_copies"),
            ropes_in_place=versions.has("cuda_rope_in_place"),
        )
        self.script: Sequence[bool] = ()
        self.asked: list[tuple[Question, bool]] = []

    def begin(self, script: Sequence[bool]) -> None:
        """Forget what the rule did before."""
        for view in self.outputs:
            view.buffer = None
            view.fresh()
        self.script, self.asked, self.tape.made = script, [], []
        self.temporaries, self.temporary_elements, self.kernels = [], 0, 0

    def add_parts(self, parts: int, itemsize: int) -> None:
        """Allocate partial products of no bytes where there is one: no size is compared."""
        self.temporary(parts * self.outputs[0].size, itemsize)
        some = bool(int(parts))
        self.kernels += parts.called("bool", some, parts) if isinstance(parts, Size) else some

    def is_donatable(self, source: View, out: View | None = None) -> bool:
        """Ask, where the graph allows it."""
        buffer = source.buffer
        if source.references != 1 or not isinstance(buffer, Buffer) or buffer.references != 1:
            return False
        # A weight is the model's, and what this very operation has allocated is its own.
        if buffer.is_weight or buffer.number == TEMPORARY:
            return False
        if out is not None and source.itemsize != out.itemsize:
            return False
        limit = None if out is None else out.nbytes + DONATION_SLACK
        return self._answer(Question(buffer.number, limit, waits=True))

    def is_near(self, source: View, out: View) -> bool:
        """Ask: a buffer that was used before may be larger than its array needs."""
        buffer = source.buffer
        assert isinstance(buffer, Buffer)
        limit = out.nbytes + DONATION_SLACK
        if buffer.is_weight:
            return bool(buffer.nbytes <= limit)
        return self._answer(Question(buffer.number, limit, waits=False))

    def _answer(self, question: Question) -> bool:
        for known, answer in self.asked:
            if identity(known) == identity(question):
                return answer
        at = len(self.asked)
        answer = self.script[at] if at < len(self.script) else True
        self.asked.append((question, answer))
        return answer


class Result(NamedTuple):
    """What a rule did, for one way to answer its questions."""

    path: Path
    outputs: tuple[tuple[Allocation | None, Layout], ...]
    read: tuple[int, ...]
    """Elements of the inputs."""
    made: tuple[Buffer, ...]
    temporary_elements: int
    kernels: int


def results(op: Trial, rule: Rule, path: Path) -> list[Result]:
    """Run a rule once for each way to answer its questions, after a ``path`` of other tests.

    The first result is that of the answer yes to all.
    """
    buffers = [(view.buffer, view.buffer.references) for view in op.inputs if view.buffer]
    found: list[Result] = []
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        script = scripts.pop(0)
        op.begin(script)
        rule(op)
        for buffer, references in buffers:
            buffer.references = references
        found.append(
            Result(
                (*path, *op.asked),
                tuple((view.buffer, Layout.of(view)) for view in op.outputs),
                tuple(view.data_size for view in op.inputs),
                tuple(op.tape.made),
                op.temporary_elements,
                op.kernels,
            )
        )
        answers = tuple(answer for _, answer in op.asked)
        scripts += [
            (*answers[:at], False) for at in range(len(script), len(answers)) if answers[at]
        ]
    return found
