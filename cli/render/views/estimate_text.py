"""The first screen of an estimate: the verdict, the grid, and what to type."""

import shlex
from collections.abc import Iterator, Mapping

from memfit.cli.render.views.estimate_memories import host_bytes, on_host_text, then_on_host
from memfit.cli.render.views.text import (
    conversion_text,
    gigabytes,
    gpu_budget,
    named,
    percent,
    runtime_text,
    size,
    tenths,
    tokens,
)
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import FREE_NOW, PROCESS_BYTES, RESERVED, name_as_sold
from memfit.estimators.results.advice import Action, Recommended
from memfit.estimators.results.estimate import DeviceSummary, Estimate, Limit, RankPlan
from memfit.estimators.runtimes.runtime import comfortable_bytes

SETTINGS = {
    "weight_bits": "{} bits",
    "kv_bits": "KV {} bits",
    "prefill_step": "prefill step {}",
    "host_experts": "the experts of {} layers on the host",
    "gpu_layers": "{} layers on the GPU and the others on the host",
}
"""How an action's settings are called; memory is a machine's."""
_SHARED = {FREE_NOW: " free now", RESERVED: " beside the reserve"}


def _tightness(result: Estimate, units: Units) -> str:
    most = result.needed_bytes + result.peak_range_bytes[1] - result.peak_bytes
    working_set = result.device.working_set_bytes if result.device else 0
    reasons = [limit.reason for limit in ending(result)]
    # Within nine tenths it is tight because of its error alone.
    if result.needed_bytes > comfortable_bytes(working_set):
        reasons.append("above nine tenths it can be slow")
    elif most > working_set:
        reasons.append(f"with its stated error up to {size(most, units)}")
    elif not reasons:
        reasons.append("above nine tenths of the host's memory it can be slow")
    return "; ".join(reasons)


def headline(result: Estimate, units: Units) -> str:
    """The verdict, with what has to change, and where another MLX reverses it."""
    reversals = [note.message for note in result.notes if note.code == "mlx-verdict"]
    text = _headline(result, units)
    if reversals:
        text = (
            text.removesuffix(" Nothing to change.")
            + f" {reversals[0][0].upper()}{reversals[0][1:]}."
        )
    if not result.refusal and any(note.code == "no-mtp" for note in result.notes):
        text += " MTP is not loaded."
    return text


def _headline(result: Estimate, units: Units) -> str:
    name = result.model.id.rstrip("/").rpartition("/")[2]
    needed = size(result.needed_bytes, units)
    if result.refusal:
        return f"{name}: {result.runtime.name} does not load it."
    if "context" in result.exceeded:
        tokens, runtime = result.workload.total_tokens, result.runtime.name
        return f"{name}: does not fit; {runtime} stops before {tokens} tokens."
    if result.device is None:
        each = f" on each of {len(result.ranks.ranks)} ranks" if result.ranks else ""
        return f"{name}: needs {needed}{each}. {_mac(result)}"
    share = f"{needed} of {size(result.device.working_set_bytes, units, down=True)}"
    share += _SHARED.get(result.device.budget, "")
    start = f"{name}, {_machines(result.device, result)}:"
    part = percent(result.needed_bytes, result.device.working_set_bytes)
    if result.verdict == "unknown":
        host = size(host_bytes(result), units)
        return f"{start} needs {share} ({part}) and {host} on the host: give --host-memory SIZE."
    on_host = on_host_text(result, units)
    if result.verdict == "fits":
        open_ends = [limit.reason for limit in result.limits if limit.verdict == "unknown"]
        rest = "; ".join(open_ends) or "nothing to change"
        return f"{start} fits ({share}, {part}{on_host}). {rest[0].upper()}{rest[1:]}."
    share += on_host
    if result.verdict == "tight":
        remedy = _remedy(result, units)
        return f"{start} tight ({share}); {_tightness(result, units)}. {remedy}".rstrip()
    label = result.grid.rows[0].label if result.grid.rows else ""
    at = f" at {label}" if label[:1].isdigit() else ""
    ways = (alone_text(result.ranks, units) if result.ranks else "", _remedy(result, units))
    return f"{start} does not fit{at} ({_excess(result, share)}). {' '.join(filter(None, ways))}"


