"""How an estimate's memory is divided: a pool that a runtime takes, a GPU and its host."""

from collections.abc import Iterator

from memfit.cli.render.document import Table
from memfit.cli.render.views.text import size
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.advice import Action
from memfit.estimators.results.estimate import Estimate


def pool_table(result: Estimate, units: Units, *, needs_room: bool) -> Iterator[Table]:
    """How the runtime divides the memory that it takes at its start."""
    pool = result.pool
    if not pool:
        return
    # A draft model takes more than its weights, which is not described.
    rest, of_rest = ("at most",) * 2 if pool.draft_bytes else ("the rest", "of the rest")
    draft = [("Draft model's weights", pool.draft_bytes, "")] if pool.draft_bytes else []
    sizes = (
        (f"What {result.runtime.name} takes", pool.budget_bytes, "its share of the memory"),
        ("Weights", pool.weights_bytes, result.components.weights.basis),
        *draft,
        ("Activations", pool.activation_bytes, "upper bound"),
        ("CUDA graphs", pool.graph_bytes, "can be more"),
        ("KV pool", pool.pool_bytes, rest),
    )
    rows = [(name, format_bytes(nbytes, units), basis) for name, nbytes, basis in sizes]
    tokens = result.workload.prompt_tokens + result.workload.max_tokens
    rows += [
        ("Tokens in the pool", str(pool.tokens), of_rest),
        (f"Requests of {tokens} tokens at once", str(pool.requests), of_rest),
    ]
    yield Table(("Pool", "Size", "Basis"), tuple(rows), align="lrl", needs_room=needs_room)


def memories_table(result: Estimate, units: Units) -> Iterator[Table]:
    """What lies on the GPU and what on the host."""
    if not result.memories:
        return
    rows = tuple(
        (
            share.name,
            str(share.layers),
            *(
                format_bytes(nbytes, units)
                for nbytes in (
                    share.weights_bytes,
                    share.cache_bytes + share.state_bytes,
                    share.compute_bytes,
                    share.total_bytes,
                )
            ),
        )
        for share in result.memories
    )
    headings = ("Memory", "Layers", "Weights", "Caches", "Compute", "Total")
    yield Table(headings, rows, align="lrrrrr")


def host_bytes(result: Estimate) -> int:
    """What the host of a GPU holds, 0 where it has no memory of its own."""
    has_host = result.device is not None and result.device.has_host
    shares = (result.memories or ()) if has_host else ()
    return sum(share.total_bytes for share in shares if share.name == "host")


def on_host_text(result: Estimate, units: Units) -> str:
    """What is on the host, of how much where that is known; of one memory what is in it."""
    if not result.memories or result.device is None:
        return ""
    if not result.device.has_host:
        both = size(sum(each.total_bytes for each in result.memories), units)
        whole = size(result.device.memory_bytes, units, down=True)
        return f"; with the host {both} of {whole}"
    (memory,) = (each.memory_bytes for each in result.memories if each.name == "host")
    of = f" of {size(memory, units, down=True)}" if memory else ""
    return f"; host {size(host_bytes(result), units)}{of}"


def then_on_host(action: Action, units: Units) -> str:
    """What the host holds after a change, or has to have where its size is not known."""
    if not (action.host_bytes and action.host_memory_bytes):
        return ""
    if action.verdict == "unknown":
        return f", if that has {size(action.host_memory_bytes, units)}"
    return f", which then holds {size(action.host_bytes, units)}"
