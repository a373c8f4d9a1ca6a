"""The moments of one run that can be its largest, with the bytes of each."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple, replace

from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.mlx.call_plan import (
    PlannedCall,
    converting_chunk,
    held_samples,
    planned_chunks,
)
from memfit.estimators.results.terms import Phase
from memfit.estimators.workspace.attention import KV_BUFFER, needs_array_mask
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.layer import head_program, record_layer
from memfit.estimators.workspace.prepared import PreparedModel
from memfit.estimators.workspace.run_caches import RunCaches
from memfit.estimators.workspace.tape import (
    LEAST_SIMULATED,
    Program,
    layers_in_flight,
    simulated_layers,
    transient_peak,
)

# Loops over tokens are the largest: for Jamba 1.5 mini on several Macs all take 20 MB.
_KEPT_LAYERS = 128


class CallMoment(Struct, frozen=True):
    """The most in use during one call of a run, or while it loads."""

    phase: Phase
    """Loading, a chunk of the prompt or a decode step."""
    nbytes: int
    """Everything in use: weights, caches, states and what is in flight."""
    workspace_bytes: int
    """What of it is neither weights nor the caches and states as the call leaves them."""
    largest: int
    """Bytes of the largest single allocation."""
    largest_name: str
    explanation: str
    """The sum of its parts, as a line of text."""
    call: CallPhase | None = None
    """The call it is in or follows, None for the load and for conversions after other calls."""
    replaced_bytes: int = 0
    """Bytes of the caches that larger ones replace in the call."""


class _Followed(NamedTuple):
    """What a call holds in addition to what was there before it."""

    layers: Counter[int]
    """How many layers of each plan were followed operation by operation."""
    in_flight: int
    largest: tuple[int, str]
    """Bytes of the largest array of a layer, and what it holds."""


class RunMoments:
    """One workload on one prepared model."""

    def __init__(self, prepared: PreparedModel, workload: Workload, weight_bytes: int) -> None:
        self._prepared, self._workload = prepared, workload
        self._weight_bytes = weight_bytes
        self._width = dtypes.nbytes(1, prepared.model.dtype)
        self.caches = RunCaches(prepared, workload)
        self._converting = converting_chunk(workload)

    def moments(self, *, has_decode: bool = True) -> Iterator[CallMoment]:
        """Yield the moments that can be the largest, those of the prompt or of all calls."""
        weights = self._weight_bytes
        yield CallMoment("load", weights, 0, 0, "", f"load = weights {weights:,}")
        yield from self.prefill()
        if not has_decode:
            return
        if self.caches.is_batched:
            first = PlannedCall("last_token", 1, self._workload.prompt_tokens - 1)
            yield self._during("decode", first)
        yield from self.decode(1, held_samples(self._workload.max_tokens))

    def prefill(self) -> Iterator[CallMoment]:
        """Yield the moments of the prompt's chunks."""
        for chunk in planned_chunks(self._workload, self._prepared.traits.versions):
            yield self._during("prefill", chunk)
        if self._converting is not None:
            yield from self._conversion("prefill", self._converting)

    def decode(self, tokens: int, held: int) -> Iterator[CallMoment]:
        """Yield those of the last decode step, with all its tokens in the caches.

        It computes ``tokens`` at once, and finds the log-probabilities of ``held`` earlier ones.
        """
        call = PlannedCall("decode", tokens, self._workload.total_tokens)
        if self._converting is None:
            yield from self._conversion("decode", call)
        yield self._during("decode", call, held)

    def chunk(self, planned: PlannedCall) -> CallMoment:
        """Return the moment of one chunk."""
        return self._during("prefill", planned)

    def _during(self, phase: Phase, planned: PlannedCall, held: int = 0) -> CallMoment:
        """Follow the last layers of each kind; every other layer counts as it is after the call."""
        prepared, caches, decoding = self._prepared, self.caches, phase == "decode"
        # The first token finds states that are slices of the last chunk.
        replaced = planned.phase == "decode"
        call = self._shape(planned, decoding=replaced)
        # After a chunk nothing evaluates the logits: mx.eval gets the caches alone (generate_step).
        followed = self._followed(
            call, decoding=decoding, has_head=decoding or planned.phase == "last_tokens"
        )
        simulated = followed.layers
        parts = (
            self._weight_bytes,
            caches.bytes_during(call.occupancy, simulated)
            + caches.packed_bytes(call, simulated, decoding=decoding),
            caches.state_bytes
            + caches.view_bytes(call, simulated, decoding=replaced)
            + caches.pending_bytes(planned),
            call.rows * prepared.input_elements * self._width + self._mask_bytes(call),
            held * self._workload.batch * prepared.model.vocab_size * self._width,
            followed.in_flight,
        )
        largest, name = max((caches.largest(call.occupancy), KV_BUFFER), followed.largest)
        text = _explain(phase, planned, parts)
        kept = caches.bytes_during(call.occupancy, Counter()) + caches.state_bytes
        workspace = max(0, sum(parts[1:]) - kept)
        replaced_bytes = caches.replaced_bytes(call.occupancy)
        return CallMoment(
            phase, sum(parts), workspace, largest, name, text, planned.phase, replaced_bytes
        )

    def _followed(self, call: CallShape, *, decoding: bool, has_head: bool) -> _Followed:
        """Return what a call holds; the same for every workload that makes it."""
        key = (_key(call), decoding, has_head)
        kept: dict[Hashable, _Followed] = self._prepared.followed
        result = kept.get(key)
        if result is None:
            result = kept[key] = self._follow(call, decoding=decoding, has_head=has_head)
        return result

    def _follow(self, call: CallShape, *, decoding: bool, has_head: bool) -> _Followed:
        prepared = self._prepared
        # Without logits no more is evaluated than the caches need.
        order = prepared.order if has_head else prepared.order[: prepared.caching]
        last = None if has_head else order[-1]
        others = _key(replace(call, occupancy={}))
        recorded = [
            self._recorded(number, call, others, ends=number == last)
            for number in range(len(prepared.plans))
        ]
        programs = [each[0] for each in recorded]
        window = self._window(call, order, programs, decoding=decoding)
        sequence = [order[index] for index in simulated_layers(order, window)]
        simulated = Counter(sequence)
        followed = [programs[number] for number in sequence]
        if last is not None:
            # mx.eval gets the caches alone, so the last layer makes no output (generate_step).
            followed[-1] = recorded[last][-1]
        if has_head:
            model, sampled = prepared.model, call.rows if decoding else call.batch
            followed.append(
                head_program(
                    model.vocab_size, prepared.head_touched, call, model.hidden_size, sampled
                )
            )
        steps = [program.steps for program in followed]
        # MLX runs what only the next call needs after the last layer; the first step of a batch
        # evaluates its tokens alone (GenerationBatch._step), and the next makes it in its turn.
        if not call.copies_states:
            steps += [programs[number].deferred for number in order]
        return _Followed(
            simulated,
            self._waiting_bytes(programs, simulated) + transient_peak(steps, prepared.limits),
            max((program.largest, program.largest_name) for program in followed),
        )

    def _window(
        self, call: CallShape, order: Sequence[int], programs: Sequence[Program], *, decoding: bool
    ) -> int:
        """Return how many layers are followed up to the last of each kind."""
        prepared = self._prepared
        # A graph of CUDA has more than a layer: where one begins depends on all layers before.
        if prepared.traits.backend == "cuda":
            return len(order)
        # A token without new buffers or partial results holds next to nothing in a layer.
        in_two_passes = prepared.traits.vector_attention.may_take_two_passes
        allocates = not decoding or any(
            own.after != own.before or in_two_passes(own.keys) for own in call.occupancy.values()
        )
        used = [programs[number] for number in set(order)]
        return layers_in_flight(used, prepared.limits) if allocates else LEAST_SIMULATED

    def _waiting_bytes(self, programs: Sequence[Program], simulated: Counter[int]) -> int:
        """Return what layers hold for the deferred steps, less the states that are not there yet.

        Layers that are not followed hold what their deferred steps will read.
        """
        return sum(
            (count - simulated[number]) * programs[number].deferred_bytes
            - simulated[number] * programs[number].absent_bytes
            - count * programs[number].deferred_absent_bytes
            for number, count in self._prepared.layers.items()
        )

    def _recorded(
        self, number: int, call: CallShape, others: Hashable, *, ends: bool
    ) -> tuple[Program, ...]:
        """Return the program of a plan's layers, the same for all calls with such buffers.

        ``others`` is all of the call but its buffers. If it ``ends`` in one of the layers without
        an output, the program of the last comes after that of all.
        """
        prepared, buffers = self._prepared, self.caches.of_plans[number]
        own = {buffer: call.occupancy[buffer] for each in buffers for buffer in each}
        key = (number, ends, others, tuple(own.items()))
        kept: dict[Hashable, tuple[Program, ...]] = prepared.recorded
        result = kept.pop(key, None)
        if result is None:
            call = replace(call, occupancy=own)
            layer = record_layer(prepared.plans[number], call, prepared.model.hidden_size, buffers)
            result = (layer.program(), *([layer.program(state_only=True)] if ends else []))
        kept[key] = result
        if len(kept) > _KEPT_LAYERS:
            del kept[next(iter(kept))]
        return result

    def _shape(self, planned: PlannedCall, *, decoding: bool) -> CallShape:
        workload, done = self._workload, planned.position - self._workload.cached_tokens
        chunk = (done - 1) % workload.prefill_step + 1 if done else 0
        return CallShape(
            tokens=planned.tokens,
            batch=workload.batch,
            width=self._width,
            target=self._prepared.traits,
            occupancy=self.caches.around(planned),
            previous=0 if decoding else chunk,
            is_batched=self.caches.is_batched,
            copies_states=self.caches.copies(planned),
            has_states=planned.position > 0,
        )

    def _conversion(self, phase: Phase, call: PlannedCall) -> Iterator[CallMoment]:
        """All caches as they were and quantised at once (generate.py, maybe_quantize_kv_cache)."""
        if not self.caches.are_converted:
            return
        before, after = self.caches.converted_bytes(call)
        parts = (self._weight_bytes, before, after, self.caches.state_bytes)
        line = (
            f"{phase} at the switch to quantised keys and values = weights {parts[0]:,} + caches"
            f" before {before:,} + after {after:,} + states {parts[3]:,}"
        )
        # A conversion after the first chunk is the end of that call (call_plan.py).
        is_first = phase == "prefill" and call.position == self._workload.cached_tokens
        chunk: CallPhase | None = "first_chunk" if is_first else None
        yield CallMoment(phase, sum(parts), before, 0, "", line, chunk)

    def _mask_bytes(self, call: CallShape) -> int:
        """One mask for all layers of a kind: a window, latent attention or a batch."""
        # A class makes each mask once and passes it to all its layers (mlx-lm gemma3_text.py); of
        # a window and of all keys there are two, however long they are.
        masks = set()
        for plan, buffers in zip(self._prepared.plans, self.caches.of_plans, strict=True):
            for mixer, own in zip(plan.mixers, buffers, strict=True):
                if not own:
                    continue
                occupancy = call.occupancy[own[0]]
                if needs_array_mask(mixer.mixer, call, occupancy):
                    masks.add((own[0].limit, occupancy.keys))
        cells = sum(call.tokens * keys for _, keys in masks)
        return cells * (call.batch if call.is_batched else 1)


def _key(call: CallShape) -> Hashable:
    return tuple(
        tuple(value.items()) if isinstance(value, dict) else value for value in astuple(call)
    )


def _explain(phase: Phase, call: PlannedCall, parts: tuple[int, ...]) -> str:
    names = (
        *("weights", "caches", "states", "input and masks"),
        *("earlier log-probabilities", "in flight"),
    )
    where = (
        f"prefill of {call.tokens} tokens after {call.position}"
        if phase == "prefill"
        else f"decode at {call.position} tokens"
    )
    total = " + ".join(f"{name} {part:,}" for name, part in zip(names, parts, strict=True))
    return f"{where} = {total} = {sum(parts):,}"
