"""The operations of attention over keys and values of heads (mlx-lm models/base.py and others)."""

from msgspec.structs import replace

from memfit.estimators.arch.caches import Growth, KVBuffer
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.call import CallShape, Occupancy
from memfit.estimators.workspace.layer_plan import MixerPlan
from memfit.estimators.workspace.mx_fast import norm, rope
from memfit.estimators.workspace.projections import project, project_each
from memfit.estimators.workspace.tape import Tape

SCORES = "attention scores"
_FLOAT32 = 4
KV_BUFFER = "KV buffer"


def record_attention(
    tape: Tape, x: int, spec: Attention, plan: MixerPlan, call: CallShape, buffer: KVBuffer
) -> int:
    """Record an attention layer on its normed input; return its output."""
    rows = call.rows
    # MLX walks the graph breadth first from its end, so keys and values come before queries.
    ahead = plan.inputs[1:] + plan.inputs[:1]
    *others, queries = project_each(tape, x, ahead, rows)
    apart = len(others) > 0
    # One packed qkv_proj is split into views of one product (mlx-lm phi3.py); gemma4_text.py can
    # use its keys as values too, so there may be one array for both.
    keys, values = (others[0], others[-1]) if apart else (queries, queries)
    wide = rows * spec.heads * spec.key_dim
    gate = None
    if spec.output_gate:
        # The doubled query projection holds the output gate; both halves are strided.
        gate = tape.allocate((queries,), wide, counts=ops.PART_COPY, is_part=True)
        queries = tape.allocate((queries,), wide, counts=ops.PART_COPY, is_part=True)
    narrow = rows * spec.kv_heads * spec.key_dim

    def normed(array: int, elements: int) -> int:
        # A view of a packed product shares its buffer, so the norm cannot write over it.
        return norm(tape, array, elements, shared=not apart) if spec.qk_norm else array

    def turned(array: int, elements: int) -> int:
        return rope(tape, array, elements, rows=call.tokens, dim=spec.key_dim)

    def for_keys() -> int:
        return turned(normed(keys, narrow), narrow) if spec.owns_cache else keys

    on_cpu = tape.backend == "cpu"
    if on_cpu:
        # Chains of many operations there, which end together.
        keys, queries = tape.alternate((for_keys, lambda: turned(normed(queries, wide), wide)))
    else:
        keys, queries = for_keys(), normed(queries, wide)
    occupancy = call.occupancy[buffer]
    held_keys, held_values = _fetch(tape, call, buffer, (keys, values), spec.owns_cache)
    if not on_cpu:
        # The cache update is deeper in the graph than the rope of the queries, and runs first.
        queries = turned(queries, wide)
    # What is left to read of a packed product are the values.
    tape.elements[values] = rows * spec.kv_heads * spec.value_dim
    output = attend(
        tape,
        call,
        (queries, held_keys, held_values),
        occupancy=occupancy,
        spec=spec,
        array_mask=needs_array_mask(spec, call, occupancy),
    )
    if gate is not None:
        # output * sigmoid(gate), both over an array that nothing else reads (mlx-lm qwen3_next.py).
        tape.inplace(gate)
        tape.inplace(output, gate)
    return project(tape, output, plan.output, rows)


def needs_array_mask(spec: Mixer, call: CallShape, occupancy: Occupancy) -> bool:
    """Whether the mask of a chunk is an array.

    It is for a window with more keys than it has tokens (cache.py, make_mask), for latent
    attention, which adds the scores of its rope part as a mask (deepseek_v3.py), and for each
    sequence of a batch (BatchKVCache.make_mask).
    """
    match spec:
        case Attention():
            # A mask that is only causal is passed as the word "causal" (mlx-lm models/base.py).
            is_cut = spec.window is not None and occupancy.keys > spec.window
            return call.is_batched or (call.tokens > 1 and is_cut)
        case LatentAttention():
            return call.tokens > 1
        case GatedDelta() | Recurrent() | TracedMixer():
            return False
        case _:
            assert_never(spec)