def named_as(result: Estimate) -> Iterator[str]:
    """Which model a word was taken for, and which others it could name."""
    yield from (note.message for note in result.notes if note.code == "name")


def refusal(result: Estimate) -> Iterator[str]:
    """Why the checkpoint does not load, and what loads it."""
    if result.refusal:
        yield result.refusal.reason
        for name in result.refusal.loaded_by:
            yield f"{name} loads it: --runtime {name} sizes it for {name}"


def _excess(result: Estimate, share: str) -> str:
    if "working_set" in result.exceeded:
        return share
    if "memory" in result.exceeded:
        return f"{share}; GPU and host together are larger than the memory"
    if "host_memory" in result.exceeded:
        return f"{share}; more than the host has"
    if "runtime_budget" in result.exceeded:
        return f"{share}; more than {result.runtime.name} gives itself"
    if "cache_budget" in result.exceeded:
        return f"{share}; the cache is larger than {result.runtime.name} gives it"
    return f"{share}; one allocation is larger than the device allows"


def _remedy(result: Estimate, units: Units) -> str:
    chosen = result.best
    if chosen is None or "memory_bytes" in chosen.settings:
        return _mac(result)
    if not chosen.settings:
        return ""
    word = "is tight" if chosen.verdict == "tight" else "fits"
    text = f"{chosen.runtime or 'It'} {word} {settings_text(chosen.settings)}"
    return f"{text}{then_on_host(chosen, units)}."


def _mac(result: Estimate) -> str:
    chosen = result.best
    if chosen is None:
        return "No Mac is large enough." if _looks_at_macs(result) else ""
    text = f"The smallest Mac that fits has {gigabytes(chosen.settings['memory_bytes'])}"
    changes = settings_text(chosen.settings)
    return f"{text}, {changes}." if changes else f"{text}."


def _looks_at_macs(result: Estimate) -> bool:
    return result.recommendation.memory_bytes.state == "impossible"


def settings_text(settings: Mapping[str, int]) -> str:
    """What changes, after "it fits"; empty when nothing but the machine does."""
    parts = [text.format(settings[name]) for name, text in SETTINGS.items() if name in settings]
    if not parts:
        return ""
    start = "at" if "weight_bits" in settings else "with"
    return f"{start} {parts[0]}" + "".join(f" and {part}" for part in parts[1:])


def _machines(device: DeviceSummary, result: Estimate) -> str:
    """The machine, of several ranks the one with the least room."""
    if not result.ranks:
        return name_as_sold(device.name)
    ranks = result.ranks.ranks
    if len({rank.device for rank in ranks}) == 1:
        return f"{len(ranks)} x {name_as_sold(device.name)}"
    return f"{len(ranks)} ranks, least room on {name_as_sold(device.name)}"


def legend(result: Estimate, units: Units) -> tuple[str, ...]:
    """What the cells of the grid mean, what is left out, and what the device gives."""
    if not result.grid.rows:
        return ()
    return tuple(filter(None, (_marks(result, units), "; ".join(_beyond(result)))))


def ending(result: Estimate) -> list[Limit]:
    """What may end the request though its bytes fit; the verdict has its reason."""
    return [limit for limit in result.limits if limit.verdict == "tight"]


def _beyond(result: Estimate) -> Iterator[str]:
    """What may end the longer prompts of the grid, where the request's own verdict has it not."""
    longest = [row.context_verdict for row in result.grid.rows if row.context_tokens]
    if "tight" in longest:
        for limit in result.limits:
            if limit.verdict == "fits" and limit.beyond == "tight":
                yield f"! {limit.reason}"


