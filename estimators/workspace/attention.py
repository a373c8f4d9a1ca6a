"""The operations of attention over keys and values of heads (mlx-lm models/base.py and others)."""

from collections.abc import Callable

from msgspec.structs import replace

from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    Growth,
    KVBuffer,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.mlx.kernels import VectorCall
from memfit.estimators.workspace.call import CallShape, Occupancy
from memfit.estimators.workspace.prepared import MixerPlan
from memfit.estimators.workspace.projections import norm, project, project_each, rope
from memfit.estimators.workspace.tape import Tape

SCORES = "attention scores"
_FLOAT32 = 4
KV_BUFFER = "KV buffer"


def record_attention(
    tape: Tape, x: int, spec: Attention, plan: MixerPlan, call: CallShape, buffer: KVBuffer
) -> int:
    """Record an attention layer on its normed input; return its output."""
    rows = call.rows
    inputs = plan.inputs
    head_gate = None
    if spec.head_gate:
        head_gate = tape.inplace(project(tape, x, inputs[0], rows))
        inputs = inputs[1:]
    # MLX walks the graph breadth first from its end, so keys and values come before queries.
    if spec.value_norm and len(inputs) == 3:
        # Values with a norm are no deeper in it than keys and queries, which are rotated too.
        ahead = (inputs[1], inputs[0], inputs[2])
        first, queries, last = project_each(tape, x, ahead, rows)
        others = [first, last]
    else:
        *others, queries = project_each(tape, x, inputs[1:] + inputs[:1], rows)
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
    arrays = _heads(tape, call, spec, buffer, (queries, keys, values), is_packed=not apart)
    # What is left to read of a packed product are the values.
    tape.elements[values] = rows * spec.kv_heads * spec.value_dim
    occupancy = call.occupancy[buffer]
    output = attend(
        tape,
        call,
        arrays,
        occupancy=occupancy,
        spec=spec,
        array_mask=needs_array_mask(spec, call, occupancy),
    )
    if gate is not None:
        # output * sigmoid(gate), both over an array that nothing else reads (mlx-lm qwen3_next.py).
        tape.inplace(gate)
        tape.inplace(output, gate)
    if head_gate is not None:
        tape.inplace(output, head_gate)
    return project(tape, output, plan.output, rows)


def _heads(
    tape: Tape,
    call: CallShape,
    spec: Attention,
    buffer: KVBuffer,
    arrays: tuple[int, int, int],
    *,
    is_packed: bool,
) -> tuple[int, int, int]:
    """Record norms, rotary embeddings and the cache update; return what attention reads."""
    queries, keys, values = arrays
    wide, narrow = (call.rows * heads * spec.key_dim for heads in (spec.heads, spec.kv_heads))

    def normed(array: int, elements: int) -> int:
        # A view of a packed product shares its buffer, so the norm cannot write over it.
        return norm(tape, array, elements, shared=is_packed) if spec.qk_norm else array

    def turned(array: int, elements: int) -> int:
        return rope(tape, array, elements, rows=call.tokens, dim=spec.key_dim)

    on_cpu = tape.backend == "cpu"
    if on_cpu:
        # Chains of many operations there, which end together.
        keys, queries = tape.alternate(
            (
                lambda: turned(normed(keys, narrow), narrow) if spec.owns_cache else keys,
                lambda: turned(normed(queries, wide), wide),
            )
        )
    else:
        keys, queries = normed(keys, narrow) if spec.owns_cache else keys, normed(queries, wide)
    if spec.owns_cache:
        # Room for values comes before the rope of the keys.
        write_values = cache_room(tape, call, buffer, buffer.value_dim)
        keys = keys if on_cpu else turned(keys, narrow)
        write_keys = cache_room(tape, call, buffer, buffer.key_dim)
        held_values, held_keys = write_values(values), write_keys(keys)
    else:
        # The layer reads the cache of an earlier one (mlx-lm gemma3n.py, num_kv_shared_layers).
        held = call.batch * buffer.heads * call.occupancy[buffer].keys
        held_keys, held_values = (
            tape.retain(tape.existing(held * dim)) for dim in (buffer.key_dim, buffer.value_dim)
        )
    # The cache update is deeper in the graph than the rope of the queries, so MLX runs it first.
    return queries if on_cpu else turned(queries, wide), held_keys, held_values


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
        partial_bytes = call.target.vector_attention.partial_bytes(
            VectorCall(
                rows=call.rows * spec.heads,
                queries=call.tokens,
                keys=keys,
                group=spec.heads // spec.kv_heads,
                value_dim=spec.value_dim,
                item_bytes=call.width,
            )
        )
        # The masks of a window and of a batch are boolean, which CUDA's kernels do not take.
        has_copy = array_mask and call.target.backend == "cuda"
        mask = (_additive_mask(tape, call.rows * spec.heads * keys),) if has_copy else ()
        output = tape.allocate(
            (queries, held_keys, held_values, *mask),
            wide,
            nbytes=wide * call.width,
            temporary=rows * kernel.scratch_row(keys, spec.key_dim) * call.width + partial_bytes,
            counts=ops.TWO_PASS_ATTENTION if partial_bytes else ops.ELEMENTWISE,
        )
        if call.target.joins_fused_heads and call.tokens > 1:
            output = tape.allocate((output,), wide, counts=ops.JOINED_HEADS)
        return output
    # From here the fallback of mlx/fast.cpp, scaled_dot_product_attention. For a quantised cache
    # mlx-lm models/base.py takes the same steps with quantized_matmul.
    tape.inplace(queries, counts=ops.SCALED_QUERIES)
    count = call.rows * spec.heads * keys
    scores = _masked_scores(tape, call, spec, (queries, held_keys), keys, array_mask=array_mask)
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