def attend(
    tape: Tape,
    call: CallShape,
    arrays: tuple[int, int, int],
    *,
    occupancy: Occupancy,
    spec: Attention,
    array_mask: bool,
) -> int:
    """Record scaled_dot_product_attention up to its output with tokens before heads."""
    keys = occupancy.keys
    wide = call.rows * spec.heads * spec.value_dim
    if spec.float32 and call.width != _FLOAT32:
        return _attend_in_float32(
            tape, call, arrays, occupancy=occupancy, spec=spec, array_mask=array_mask
        )
    queries, held_keys, held_values = arrays
    # A fused kernel computes the softmax in tiles, so a full array of scores never exists.
    kernel = spec.fused and call.fused(
        keys=keys,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        array_mask=array_mask,
        quantised=occupancy.kv.bits is not None,
    )
    if kernel:
        rows = call.batch * spec.heads * kernel.block
        output = tape.allocate(
            (queries, held_keys, held_values),
            wide,
            nbytes=wide * call.width,
            temporary=rows * kernel.scratch_row(keys, spec.key_dim) * call.width,
        )
        if call.target.joins_fused_heads and call.tokens > 1:
            output = tape.allocate((output,), wide, counts=ops.JOINED_HEADS)
        return output
    # From here the fallback of mlx/fast.cpp, scaled_dot_product_attention. For a quantised cache
    # mlx-lm models/base.py takes the same steps with quantized_matmul.
    tape.inplace(queries, counts=ops.SCALED_QUERIES)
    count = call.rows * spec.heads * keys
    scores = tape.allocate(
        (queries, held_keys), count, nbytes=count * call.width, counts=ops.SCORES, name=SCORES
    )
    if not spec.fused:
        # Divided, put through tanh and multiplied: what keeps gemma2.py from the fused kernel.
        for _ in range(3):
            tape.inplace(scores)
    # A single query may see every key, so it gets no mask (base.py, create_attention_mask).
    if call.tokens > 1 or array_mask:
        if array_mask:
            # Made once for all layers: moments.py counts this mask.
            tape.inplace(scores, counts=ops.MASKED_SCORES)
        else:
            # Every layer makes its own causal mask: one byte for each cell, shared by all heads.
            cells = call.tokens * keys
            mask = tape.allocate((), cells, nbytes=cells, counts=ops.CAUSAL_MASK)
            tape.inplace(scores, mask, counts=ops.MASKED_SCORES)
    temporary = 0
    # A sink is one more score in each row. It is joined before the softmax and cut off after it.
    if spec.sinks:
        scores = tape.allocate(
            (scores,), count + call.rows * spec.heads, counts=ops.SCORES_WITH_SINKS, name=SCORES
        )
        # Without the sink the rows have gaps, and the CPU's product copies such an operand
        # (mlx backend/cpu/matmul.cpp, check_transpose).
        temporary = count * call.width if call.target.backend == "cpu" else 0
    # The softmax writes over an input that only it reads (softmax.cpp of each backend).
    tape.inplace(scores)
    nbytes = wide * call.width
    output = tape.allocate(
        (scores, held_values), wide, nbytes=nbytes, counts=ops.WEIGHTED_VALUES, temporary=temporary
    )
    # With one token, tokens before heads is the same order in memory: reshape copies nothing.
    if call.tokens == 1:
        return output
    return tape.allocate((output,), wide, nbytes=nbytes, counts=ops.JOINED_HEADS)


def _attend_in_float32(
    tape: Tape,
    call: CallShape,
    arrays: tuple[int, int, int],
    *,
    occupancy: Occupancy,
    spec: Attention,
    array_mask: bool,
) -> int:
    """Queries are cast, and keys and values follow by promotion (mlx-lm phi.py, stablelm.py)."""
    # The plain arrays stay: the cache still holds keys and values in the model's dtype.
    cast = tuple(
        tape.allocate((array,), tape.elements[array], nbytes=tape.elements[array] * _FLOAT32)
        for array in arrays
    )
    output = attend(
        tape,
        replace(call, width=_FLOAT32),
        (cast[0], cast[1], cast[2]),
        occupancy=occupancy,
        spec=spec,
        array_mask=array_mask,
    )
    # Both classes cast the output back to the dtype of the values.
    return tape.allocate((output,), tape.elements[output])


def _fetch(
    tape: Tape, call: CallShape, buffer: KVBuffer, fresh: tuple[int, int], owns: bool
) -> tuple[int, int]:
    """Record the cache update; return keys and values as attention reads them."""
    occupancy = call.occupancy[buffer]
    pair = []
    for array, dim in zip(fresh, (buffer.key_dim, buffer.value_dim), strict=True):
        token = call.batch * buffer.heads * dim
        if owns:
            pair.append(write(tape, occupancy, array, token, buffer.growth))
        else:
            # The layer reads the cache of an earlier one (mlx-lm gemma3n.py, num_kv_shared_layers).
            elements = token * occupancy.keys
            pair.append(tape.retain(tape.existing(elements)))
    return pair[0], pair[1]


def write(tape: Tape, occupancy: Occupancy, fresh: int, token: int, growth: Growth) -> int:
    """Record the update of one buffer of ``token`` elements a token (mlx-lm cache.py)."""
    before, after, kv = occupancy.before, occupancy.after, occupancy.kv
    nbytes = kv.nbytes(token)
    old = tape.existing(token * before, nbytes * before)
    if occupancy.is_copied and before:
        old = tape.allocate((old,), token * before, name=KV_BUFFER)
    if kv.bits is not None:
        # mx.quantize makes new packed arrays; the plain ones are then free (QuantizedKVCache).
        fresh = tape.allocate((fresh,), token, nbytes=nbytes)
    if before == after:
        # There is room. Only the cache refers to the buffer, so the slice update writes into it.
        return tape.inplace(tape.retain(old), fresh, counts=ops.CACHE_WRITE)
    if occupancy.is_first_chunk:
        return tape.retain(fresh)
    # A chunk never writes into a rotating buffer: RotatingKVCache._update_concat joins what is
    # left of the old one with the new keys.
    if growth is Growth.ROTATING and tape.elements[fresh] > token:
        return _made(tape, (old, fresh), token * after, nbytes * after)
    if before == 0:
        held = _made(tape, (), token * after, nbytes * after)
        return tape.inplace(held, fresh, counts=ops.CACHE_WRITE)
    # To grow, mlx-lm joins the buffer with zeros: for a moment the old one, the zeros and the new
    # one all exist. After a chunk a rotating buffer is longer than its window and is cut instead.
    room = max(0, after - before)
    zeros = tape.allocate((), token * room, nbytes=nbytes * room)
    held = _made(tape, (old, zeros), token * after, nbytes * after)
    return tape.inplace(held, fresh, counts=ops.CACHE_WRITE)


def _made(tape: Tape, inputs: tuple[int, ...], elements: int, nbytes: int) -> int:
    # A concatenation is one copy for each input (mlx backend/gpu/slicing.cpp, concatenate_gpu).
    kernels = ops.repeated(max(1, len(inputs)))
    return tape.retain(
        tape.allocate(inputs, elements, nbytes=nbytes, counts=kernels, name=KV_BUFFER)
    )
