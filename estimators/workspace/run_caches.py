"""The caches and states of one run: which buffers there are, and their bytes around a call."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP, GatedDelta, Growth, KVBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.mlx.kv_cache import (
    KVFormat,
    capacity_at,
    grown,
    is_convertible,
    kv_format,
    limited,
    stored_tokens,
    view_elements,
)
from memfit.estimators.workspace.call import CallShape, Occupancy
from memfit.estimators.workspace.prepared import PreparedModel

_FLOAT32 = 4


class RunCaches:
    """The caches of a prepared model under one workload."""

    def __init__(self, prepared: PreparedModel, workload: Workload) -> None:
        self._prepared, self._workload = prepared, workload
        self._width = dtypes.nbytes(1, prepared.model.dtype)
        self.of_plans = prepared.buffers
        """The buffers of each plan, by its mixers."""
        # mlx-lm cache.py, make_prompt_cache: rotating caches, unless the class makes its own.
        if workload.max_kv_size is not None:
            self.of_plans = self._limited(workload.max_kv_size)
        self._layers = self._owners()
        self.state_bytes = prepared.state_bytes * workload.batch
        self._stored_bytes = self._stored()
        # mlx-lm generate.py, BatchGenerator: it has no KV bits.
        self.is_batched = (
            workload.batch > 1
            and workload.kv_bits is None
            and all(buffer.growth.merges for buffer in self._layers)
        )

    def _limited(self, max_kv_size: int) -> tuple[tuple[tuple[KVBuffer, ...], ...], ...]:
        model = self._prepared.model
        return tuple(
            tuple(tuple(limited(model, buffer, max_kv_size) for buffer in own) for own in mixers)
            for mixers in self._prepared.buffers
        )

    def _owners(self) -> Counter[KVBuffer]:
        """Return how many layers own each distinct buffer; 0 for one that is only read."""
        owners: Counter[KVBuffer] = Counter()
        for number, layers in self._prepared.layers.items():
            mixers = self._prepared.plans[number].mixers
            for mixer, buffers in zip(mixers, self.of_plans[number], strict=True):
                for buffer in buffers:
                    # Layers that share the keys of an earlier one hold no buffer of their own.
                    owners[buffer] += layers if mixer.mixer.owns_cache else 0
        return owners

    def kept_bytes(self) -> int:
        """Return the caches and states as the workload leaves them."""
        end = self._workload.total_tokens
        return self._stored_bytes + self._filled(
            end, lambda buffer: capacity_at(buffer, self._workload, end)
        )

    def _stored(self) -> int:
        """Return the bytes of stored caches and states of the cached tokens."""
        workload = self._workload
        if not workload.cached_tokens:
            return 0
        return self._filled(workload.cached_tokens, partial(stored_tokens, workload=workload))

    def _filled(self, position: int, room: Callable[[KVBuffer], int]) -> int:
        """Return the bytes of states, and of buffers with ``room`` for so many tokens."""
        return self.state_bytes + sum(
            layers
            * self._format(buffer, position).nbytes(
                buffer.elements_per_token * self._workload.batch
            )
            * room(buffer)
            for buffer, layers in self._layers.items()
        )

    def around(self, call: PlannedCall) -> dict[KVBuffer, Occupancy]:
        """Return each buffer's capacity around a call."""
        occupancy = self._around_decode if call.phase == "decode" else self._around_chunk
        if self.copies(call):
            occupancy = self._around_copy
        return {
            buffer: occupancy(buffer, call, self._format(buffer, call.position))
            for buffer in self._layers
        }

    def copies(self, call: PlannedCall) -> bool:
        """Whether a call first copies the caches of all sequences that begin to generate.

        Source: mlx-lm generate.py, PromptProcessingBatch.split; cache.py, BatchKVCache.filter.
        """
        return self.is_batched and call.phase == "last_token"

    def _around_copy(self, buffer: KVBuffer, call: PlannedCall, kv: KVFormat) -> Occupancy:
        return replace(self._around_chunk(buffer, call, kv), is_copied=True)

    def _around_chunk(self, buffer: KVBuffer, call: PlannedCall, kv: KVFormat) -> Occupancy:
        before = capacity_at(buffer, self._workload, call.position)
        after = grown(buffer, before, call.position, call.tokens)
        visible = call.position + call.tokens
        # A chunk attends to all of the joined buffer: the rest of the window and itself.
        if buffer.growth is Growth.ROTATING:
            visible = after
        elif buffer.limit is not None:
            # ChunkedKVCache.maybe_trim_front cuts the old tokens to the limit before the call.
            visible = min(call.position, buffer.limit) + call.tokens
        # fetch_nearest_cache (mlx-lm cache.py) copies no array: the first call makes its own.
        is_stored = bool(before) and call.position == self._workload.cached_tokens
        return Occupancy(before, after, visible, kv, is_stored=is_stored)

    def _around_decode(self, buffer: KVBuffer, call: PlannedCall, kv: KVFormat) -> Occupancy:
        """The largest decode step is the last one that grows the buffer."""
        prefilled = capacity_at(buffer, self._workload, self._workload.prompt_tokens - 1)
        after = capacity_at(buffer, self._workload, call.position)
        # Single tokens grow a buffer by one step at a time, from what prefill has left.
        before = prefilled if after <= prefilled else max(after - STEP, prefilled)
        return Occupancy(before, after, min(after, buffer.held_tokens(call.position)), kv)

    def bytes_during(self, occupancy: dict[KVBuffer, Occupancy], simulated: Counter[int]) -> int:
        """Return the caches before a call, and after it for the layers that are not simulated.

        Stored caches are counted beside those of the run.
        """
        inside: Counter[KVBuffer] = Counter()
        for number, layers in simulated.items():
            for buffers in self.of_plans[number]:
                for buffer in buffers:
                    inside[buffer] += layers
        total = self._stored_bytes
        for buffer, layers in self._layers.items():
            held = occupancy[buffer]
            token = held.kv.nbytes(buffer.elements_per_token * self._workload.batch)
            # A simulated layer allocates its larger buffer among its own steps.
            growing = min(layers, inside[buffer])
            own = 0 if held.is_stored else held.before
            total += token * (own * growing + held.after * (layers - growing))
        return total

    def replaced_bytes(self, occupancy: dict[KVBuffer, Occupancy]) -> int:
        """Return the caches that larger ones replace in a call; stored ones stay in use."""
        return sum(
            layers * held.before * held.kv.nbytes(buffer.elements_per_token * self._workload.batch)
            for buffer, layers in self._layers.items()
            if (held := occupancy[buffer]).after > held.before and not held.is_stored
        )

    def replaced_in_decode(self, more: int) -> int:
        """Return all caches that larger ones have replaced since the prompt.

        ``more`` are tokens that a step writes beyond those of the workload.
        """
        workload = self._workload
        prefilled, end = workload.prompt_tokens - 1, workload.total_tokens + more
        places = (*range(prefilled, end, STEP), end)
        total = 0
        for buffer, layers in self._layers.items():
            rooms = {capacity_at(buffer, workload, place) for place in places}
            token = self._format(buffer, end).nbytes(buffer.elements_per_token * workload.batch)
            total += layers * token * (sum(rooms) - max(rooms))
        return total

    def packed_bytes(self, call: CallShape, simulated: Counter[int], *, decoding: bool) -> int:
        """Return what values that view one packed product keep alive in addition to their own.

        A first chunk that becomes the buffer is such a view until the buffer grows: in the layers
        that have run in that chunk, and in the call after it in those that have not run.
        """
        workload, total = self._workload, 0
        if workload.cached_tokens:
            return 0
        first = min(workload.prompt_tokens - 1, workload.prefill_step)
        position = workload.prompt_tokens - 1 if decoding else call.previous
        for number, layers in self._prepared.layers.items():
            for mixer, buffers in zip(
                self._prepared.plans[number].mixers, self.of_plans[number], strict=True
            ):
                if len(mixer.inputs) > 1 or not mixer.mixer.owns_cache:
                    continue
                outside = layers - simulated[number]
                for buffer in buffers:
                    held = call.occupancy[buffer]
                    before = capacity_at(buffer, workload, position) if decoding else held.before
                    packed = mixer.inputs[0].outputs - buffer.heads * buffer.value_dim
                    if held.is_first_chunk:
                        total += call.tokens * packed * outside
                    elif before == first == position and held.kv.bits is None:
                        # bytes_during has the other layers after they have run, if that is more.
                        grown_by = (held.after - held.before) * buffer.elements_per_token
                        total += first * packed * simulated[number]
                        total += max(0, first * packed - grown_by) * outside
        return total * self._width * call.batch

    def view_bytes(self, call: CallShape, simulated: Counter[int], *, decoding: bool) -> int:
        """Return what states that are slices keep alive in addition to their own bytes."""
        workload, total = self._workload, 0
        chunk = next(workload.prefill_chunks(), 0)
        for number, layers in self._prepared.layers.items():
            # Some classes keep a state as a slice, which keeps its whole array alive: that of this
            # chunk in a layer that has run, that of the chunk before in one that has not.
            outside = layers - simulated[number]
            tokens = call.previous * layers + max(0, call.tokens - call.previous) * outside
            if decoding:
                # A state that decode does not replace is still a slice of an array of a chunk,
                # unless the batch generator has copied it.
                tokens = 0 if self.is_batched else chunk * layers
            for mixer in self._prepared.plans[number].mixers:
                total += tokens * view_elements(mixer.mixer.states(), decoding=decoding)
        return total * self._width * call.batch

    def pending_bytes(self, planned: PlannedCall) -> int:
        """Return the states that a step still holds of the step before.

        In a batch gated delta nets choose between the old and the new state of each sequence; in
        mlx-lm's loop, which runs without Metal, no output needs the choice, so that both are held
        until the next step makes it (gated_delta.py, _gated_delta_step_ops).
        """
        is_loop = self._prepared.traits.backend != "metal"
        if not (is_loop and self.is_batched and planned.phase in ("decode", "last_token")):
            return 0
        states = (
            (layers, mixer.mixer.states()[1])
            for number, layers in self._prepared.layers.items()
            for mixer in self._prepared.plans[number].mixers
            if mixer.mixer.kind == GatedDelta.kind
        )
        return self._workload.batch * sum(
            layers * state.elements * (_FLOAT32 if state.float32 else self._width)
            for layers, state in states
        )

    def largest(self, occupancy: dict[KVBuffer, Occupancy]) -> int:
        """Return the bytes of the largest array of keys or values."""
        return max(
            (
                held.kv.nbytes(
                    buffer.heads * max(buffer.key_dim, buffer.value_dim) * self._workload.batch
                )
                * held.after
                for buffer, held in occupancy.items()
            ),
            default=0,
        )

    @property
    def are_converted(self) -> bool:
        """Whether the run quantises caches that it filled plain."""
        end = self._workload.total_tokens
        return any(self._format(buffer, end).bits is not None for buffer in self._layers)

    def converted_bytes(self, call: PlannedCall) -> tuple[int, int]:
        """Return all caches after a call as they were, and those that are quantised then."""
        # mx.quantize reads the plain arrays, so both exist until all caches are evaluated.
        plain, quantised = self._stored_bytes, 0
        after = KVFormat(self._width, self._workload.kv_bits, self._workload.kv_group_size)
        for buffer, held in self.around(call).items():
            elements = buffer.elements_per_token * held.after * self._workload.batch
            elements *= self._layers[buffer]
            plain += elements * self._width
            # Only classes with to_quantized (mlx-lm generate.py, maybe_quantize_kv_cache).
            if is_convertible(buffer):
                quantised += after.nbytes(elements)
        return plain, quantised

    def _format(self, buffer: KVBuffer, position: int) -> KVFormat:
        return kv_format(buffer, self._workload, self._width, position)