def _marks(result: Estimate, units: Units) -> str:
    cells = [cell for row in result.grid.rows for cell in row.cells]
    by_prompt = result.grid.axis == "context_tokens"
    is_marked = any(row.context_verdict == "tight" for row in result.grid.rows)
    steps = {cell.prefill_step for cell in cells}
    steps |= {row.context_step for row in result.grid.rows if row.context_tokens}
    parts = []
    if other := sorted(steps - {result.workload.prefill_step}, reverse=True):
        parts.append(f"@{other[0]}: with that prefill step")
    if by_prompt and (is_marked or any(cell.verdict == "tight" for cell in cells)):
        parts.append("! tight")
    if result.device:
        if result.device.backend == "metal":
            parts.append(gpu_budget(result.device, units))
        if result.device.budget == FREE_NOW:
            used = size(result.device.used_by_others_bytes or 0, units)
            parts.append(f"{used} are in use, {size(PROCESS_BYTES, units)} left for the process")
    if result.grid.method != result.method:
        parts.append("by formula")
    if result.grid.left_out:
        parts.append(f"without {', '.join(each.what for each in result.grid.left_out)}: -v")
    return "; ".join(parts)


def recommended(values: Recommended, units: Units, *, clients: int = 0) -> str:
    """What to set for the printed command; empty where nothing fits this machine.

    ``clients`` are those of a server whose command is printed.
    """
    parts = []
    if values.context_tokens:
        count = values.context_tokens
        users = f" for {clients} clients" if clients else ""
        mark = " !" if values.context_verdict == "tight" else ""
        parts.append(f"context {tokens(count) if count >= 10240 else count}{mark}{users}")
    if values.wired_limit_bytes:
        parts.append(f"wired limit {size(values.wired_limit_bytes, units)}")
    if values.expert_capacity and parts:
        kept, every = values.expert_capacity, values.experts
        parts.append(f"{kept} of {every} experts" if every else f"all {kept} experts")
    return ", ".join(parts)


def task(result: Estimate) -> str:
    """The workload and the runtime, in few words."""
    work = result.workload
    text = f"{work.prompt_tokens} tokens"
    text += f" ({work.cached_tokens} cached)" if work.cached_tokens else ""
    text += f" + {work.max_tokens} generated" if work.max_tokens else ", no reply"
    if work.batch > 1:
        text += f", batch {work.batch}"
    text += f", step {work.prefill_step}"
    if work.kv_bits:
        text += f", KV {work.kv_bits} bits"
    return f"{text}, {runtime_text(result.runtime)}"


def peak(result: Estimate, units: Units) -> str:
    (low, high), pool = result.peak_range_bytes, result.pool
    if result.method == "measure":
        return f"peak {size(result.peak_bytes, units)}, measured"
    if high == result.peak_bytes:
        text = f"peak at most {size(high, units)}"
        # No rule bounds what the driver takes for them.
        return f"{text}, with {size(pool.graph_bytes, units)} of CUDA graphs" if pool else text
    between = f"{tenths(low, units, down=True)} to {tenths(high, units)}"
    return f"peak {size(result.peak_bytes, units)} ({between})"


def held(result: Estimate, units: Units) -> Iterator[str]:
    """What the process holds, where that is a fifth above the peak or more."""
    returnable = (result.held_bytes or 0) - result.peak_bytes
    if result.held_bytes and returnable * 5 >= result.peak_bytes:
        yield f"holds up to {size(result.held_bytes, units)}, {size(returnable, units)} returnable"


LIMIT_NAMES = {
    "largest_buffer": "Largest buffer",
    "held_memory": "Held at most",
    "gpu_watchdog": "Keys of a prefill call",
    "buffer_count": "Tokens until buffers run out",
}


def limit(of: Limit, units: Units) -> tuple[str, str]:
    """The figure of a run, and the largest that is known to pass."""
    if of.unit == "bytes":
        return size(of.figure, units), size(of.limit, units, down=True)
    return str(of.figure), str(of.limit)


