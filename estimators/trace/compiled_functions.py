"""Compiled functions in a recorded graph: from their borders to the nodes that mx.compile makes.

Element-wise operations become one node. The rules are those of mlx/compile.cpp (0.32),
compile_fuse: from every result back through element-wise operations, as long as nothing outside
needs the results between them.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct, field

from memfit.estimators.trace.graph_format import Array, Node

# max_compile_depth and max_compile_arrays of mlx/compile.cpp.
MAX_DEPTH = 11
MAX_ARRAYS = 24

COMPILED = "Compiled"
# compile.cpp, is_fusable: unary, binary and ternary operations, and broadcasts.
_BROADCAST = "Broadcast"
_ELEMENTWISE = frozenset(
    "Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType Ceil Cos Conjugate Cosh Remainder Erf"
    " ErfInv Exp Floor Log Log1p LogicalNot Negative Round Sigmoid Sign Sin Sinh Square Sqrt Tan"
    " Tanh Expm1 Real Imag BitwiseInvert Add Divide Equal Greater GreaterEqual Less LessEqual"
    " LogicalAnd LogicalOr LogAddExp Maximum Minimum Multiply NotEqual Power Subtract"
    " BitwiseBinary ArcTan2 Select".split()
) | {_BROADCAST}


def fuse(tape: Sequence[Node], outputs: Iterable[int], arrays: list[Array]) -> list[Node]:
    """Return the nodes of a compiled function, ``tape`` in their order, after fusion.

    ``outputs`` are what the function returns. A broadcast that fused operations share with others
    is split: its copy is appended to ``arrays``.
    """
    fusion = _Fusion(tape, frozenset(outputs), arrays)
    made: list[Node] = []
    # From the end: a kernel is named by its result and takes in what leads to it.
    for node in reversed(tape):
        result = node.outputs[0]
        if result in fusion.fused:
            continue
        made.append(fusion.grow(node))
    return made[::-1]


def broadcast_all(tape: Sequence[Node], outputs: Iterable[int], arrays: list[Array]) -> list[Node]:
    """Return ``tape`` as MLX traces it for any shape: every operand of two or more is broadcast.

    A broadcast then reads the other operands too, for their shapes; new arrays are appended to
    ``arrays``. Source: mlx/ops.cpp, broadcast_arrays in dynamic tracing.
    """
    sources = {node.outputs[0]: node.inputs[0] for node in tape if node.name == _BROADCAST}
    made: list[Node] = []
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for node in tape:
        if node.name not in _ELEMENTWISE or len(node.inputs) < 2:
            made.append(node)
            continue
        # broadcast_arrays gets what Python passed, before any broadcast of the recording.
        operands = [sources.get(array, array) for array in node.inputs]
        shape = arrays[node.outputs[0]].shape
        inputs = []
        for index, operand in enumerate(operands):
            others = operands[:index] + operands[index + 1 :]
            # Equal broadcasts of equal inputs are merged (compile.cpp, compile_simplify).
            key = ((operand, *others), shape)
            if key not in known:
                known[key] = len(arrays)
                arrays.append(Array(shape, arrays[operand].dtype))
                made.append(Node(_BROADCAST, key[0], (known[key],)))
            inputs.append(known[key])
        made.append(Node(node.name, tuple(inputs), node.outputs, node.arguments))
    # Replaced broadcasts have no users left.
    used = {array for node in made for array in node.inputs}.union(outputs)
    return [node for node in made if node.name != _BROADCAST or node.outputs[0] in used]


class _Fusion(Struct):
    """The state over one tape; ``users`` are the results computed from an array."""

    tape: Sequence[Node]
    outputs: frozenset[int]
    arrays: list[Array]
    makers: dict[int, Node] = field(default_factory=dict)
    users: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    fused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.tape:
            for output in node.outputs:
                self.makers[output] = node
                for array in node.inputs:
                    self.users[array].append(output)

    def grow(self, node: Node) -> Node:
        result = node.outputs[0]
        inside: set[int] = set()
        # A kernel that ends in a broadcast would write it out in full.
        if node.name in _ELEMENTWISE and node.name != _BROADCAST:
            self._collect(result, 0, inside, set())
        # A single operation has a kernel of its own already.
        return self._compiled(result, inside) if len(inside) > 1 else self.makers[result]

    def _collect(self, array: int, depth: int, inside: set[int], inputs: set[int]) -> None:
        if array in inside:
            return
        # What cannot join is an input of the kernel.
        if depth >= MAX_DEPTH or not self._may_fuse(array, inside):
            inputs.add(array)
            return
        # What others use too ends the kernel, but for a broadcast: it gets a copy of its own.
        if depth and any(user not in inside for user in self.users[array]):
            if self.makers[array].name != _BROADCAST or len(inputs) >= MAX_ARRAYS:
                inputs.add(array)
                return
            array = self._split(array, inside)
        # MLX counts a fused result of the function among the inputs.
        if array in self.outputs:
            inputs.add(array)
        else:
            inputs.discard(array)
        if len(inputs) >= MAX_ARRAYS:
            return
        inside.add(array)
        for taken in self.makers[array].inputs:
            self._collect(taken, depth + 1, inside, inputs)

    def _may_fuse(self, array: int, inside: set[int]) -> bool:
        maker = self.makers.get(array)
        if maker is None or maker.name not in _ELEMENTWISE:
            return False
        if array not in self.outputs or not inside:
            return True
        # A kernel has several results only when they have one shape.
        return self.arrays[array].shape == self.arrays[next(iter(inside))].shape

    def _split(self, array: int, inside: set[int]) -> int:
        copy = len(self.arrays)
        self.arrays.append(self.arrays[array])
        maker = self.makers[array]
        self.makers[copy] = Node(maker.name, maker.inputs, (copy,), maker.arguments)
        for taken in maker.inputs:
            self.users[taken].append(copy)
        # The copy takes the users that are inside, the original keeps the others.
        for user in {user for user in self.users[array] if user in inside}:
            self.users[array] = [other for other in self.users[array] if other != user]
            self.users[copy].append(user)
            node = self.makers[user]
            inputs = tuple(copy if taken == array else taken for taken in node.inputs)
            self.makers[user] = Node(node.name, inputs, node.outputs, node.arguments)
        return copy

    def _compiled(self, result: int, inside: set[int]) -> Node:
        order: list[int] = []
        inputs: list[int] = []
        self._order(result, inside, order, inputs)
        # What the function returns from inside is a second output of the kernel.
        outputs = [array for array in order[:-1] if array in self.outputs] + [result]
        names = "".join(self.makers[array].name for array in order)
        for array in order[:-1]:
            self.fused.add(array)
        for taken in inputs:
            left = [user for user in self.users[taken] if user not in inside]
            # The kernel replaces its operations as the user of their inputs.
            self.users[taken] = left + outputs
        for array in outputs[:-1]:
            self.users[array] = [user for user in self.users[array] if user not in inside]
        node = Node(COMPILED, tuple(inputs), tuple(outputs), (names,))
        for output in outputs:
            self.makers[output] = node
        return node

    def _order(self, array: int, inside: set[int], order: list[int], inputs: list[int]) -> None:
        if array not in inside:
            if array not in inputs:
                inputs.append(array)
            return
        if array in order:
            return
        for taken in self.makers[array].inputs:
            self._order(taken, inside, order, inputs)
        order.append(array)


# Names of nodes that are no operation: each is followed by a label, the number of the function's
# call, and by ANY_SHAPE when the function is compiled for arguments of any shape.
_BORDER = "memfit_compile_"
BEGINS, ENDS = f"{_BORDER}begins_", f"{_BORDER}ends_"
ANY_SHAPE = "s"


def without_borders(
    nodes: Sequence[Node], outputs: Sequence[int], arrays: list[Array]
) -> tuple[list[Node], list[int]]:
    """Return nodes in depth-first order from ``outputs``, and these, with functions compiled.

    Arrays that fusion makes are appended to ``arrays``; those that no node makes stay there.
    """
    borders = {i: node for i, node in enumerate(nodes) if node.name.startswith(_BORDER)}
    # A border gives its arrays new numbers; without borders they have their first ones.
    same = _aliases(borders.values())
    makers = {output: i for i, node in enumerate(nodes) for output in node.outputs}
    inside = _functions(nodes, borders, makers)
    replaced = inside.keys() - _read_outside(nodes, borders, makers, inside)
    # compile replaces a function by its fused nodes and leaves all other nodes alone.
    made = [
        _renamed(node, same)
        for i, node in enumerate(nodes)
        if i not in replaced and i not in borders
    ]
    functions: defaultdict[str, list[Node]] = defaultdict(list)
    for index, labels in inside.items():
        for label in labels:
            functions[label].append(_renamed(nodes[index], same))
    results = _results(borders.values(), same)
    for label, tape in functions.items():
        if label.endswith(ANY_SHAPE):
            tape = broadcast_all(tape, results[label], arrays)
        made += fuse(tape, results[label], arrays)
    ends = [same.get(array, array) for array in outputs]
    return depth_first(makers_of(made), ends), ends


def _results(borders: Iterable[Node], same: Mapping[int, int]) -> dict[str, list[int]]:
    """Return what each compiled call returns, by its label."""
    return {
        node.name.removeprefix(ENDS): [same.get(array, array) for array in node.inputs]
        for node in borders
        if node.name.startswith(ENDS)
    }


def _aliases(borders: Iterable[Node]) -> dict[int, int]:
    """Return for the outputs of every border the array that passed it."""
    same: dict[int, int] = {}
    for node in borders:
        for before, after in zip(node.inputs, node.outputs, strict=True):
            same[after] = same.get(before, before)
    return same


def _functions(
    nodes: Sequence[Node], borders: Mapping[int, Node], makers: Mapping[int, int]
) -> dict[int, list[str]]:
    """Return the labels of the compiled calls that each node inside one belongs to.

    Export merges what calls do to equal scalars, so a node can be in several.
    """
    inside: dict[int, list[str]] = {}
    for node in borders.values():
        if not node.name.startswith(ENDS):
            continue
        label = node.name.removeprefix(ENDS)
        seen: set[int] = set()
        # From the end of a function back to its beginning, or to constants made inside.
        waiting = list(node.inputs)
        while waiting:
            index = makers.get(waiting.pop())
            if index is not None and index not in seen and index not in borders:
                seen.add(index)
                inside.setdefault(index, []).append(label)
                waiting += nodes[index].inputs
    # In the order of the recording: a node comes after those that make its inputs.
    return dict(sorted(inside.items()))


def _read_outside(
    nodes: Sequence[Node],
    borders: Mapping[int, Node],
    makers: Mapping[int, int],
    inside: Container[int],
) -> set[int]:
    """Return the nodes inside compiled functions that make what nodes outside read.

    Export merges what both do to equal scalars; results of a function pass its border.
    """
    result: set[int] = set()
    waiting = [
        array
        for i, node in enumerate(nodes)
        if i not in inside and not (i in borders and node.name.startswith(ENDS))
        for array in node.inputs
    ]
    while waiting:
        index = makers.get(waiting.pop())
        if index is not None and index in inside and index not in result:
            result.add(index)
            waiting += nodes[index].inputs
    return result


def _renamed(node: Node, same: dict[int, int]) -> Node:
    if same.keys().isdisjoint(node.inputs):
        return node
    inputs = tuple(same.get(array, array) for array in node.inputs)
    return Node(node.name, inputs, node.outputs, node.arguments)


def makers_of(nodes: Sequence[Node]) -> dict[int, Node]:
    """Return the node that makes each array."""
    return {output: node for node in nodes for output in node.outputs}


def depth_first(
    makers: Mapping[int, Node], outputs: Sequence[int], computed: Container[int] = ()
) -> list[Node]:
    """Return the nodes that outputs need, each after those that make its inputs.

    Arrays that are ``computed`` already need none.
    """
    order: list[Node] = []
    seen: set[int] = set()
    # A stack of its own: a graph can be deeper than Python's recursion limit.
    waiting = list(outputs[::-1])
    while waiting:
        array = waiting.pop()
        # Below zero is an array with all inputs in the order.
        if array < 0:
            order.append(makers[~array])
        elif array in makers and array not in seen and array not in computed:
            node = makers[array]
            seen.update(node.outputs)
            waiting.append(~array)
            waiting += node.inputs[::-1]
    return order
