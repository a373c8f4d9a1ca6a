"""The most memory of a run of mlx-vlm with images, by following its graph through MLX's allocator.

The graph is one for the whole run, so an array keeps its buffer from one evaluation to the next.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import Version
from memfit.estimators.trace.compiled_functions import depth_first, makers_of
from memfit.estimators.trace.graph_format import Array, Node
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.peak import RunPeak, run_peak
from memfit.estimators.trace.replay import CallPeak, CallReplay, call_peak, drop_user, view_of
from memfit.estimators.trace.schedule import evaluation_order
from memfit.estimators.trace.vision_recorder import RunStep, VisionRun

VisionPart = Literal["vision", "prefill", "decode"]


def vision_peak(
    run: VisionRun, weights: Mapping[str, int], device: Device, mlx: Version
) -> RunPeak[VisionPart]:
    """Return the most in use during a recorded run: of its towers, its prefill and its decoding."""
    return run_peak(_VisionReplay(run, device, mlx).peaks(), weights, device)


class _VisionReplay(CallReplay):
    """Allocator and stream over the cuts of one graph."""

    def __init__(self, run: VisionRun, device: Device, mlx: Version) -> None:
        super().__init__(device, mlx)
        self._call, self._cuts, self._first_decode = run
        self._arrays: list[Array] = list(run.call.arrays)
        self._views: list[View] = [view_of(array) for array in self._arrays]
        self._makers = makers_of(run.call.nodes)
        # What has been computed and is still there, and what waits for a later evaluation.
        self._computed: set[int] = set()
        self._waiting: Counter[int] = Counter()

        # The towers and what puts their features among the embeddings of the text.
        self._towers = {out for node in self._needed(run.call.held) for out in node.outputs}
        self._decodes = False

    def peaks(self) -> Iterator[CallPeak[VisionPart]]:
        """Yield the most in use during each evaluation; weights are not in it."""
        for position in self._call.of_role("tokens"):
            self._place(self._views[position], self._arrays[position])
        for index, cut in enumerate(self._cuts):
            self._decodes = index >= self._first_decode
            if cut.kind == "clear_cache":
                self._memory.clear_cache()
                continue
            yield self._evaluated(cut)
            if cut.kind == "eval":
                self._stream.drain(self._memory)

    def _evaluated(self, cut: RunStep) -> CallPeak[VisionPart]:
        memory, views = self._memory, self._views
        nodes = self._needed(cut.evaluated)
        call = replace(
            self._call, arrays=(), nodes=tuple(nodes), evaluated=cut.evaluated, held=cut.held
        )
        order = evaluation_order(call)
        memory.begin(nodes[order[0]].name if order else "")
        made = {out for node in nodes for out in node.outputs}
        self._computed |= made
        waiting: Counter[int] = Counter(cut.held)
        for node in self._needed(cut.held):
            waiting.update(node.inputs)
        users = waiting + Counter(cut.evaluated)
        for node in nodes:
            users.update(node.inputs)
        self._place_constants(users)
        for array, count in users.items():
            views[array].references += count
        self._drop(self._waiting)
        self._waiting = waiting
        curve = tuple(self._evaluate(call, position, views) for position in order)
        self._drop(Counter(cut.evaluated))
        self._computed = {array for array in self._computed if views[array].buffer is not None}
        return call_peak(self._part(nodes, order, curve), call, memory)

    def _part(
        self, nodes: Sequence[Node], order: Sequence[int], curve: Sequence[int]
    ) -> VisionPart:
        """Return the part of the run that the largest moment of an evaluation belongs to."""
        if curve:
            at = nodes[order[max(range(len(curve)), key=curve.__getitem__)]]
            if not self._towers.isdisjoint(at.outputs):
                return "vision"
        return "decode" if self._decodes else "prefill"

    def _place(self, view: View, array: Array) -> None:
        if array.role == "constant" and not array.name:
            # What the class has computed from ids and grids, such as a mask.
            array = array._replace(role="computed")
        super()._place(view, array)

    def _place_constants(self, users: Mapping[int, int]) -> None:
        for array in users:
            view = self._views[array]
            if view.buffer is None and array not in self._makers:
                self._place(view, self._arrays[array])

    def _drop(self, users: Mapping[int, int]) -> None:
        for array, count in users.items():
            for _ in range(count):
                drop_user(self._views[array], self._memory)

    def _needed(self, ends: Sequence[int]) -> list[Node]:
        """Return the nodes that ends still need, each after those that make its inputs."""
        return depth_first(self._makers, ends, self._computed)
