"""The operations of multi-head latent attention (mlx-lm models/deepseek_v3.py, deepseek_v32.py)."""

from memfit.estimators.arch.specs import Attention, Indexer, KVBuffer, LatentAttention
from memfit.estimators.mlx import operation_counts as ops
from memfit.estimators.workspace.attention import SCORES, attend, write
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.prepared import MixerPlan, Projection
from memfit.estimators.workspace.projections import norm, project, rope
from memfit.estimators.workspace.tape import Tape


def record_latent(
    tape: Tape,
    x: int,
    spec: LatentAttention,
    plan: MixerPlan,
    call: CallShape,
    buffers: list[KVBuffer],
) -> int:
    """Record a latent attention layer on its normed input; return its output."""
    rows, heads = call.rows, spec.heads
    by_name = {projection.name: projection for projection in plan.projections}
    low_rank = x
    if spec.low_rank_queries:
        low_rank = project(tape, x, by_name["q_a_proj"], rows)
        low_rank = norm(tape, low_rank, tape.elements[low_rank], shared=False)
    queries = project(
        tape, low_rank, by_name["q_b_proj" if spec.low_rank_queries else "q_proj"], rows
    )
    latent = project(tape, x, by_name["kv_a_proj_with_mqa"], rows)
    # The latent and the rope key are views of one product, so the norm cannot write over it.
    latent_normed = norm(tape, latent, rows * spec.latent_dim, shared=True)
    # Only the rope part of each head is rotated. The rope key is one for all heads.
    turned = rope(tape, queries, rows * heads * spec.rope_dim, rows=call.tokens, dim=spec.rope_dim)
    key_turned = rope(tape, latent, rows * spec.rope_dim, rows=call.tokens, dim=spec.rope_dim)
    if spec.caches_expanded:
        output = _expanded(tape, call, spec, buffers[0], (queries, turned, latent_normed), by_name)
    else:
        if spec.indexer:
            # The indexer has a cache of its own, the second of the layer.
            _index(tape, x, low_rank, spec.indexer, call, by_name, buffers[1])
        output = _absorbed(
            tape, call, spec, buffers[0], (queries, turned, latent_normed, key_turned), by_name
        )
    # The indexer's matrices follow those of attention.
    return project(tape, output, by_name["o_proj"], rows)


def _absorbed(
    tape: Tape,
    call: CallShape,
    spec: LatentAttention,
    buffer: KVBuffer,
    arrays: tuple[int, int, int, int],
    by_name: dict[str, Projection],
) -> int:
    """The latent is cached; a chunk expands it to keys and values of every head."""
    queries, turned, latent, key_turned = arrays
    occupancy, heads = call.occupancy[buffer], spec.heads
    held, held_rope = (
        write(tape, call, buffer, fresh, dim)
        for fresh, dim in ((latent, spec.latent_dim), (key_turned, spec.rope_dim))
    )
    keys = occupancy.keys
    # q_pe * scale. The product with the rope keys then becomes the mask of attention.
    tape.inplace(turned)
    scores = tape.allocate(
        (turned, held_rope), call.rows * heads * keys, counts=ops.ROPE_SCORES, name=SCORES
    )
    embed, unembed = by_name["embed_q"].touched, by_name["unembed_out"].touched
    # One query is cheaper to project into the latent space than all keys are to expand; the
    # cached latent is then both keys and values.
    if call.tokens == 1:
        absorbed = tape.allocate(
            (queries,),
            call.rows * heads * spec.latent_dim,
            weight=embed,
            counts=ops.ABSORBED_QUERIES,
        )
        mixed = _attend_masked(tape, call, (absorbed, held, held), scores, spec.latent_dim, spec)
        return tape.allocate(
            (mixed,),
            call.rows * heads * spec.value_dim,
            weight=unembed,
            counts=ops.UNEMBEDDED_VALUES,
        )
    # mx.where masks the future in the scores themselves.
    tape.inplace(scores)
    # Keys and values of every head for the whole context, not for this chunk alone.
    expanded = call.batch * heads * keys
    keys_array = tape.allocate(
        (held,), expanded * spec.nope_dim, weight=embed, name="MLA expansion"
    )
    values = tape.allocate((held,), expanded * spec.value_dim, weight=unembed, name="MLA expansion")
    return _attend_masked(tape, call, (queries, keys_array, values), scores, spec.nope_dim, spec)