def seconds(result: Estimate) -> Iterator[tuple[str, str]]:
    """The seconds of the request, each with its range."""
    first = next(iter(result.first_tokens or ()), None)
    if first is None:
        return
    yield "First token", f"{_time(first.seconds)} ({_between(first.range_seconds)})"
    if first.decode_range_seconds and first.turn_range_seconds:
        yield "Prefill", _between(first.prefill_range_seconds)
        yield "Reply", _between(first.decode_range_seconds)
        yield "Whole turn", _between(first.turn_range_seconds)


def speed(result: Estimate) -> Iterator[str]:
    """The bound of the decode speed, and what to expect of it."""
    expected = result.decode_speed
    if expected is None:
        return
    digits = 0 if expected.most_tokens_per_second >= 10 else 1
    text = f"decodes at most {expected.most_tokens_per_second:.{digits}f} tokens a second"
    if result.ranks:
        text += ", less with the time of messages between ranks"
    if expected.expected_tokens_per_second:
        least, median, most = expected.expected_tokens_per_second
        text += f", expect about {median:.0f} ({least:.0f} to {most:.0f})"
    if expected.host_bytes_per_step and expected.host_bandwidth_bytes_per_second:
        rate = size(expected.host_bandwidth_bytes_per_second, Units.GB, down=True)
        text += f" with a host of {rate}/s"
    yield text


def first_token(result: Estimate) -> Iterator[str]:
    """How long the prompt takes as it is to be run, and the longest of the grid that runs."""
    chosen = result.best
    others = result.first_tokens or ()
    first = chosen.first_token if chosen and chosen.first_token else next(iter(others), None)
    if first is None or (chosen is None and result.verdict in ("exceeds", "does_not_load")):
        return
    then = "then " if chosen and chosen.settings else ""
    text = f"first token {then}after about {_time(first.seconds)} ({_between(first.range_seconds)})"
    most = result.recommendation.context_tokens.value or 0
    longer = [each for each in others if first.prompt_tokens < each.prompt_tokens <= most]
    if longer and not (chosen and chosen.settings):
        text += f", {_time(longer[-1].seconds)} at {tokens(longer[-1].prompt_tokens)}"
    if first.at_usual_step_seconds:
        more = _time(first.seconds - first.at_usual_step_seconds)
        text += f", {more} of it for the smaller prefill step"
    yield text
    if first.decode_range_seconds and first.turn_range_seconds:
        prefill, reply = map(_between, (first.prefill_range_seconds, first.decode_range_seconds))
        yield (
            f"the turn takes {_between(first.turn_range_seconds)}: prefill {prefill}, reply {reply}"
        )


def _between(seconds: tuple[float, ...]) -> str:
    low, high = (_time(each) for each in seconds)
    return f"{low} to {high}"


def _time(seconds: float) -> str:
    """Return seconds with two digits, or minutes.

    >>> [_time(each) for each in (0.257, 3.14, 95.2, 412)]
    ['0.26 s', '3.1 s', '95 s', '7 min']
    """
    if seconds >= 180:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.{0 if seconds >= 10 else 1 if seconds >= 1 else 2}f} s"