def _additive_mask(tape: Tape, cells: int) -> int:
    """Record zeros and lowest numbers for each cell of a boolean mask, and the choice of one."""
    zeros, lowest = (tape.allocate((), cells, counts=ops.FILLED_MASK) for _ in range(2))
    tape.inplace(zeros, lowest)
    return zeros


def _masked_scores(
    tape: Tape,
    call: CallShape,
    spec: Attention,
    arrays: tuple[int, int],
    keys: int,
    *,
    array_mask: bool,
) -> int:
    """Record the scores of scaled queries and keys, with what no token may see masked."""
    mask: tuple[int, ...] = ()
    # A single query may see every key, so it gets no mask (base.py, create_attention_mask). That
    # of a window, latent attention or a batch is made once for all layers: moments.py counts it.
    if call.tokens > 1 and not array_mask:
        # Every layer makes its own causal mask: one byte for each cell, shared by all heads.
        cells = call.tokens * keys
        mask = (tape.allocate((), cells, nbytes=cells, counts=ops.CAUSAL_MASK),)
    count = call.rows * spec.heads * keys
    scores = tape.allocate(arrays, count, nbytes=count * call.width, counts=ops.SCORES, name=SCORES)
    if not spec.fused:
        # Divided, put through tanh and multiplied: what keeps gemma2.py from the fused kernel.
        for _ in range(3):
            tape.inplace(scores)
    if mask or array_mask:
        tape.inplace(scores, *mask, counts=ops.MASKED_SCORES)
    return scores


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
    held = call.batch * spec.kv_heads * occupancy.keys
    sizes = (call.rows * spec.heads * spec.key_dim, held * spec.key_dim, held * spec.value_dim)
    cast = tuple(
        tape.allocate((array,), elements, nbytes=elements * _FLOAT32, is_part=True)
        for array, elements in zip(arrays, sizes, strict=True)
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


def write(tape: Tape, call: CallShape, buffer: KVBuffer, fresh: int, dim: int) -> int:
    """Record the update of keys or values that are ``dim`` wide."""
    return cache_room(tape, call, buffer, dim)(fresh)


def _found(tape: Tape, occupancy: Occupancy, elements: int, nbytes: int) -> int:
    """Record keys or values as a call finds them."""
    old = tape.existing(elements, nbytes)
    if occupancy.is_copied and elements:
        return tape.allocate((old,), elements, name=KV_BUFFER)
    return tape.retain(old) if occupancy.is_stored else old


def cache_room(tape: Tape, call: CallShape, buffer: KVBuffer, dim: int) -> Callable[[int], int]:
    """Record how keys or values get room (mlx-lm cache.py); return what writes them there."""
    occupancy = call.occupancy[buffer]
    before, after, kv = occupancy.before, occupancy.after, occupancy.kv
    token = call.batch * buffer.heads * dim
    nbytes, size = kv.nbytes(token), kv.touched(token)
    # Packed keys are three arrays: words, scales and biases (QuantizedKVCache).
    arrays = 1 if kv.bits is None else 3
    old = _found(tape, occupancy, size * before, nbytes * before)

    def packed(fresh: int) -> int:
        if kv.bits is None:
            return fresh
        return tape.allocate((fresh,), size * call.tokens, nbytes=nbytes * call.tokens)

    def into(held: int) -> Callable[[int], int]:
        counts = ops.CACHE_WRITE._replace(kernels=arrays)
        return lambda fresh: tape.inplace(held, packed(fresh), counts=counts)

    def made(inputs: tuple[int, ...]) -> int:
        # A concatenation is one copy for each input (mlx backend/gpu/slicing.cpp).
        counts = ops.repeated(arrays * max(1, len(inputs)))
        return tape.retain(
            tape.allocate(
                inputs, size * after, nbytes=nbytes * after, counts=counts, name=KV_BUFFER
            )
        )

    if before == after:
        # There is room. Where only the cache refers to the buffer, the slice update writes into it.
        return into(made((old,)) if occupancy.is_stored else tape.retain(old))
    if occupancy.is_first_chunk:
        return lambda fresh: tape.retain(packed(fresh))
    # A chunk never writes into a rotating buffer: RotatingKVCache._update_concat joins what is
    # left of the old one with the new keys.
    if buffer.growth is Growth.ROTATING and call.tokens > 1:
        return lambda fresh: made((old, packed(fresh)))
    if before == 0:
        return into(made(()))
    # To grow, mlx-lm joins the buffer with zeros: for a moment the old one, the zeros and the new
    # one all exist. After a chunk a rotating buffer is longer than its window and is cut instead.
    room = max(0, after - before)
    zeros = tape.allocate((), size * room, nbytes=nbytes * room, counts=ops.repeated(arrays))
    return into(made((old, zeros)))
