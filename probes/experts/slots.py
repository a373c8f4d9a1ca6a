"""Experts in slots: some of each layer are in memory, a table leads from an expert to its slot.

    attach(model, switches, kept, pinned, policy="load", files=ExpertFiles(path))

A slot layer is mlx-lm's own module with fewer stacked experts, called with slot numbers.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from memfit.estimators.base.errors import CheckpointError, MachineError, UnsupportedError
from memfit.estimators.plans.experts.slot_table import LcpTable, Placed, SlotTable, SwapTables
from memfit.estimators.trace.cache_stepper import leaves
from memfit.probes.experts.expert_files import ExpertFiles, ExpertRows
from memfit.probes.experts.skipped import outputs_class, weigh_uncompiled
from memfit.probes.experts.switches import Switch, retyped

Policy = Literal["load", "skip", "swap", "fail"]
READING = ("load", "swap")
"""Policies that read experts during a run."""
SKIPPING = ("skip", "swap")
"""Policies that leave out the output of an expert without a slot."""
NOT_STORED = (
    "is not stored as the model has it, so that no single expert can be read; convert the model"
    " with mlx_lm.convert, or use --policy skip"
)


class Slots:
    def __init__(
        self,
        switch: Switch,
        kept: Sequence[int],
        pinned: Iterable[int],
        steps: "Steps",
        files: ExpertFiles,
    ) -> None:
        """Take the experts in the order of their slots; a pinned one never leaves."""
        self.switch, self.steps, self.files = switch, steps, files
        self.experts, self.capacity = steps.experts[switch.layer], len(kept)
        kind = LcpTable if steps.policy == "swap" else SlotTable
        self.slots: SlotTable = kind(kept, pinned)
        self.rows: dict[str, ExpertRows] = {}
        steps.layers.append(self)
        self._set_table()

    @property
    def is_complete(self) -> bool:
        """Whether every expert has a slot."""
        return self.capacity == self.experts

    def run(self, forward: Callable[[Any, Any], Any], x: Any, indices: Any) -> Any:
        """Return the output of a token's experts, which are all in slots when ``is_exact``."""
        if self.is_complete:
            return forward(x, self.table[indices])
        if self.steps.is_exact:
            return self._exact(forward, x, indices)
        self.steps.chosen.append((self, indices))
        y = forward(x, self.table[indices])
        if self.steps.policy == "swap":
            self.steps.expect(indices.size, self.absent[indices].sum())
        elif self.steps.policy != "skip":
            return y
        self.steps.unweighted.add(self.switch.layer)
        weighted = partial(self.steps.unweighted.discard, self.switch.layer)
        return outputs_class()(y, self.absent[indices], weighted)

    def _exact(self, forward: Callable[[Any, Any], Any], x: Any, indices: Any) -> Any:
        chosen = indices.flatten().tolist()
        wanted = sorted(set(chosen))
        missing = set(self.slots.missing(wanted))
        self.steps.count(len(chosen), sum(expert in missing for expert in chosen))
        groups = list(self.slots.groups(wanted))
        if len(groups) == 1:
            self._place(groups[0])
            return forward(x, self.table[indices])
        return self._in_groups(forward, x, indices, chosen, groups)

    def _in_groups(
        self,
        forward: Callable[[Any, Any], Any],
        x: Any,
        indices: Any,
        chosen: list[int],
        groups: list[list[int]],
    ) -> Any:
        """Compute the tokens of one group of experts after another."""
        import mlx.core as mx

        rows, top_k = x.reshape(-1, x.shape[-1]), indices.shape[-1]
        outputs, order = [], []
        for group in groups:
            self._place(group)
            members = set(group)
            places = [at for at, expert in enumerate(chosen) if expert in members]
            slots = mx.array([self.slots.slot_of[chosen[at]] for at in places], mx.uint32)
            y = forward(rows[mx.array([at // top_k for at in places])], slots[:, None])
            mx.eval(y)  # the next group takes its slots
            outputs.append(y[:, 0])
            order += places
        inverse = sorted(range(len(order)), key=order.__getitem__)
        joined = mx.concatenate(outputs)[mx.array(inverse)]
        return joined.reshape(*indices.shape, -1)

    def _place(self, wanted: list[int]) -> None:
        self.read(self.slots.place(wanted))

    def read(self, placed: Placed) -> None:
        """Read experts into their slots."""
        for expert, slot in placed:
            self._read(expert, slot)
        if placed:
            self._set_table()

    def _read(self, expert: int, slot: int) -> None:
        import mlx.core as mx

        read_bytes, wait_ns = self.files.read_bytes, self.files.wait_ns
        for linear, name, full_name in self.switch.arrays():
            linear[name][slot] = self.files.row(self.rows[full_name], expert)
        mx.eval([linear[name] for linear, name, _ in self.switch.arrays()])
        self.steps.count_read(self.files.read_bytes - read_bytes, self.files.wait_ns - wait_ns)

    def _set_table(self) -> None:
        """Make the table from expert to slot, and the one of the experts without a slot."""
        import mlx.core as mx

        slots = [self.slots.slot_of.get(expert) for expert in range(self.experts)]
        self.table = mx.array([slot or 0 for slot in slots], mx.uint32)
        self.absent = mx.array([slot is None for slot in slots])
        mx.eval(self.table, self.absent)

    def find_rows(self) -> None:
        """Find where the files have the experts: where every kept one has the loaded values.

        Raises:
            UnsupportedError: naming the first parameter that is not stored as it is loaded.
        """
        for linear, name, full_name in self.switch.arrays():
            stacked = linear[name]
            shape = (self.experts, *stacked.shape[1:])
            found = self.files.candidates(full_name, shape, stacked.dtype)
            for expert, slot in self.slots.slot_of.items():
                found = [r for r in found if _same(self.files.row(r, expert), stacked[slot])]
                if len(found) < 2 and slot:  # two experts agree
                    break
            if len(found) != 1:
                raise UnsupportedError(f"{full_name}: {NOT_STORED}")
            self.rows[full_name] = found[0]


class Steps:
    """The steps of a run: each is first done as if all experts were in slots.

    The choices of all layers are then evaluated together. With the policy ``load`` a step that
    needed another expert is undone and repeated: its layers are then evaluated one by one, and
    read what is missing. So is the next step, until one needs nothing.
    """

    def __init__(self, policy: Policy, experts: dict[int, int]) -> None:
        """Take the policy, and the number of experts of each layer."""
        self.policy, self.experts = policy, experts
        self.is_exact = False
        self.chosen: list[tuple[Slots, Any]] = []
        self.unweighted: set[int] = set()
        self.counts: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        self._phase = "prefill"
        self._expects_all = True
        self.layers: list[Slots] = []
        self._swaps: SwapTables | None = None
        self._calls: list[list[tuple[Slots, Any]]] = []
        self._expected: list[tuple[str, int, Any]] = []

    def run(self, forward: Callable[[], Any], tokens: int, caches: list[Any] | None) -> Any:
        """Return the model's output for a step.

        Raises:
            MachineError: when an expert is missing, with the policy ``fail``.
            UnsupportedError: when the class does not multiply outputs, with the policy ``skip``.
        """
        self._phase = "decode" if tokens == 1 else "prefill"
        self.counts[self._phase]["tokens"] += tokens
        if self.policy == "swap":
            return self._swapping(forward, tokens)
        if self.policy != "load":
            output = forward()
            self._require_weighted()
            self._count_chosen()
            return output
        if self._expects_all and (undo := _undo(caches or [], tokens)):
            output = forward()
            if self._all_present():
                return output
            del output
            undo()
            self.counts[self._phase]["repeated"] += 1
        return self._exact(forward)

    def expect(self, uses: int, misses: Any) -> None:
        """Take note of the experts that tokens use, and of misses that are not evaluated yet."""
        self._expected.append((self._phase, uses, misses))

    def end_run(self) -> None:
        """Count what is left of a run, and forget its calls."""
        self._count_expected()
        self._calls.clear()
        if self._swaps:
            self._swaps.restart()

    def _swapping(self, forward: Callable[[], Any], tokens: int) -> Any:
        """Skip what is missing; between two tokens replace cold experts, as mlx-moe does."""
        if self._swaps is None:
            tables = [each.slots for each in self.layers]
            self._swaps = SwapTables([each for each in tables if isinstance(each, LcpTable)])
        if self._swaps.is_due():
            self._replace(self._swaps)
        output = forward()
        self._require_weighted()
        self._swaps.called(tokens)
        self._calls.append(self.chosen)
        self.chosen = []
        return output

    def _replace(self, swaps: SwapTables) -> None:
        """Read experts that were missing in the calls before the last one."""
        done, self._calls = self._calls[:-1], self._calls[-1:]
        requested: list[set[int]] = [set() for _ in self.layers]
        place = {id(slots): index for index, slots in enumerate(self.layers)}
        for slots, indices in (each for call in done for each in call):
            requested[place[id(slots)]].update(indices.flatten().tolist())
        for slots, experts in zip(self.layers, swaps.update(requested), strict=True):
            slots.read(experts)

    def _count_expected(self) -> None:
        import mlx.core as mx

        mx.eval([misses for _, _, misses in self._expected])
        for phase, uses, misses in self._expected:
            self.counts[phase].update({"uses": uses, "misses": int(misses.item())})
        self._expected.clear()

    def count(self, uses: int, misses: int) -> None:
        """Take note of the experts that tokens used, and how many had no slot."""
        self.counts[self._phase]["uses"] += uses
        self.counts[self._phase]["misses"] += misses

    def count_read(self, nbytes: int, wait_ns: int) -> None:
        """Take note that an expert was read, and how long the disk took."""
        more = {"reads": 1, "read_bytes": nbytes, "wait_ns": wait_ns}
        self.counts[self._phase].update(more)

    def _exact(self, forward: Callable[[], Any]) -> Any:
        before = self.counts[self._phase]["reads"]
        self.is_exact = True
        try:
            output = forward()
        finally:
            self.is_exact = False
        self._expects_all = self.counts[self._phase]["reads"] == before
        return output

    def _evaluated(self) -> list[tuple[Slots, list[int]]]:
        """The experts of each layer, of all tokens."""
        import mlx.core as mx

        mx.eval([indices for _, indices in self.chosen])
        found = [(slots, indices.flatten().tolist()) for slots, indices in self.chosen]
        self.chosen.clear()
        return found

    def _require_weighted(self) -> None:
        if self.unweighted:
            raise UnsupportedError(
                f"layer {min(self.unweighted)}: its class weights experts in a way that --policy"
                " skip does not know, --policy load runs it"
            )

    def _all_present(self) -> bool:
        found = self._evaluated()
        if any(slots.slots.missing(set(chosen)) for slots, chosen in found):
            return False
        for slots, chosen in found:
            slots.slots.touch(sorted(set(chosen)))
            self.count(len(chosen), 0)
        return True

    def _count_chosen(self) -> None:
        for slots, chosen in self._evaluated():
            missing = slots.slots.missing(chosen)
            self.count(len(chosen), len(missing))
            if missing and self.policy == "fail":
                raise MachineError(
                    f"layer {slots.switch.layer} needs expert {missing[0]}, which has no slot;"
                    " --policy load reads it"
                )


class SlotExperts:
    """mlx-lm's expert module, called with slots."""

    slots: Slots

    def __call__(self, x: Any, indices: Any) -> Any:
        return self.slots.run(super().__call__, x, indices)  # type: ignore[misc]


class SteppedModel:
    """A model of which each call is a step."""

    steps: Steps

    def __call__(self, inputs: Any, cache: Any = None, **more: Any) -> Any:
        forward = super().__call__  # type: ignore[misc]
        tokens = inputs.shape[-1]
        return self.steps.run(lambda: forward(inputs, cache=cache, **more), tokens, cache)


def attach(
    model: Any,
    switches: Sequence[Switch],
    kept: Sequence[Sequence[int]],
    pinned: Sequence[Iterable[int]],
    *,
    steps: Steps,
    files: ExpertFiles,
) -> None:
    """Make slot layers of a model's expert modules, which have the kept experts only.

    Raises:
        UnsupportedError: with the policy ``load``, when single experts cannot be read.
    """
    for switch, experts, never_leave in zip(switches, kept, pinned, strict=True):
        slots = Slots(switch, experts, never_leave, steps, files)
        if steps.policy in READING and not slots.is_complete:
            slots.find_rows()
        retyped(switch.module, SlotExperts, slots=slots)
    if steps.policy in SKIPPING:
        weigh_uncompiled(model)
    retyped(model, SteppedModel, steps=steps)


def keep_only(switch: Switch, kept: Sequence[int]) -> None:
    """Read the stacked tensors of a layer one by one, and keep a part of the experts of each.

    The largest is last, so that the peak is what is kept and one whole tensor.

    Raises:
        CheckpointError: when an array does not have an entry for each expert.
    """
    import mlx.core as mx

    experts, chosen = switch.experts, mx.array(list(kept), mx.uint32)
    arrays = sorted(switch.arrays(), key=lambda each: int(each[0][each[1]].nbytes))
    for linear, name, full_name in arrays:
        whole = linear[name]
        if whole.shape[0] != experts:
            raise CheckpointError(f"{full_name}: has no entry for each of the {experts} experts")
        mx.eval(whole)  # tensors of single experts, once stacked, are freed before the copy
        if len(kept) < experts:
            whole = linear[name] = whole[chosen]
            mx.eval(whole)
        del whole
        mx.clear_cache()


def _undo(caches: list[Any], tokens: int) -> Callable[[], None] | None:
    """Return a function that takes a step back from the caches, None where that is impossible."""
    undo: list[Callable[[], Any]] = []
    for each in leaves(caches):
        kind = type(each).__name__
        if kind == "ArraysCache":
            undo.append(_restoring(each, list(each.cache)))
        elif kind in ("KVCache", "QuantizedKVCache") or (
            kind == "RotatingKVCache" and each.offset + tokens < each.max_size
        ):
            undo.append(_trimming(each, tokens))
        else:
            return None

    def all_back() -> None:
        import mlx.core as mx

        # A later step would else compute this one first, and hold the weights that it used.
        mx.eval([cache.state for cache in caches])
        for each in undo:
            each()

    return all_back


def _restoring(cache: Any, before: list[Any]) -> Callable[[], None]:
    def restore() -> None:
        cache.cache = before

    return restore


def _trimming(cache: Any, tokens: int) -> Callable[[], None]:
    offset = cache.offset

    def trim() -> None:
        if cache.offset > offset:
            cache.trim(tokens)

    return trim


def _same(one: Any, other: Any) -> bool:
    import mlx.core as mx

    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))