def doing(result: Estimate, units: Units) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A heading, the commands to paste, and what else there is to know of them."""
    chosen = result.best
    if chosen is None:
        return "", (), tuple(_other_ways(result, None, units))
    heading = "Run it" if not chosen.settings else "Do this"
    if result.device and "memory_bytes" in chosen.settings:
        heading += f" on a Mac with {gigabytes(chosen.settings['memory_bytes'])}"
    if chosen.verdict == "unknown" and chosen.host_memory_bytes:
        heading += f" on a host with {size(chosen.host_memory_bytes, units)}"
    if chosen.conversion:
        heading += f" (converting {conversion_text(chosen.conversion, units)})"
    return heading, chosen.commands, tuple(_other_ways(result, chosen, units))


def _alternatives(result: Estimate, units: Units) -> Iterator[str]:
    """What fits this Mac in place of the model."""
    if not result.alternatives or result.device is None:
        return
    texts = []
    for each in result.alternatives:
        bits = f" at {each.weights}" if each.weight_bits else ""
        parts = [size(each.needed_bytes, units)]
        if each.prefill_step != result.workload.prefill_step:
            parts.append(f"step {each.prefill_step}")
        if each.verdict == "tight":
            parts.append("tight")
        texts.append(f"{each.name}{bits} ({', '.join(parts)})")
    yield f"This Mac runs {', '.join(texts)}: memfit NAME {named(result.device)}"


def _other_ways(result: Estimate, chosen: Action | None, units: Units) -> Iterator[str]:
    yield from _alternatives(result, units)
    if chosen:
        yield from (f"If it ends: {each.remedy}." for each in ending(result) if each.remedy)
    yield from _partial(result, units)
    yield from _served(result, chosen)
    changed = chosen.settings.items() if chosen else ()
    longer = [
        f"{tokens(each.context_tokens or 0)} {settings_text(dict(each.settings.items() - changed))}"
        for each in result.actions
        if each.goal == "longer_prompt"
    ]
    if longer:
        yield f"Longer prompts: {', '.join(longer)}."
    if chosen and "memory_bytes" not in chosen.settings:
        for action in result.actions:
            if set(action.settings) == {"memory_bytes"}:
                yield f"A Mac with {gigabytes(action.settings['memory_bytes'])} fits it unchanged."
    if chosen and chosen.host_bytes and not chosen.commands:
        yield "llama-server's command is printed for a GGUF file of it, such as org/name:Q4_K_M."
    limit = result.recommendation.wired_limit_mb
    is_fitted = chosen and chosen.verdict == "fits" and chosen.cost != "hardware"
    if limit.state == "change" and not is_fitted:
        yield f"Or: {limit.reason}."


def conversion(result: Estimate, units: Units) -> Iterator[str]:
    """What converting takes where the machine has no room for it, and what to do instead."""
    chosen = result.best
    if not (chosen and chosen.conversion and chosen.conversion.verdict == "exceeds"):
        return
    where = "this Mac" if result.device and result.device.backend == "metal" else "this machine"
    yield (
        f"Converting {conversion_text(chosen.conversion, units)}; {where} has no room for it:"
        " convert on a larger one, or take a converted model."
    )


def _partial(result: Estimate, units: Units) -> Iterator[str]:
    """The part of the experts that fits this machine, whether it pays, and what plans it."""
    partial, device = result.partial_experts, result.device
    if not partial or device is None:
        return
    if partial.warned:
        pays = f"but {partial.reasons[0]}"
    elif partial.pays is None:
        pays = "which pays if its routing is concentrated"
    else:
        pays = "which pays" if partial.pays else "which does not pay by what is published"
    quantize = f" --quantize {partial.weight_bits}" if partial.weight_bits else ""
    yield (
        f"Or keep {partial.experts} of {partial.of} experts: {size(partial.running_bytes, units)},"
        f" {size(partial.startup_bytes, units)} at start-up, {pays}:"
        f" memfit plan experts {shlex.quote(result.model.id)}{quantize} {named(device)}"
    )


def _served(result: Estimate, chosen: Action | None) -> Iterator[str]:
    """What the printed server lacks, or why none is printed."""
    if chosen is None or result.device is None:
        return
    if chosen.server is None:
        if chosen.no_server:
            alone = "One run alone" if chosen.commands else "No command"
            yield f"{alone}: mlx_lm.server {chosen.no_server}."
        return
    if not chosen.commands:
        return  # an assumed type has figures, and no server to start
    if not chosen.server.settings.prompt_cache_size:
        yield "Without a prompt cache every turn computes its whole prompt again."


def alone_text(plan: RankPlan, units: Units) -> str:
    """Which of the machines runs the model without the others, the one with the most room."""
    enough = [each for each in plan.alone if each.verdict == "fits"] or list(plan.alone)
    if not enough:
        return ""
    best = max(enough, key=lambda each: each.working_set_bytes - each.needed_bytes)
    of = f"{tenths(best.needed_bytes, units)} of {size(best.working_set_bytes, units, down=True)}"
    word = "fits it" if best.verdict == "fits" else "fits it tightly"
    return f"{name_as_sold(best.device)} alone {word} ({of})."