def _attend_masked(
    tape: Tape,
    call: CallShape,
    arrays: tuple[int, int, int],
    mask: int,
    key_dim: int,
    spec: LatentAttention,
) -> int:
    """Attention with the rope scores as an additive mask of full size."""
    queries, keys, values = arrays
    # The values of a single query are the latent, which is as wide as the keys.
    value_dim = key_dim if call.tokens == 1 else spec.value_dim
    count = tape.elements[mask]
    wide = call.rows * spec.heads * value_dim
    if call.fused(
        keys=count // (call.rows * spec.heads),
        key_dim=key_dim,
        value_dim=value_dim,
        heads=spec.heads,
        # All heads read the one latent.
        kv_heads=1 if call.tokens == 1 else spec.heads,
        array_mask=True,
        quantised=False,
    ):
        return tape.allocate((queries, keys, values, mask), wide)
    # The nope queries are a strided part of q, so scaling cannot write over them.
    scaled = tape.allocate((queries,), call.rows * spec.heads * key_dim, counts=ops.LATENT_QUERIES)
    scores = tape.allocate((scaled, keys), count, counts=ops.LATENT_SCORES, name=SCORES)
    # scores + mask, then the softmax.
    tape.inplace(scores, mask)
    tape.inplace(scores)
    output = tape.allocate((scores, values), wide)
    return (
        output
        if call.tokens == 1
        else tape.allocate((output,), wide, counts=ops.LATENT_JOINED_HEADS)
    )


def _expanded(
    tape: Tape,
    call: CallShape,
    spec: LatentAttention,
    buffer: KVBuffer,
    arrays: tuple[int, int, int],
    by_name: dict[str, Projection],
) -> int:
    """Keys and values of every head are cached, as older classes do (mlx-lm deepseek_v2.py)."""
    queries, turned, latent = arrays
    rows, heads = call.rows, spec.heads
    key_dim = spec.nope_dim + spec.rope_dim
    # kv_b_proj makes the nope keys and the values of all heads in one product.
    both = project(tape, latent, by_name["kv_b_proj"], rows)
    # mx.repeat copies the rope key to every head before it is joined to the nope keys.
    keys = tape.allocate((both, latent), rows * heads * key_dim, counts=ops.EXPANDED_KEYS)
    joined = tape.allocate((queries, turned), rows * heads * key_dim, counts=ops.JOINED_QUERIES)
    occupancy = call.occupancy[buffer]
    held_keys, held_values = (
        write(tape, call, buffer, fresh, dim)
        for fresh, dim in ((keys, key_dim), (both, spec.value_dim))
    )
    # From here it is attention with a key head for every query head.
    plain = Attention(heads=heads, kv_heads=heads, key_dim=key_dim, value_dim=spec.value_dim)
    return attend(
        tape,
        call,
        (joined, held_keys, held_values),
        occupancy=occupancy,
        spec=plain,
        array_mask=False,
    )


def _index(
    tape: Tape,
    x: int,
    low_rank: int,
    indexer: Indexer,
    call: CallShape,
    by_name: dict[str, Projection],
    buffer: KVBuffer,
) -> None:
    """The indexer scores every key and masks all but the best (deepseek_v32.py, Indexer)."""
    rows, heads, keys = call.rows, indexer.heads, call.occupancy[buffer].keys

    def held_keys() -> int:
        fresh = project(tape, x, by_name["wk"], rows)
        fresh = rope(tape, fresh, rows * indexer.dim, rows=call.tokens, dim=indexer.dim)
        return write(tape, call, buffer, fresh, indexer.dim)

    # Indexer returns None: no key can be left out. Its keys are then read by the cache alone.
    if keys <= indexer.top_k:
        tape.defer(held_keys)
        return
    queries = project(tape, low_rank, by_name["wq_b"], rows)
    held = held_keys()
    wide = rows * heads * indexer.dim
    queries = rope(tape, queries, wide, rows=call.tokens, dim=indexer.dim)
    scores = tape.allocate(
        (queries, held), rows * heads * keys, counts=ops.INDEXER_SCORES, name="indexer scores"
    )
    # relu of the scores, then the weight of each head.
    tape.inplace(scores)
    tape.inplace(scores)
    # A chunk adds up its heads one by one in Python: mlx-lm's workaround for ml-explore/mlx#3784.
    total = tape.allocate(
        (scores,), rows * keys, counts=ops.repeated(heads if call.tokens > 1 else 1)
    )
    tape.inplace(total)
    # argpartition orders the positions of all keys as uint32; the best are a view of them.
    best = tape.allocate((total,), rows * keys, nbytes=rows * keys * 4)
    # mx.zeros of booleans, one byte each; put_along_axis then marks the best keys.
    mask = tape.allocate((), rows * keys, nbytes=rows * keys)
    tape.inplace(mask, best, counts=ops.INDEXER_MASK)
