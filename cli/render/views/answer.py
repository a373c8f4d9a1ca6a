"""The first screen of an estimate: the verdict, the grid, and what to type."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from memfit.cli.render.document import VERDICT_COLOURS, VERDICT_WORDS, Table, Toned
from memfit.cli.render.views.machines import (
    alone_text,
    host_bytes,
    on_host_text,
    then_on_host,
)
from memfit.cli.render.views.text import percent, size, tenths
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import FREE_NOW, PROCESS_BYTES
from memfit.estimators.machine.working_set import GIB
from memfit.estimators.mlx.versions import MLX_VERSION, format_version
from memfit.estimators.results.estimate import (
    Action,
    Cell,
    DeviceSummary,
    Estimate,
    Grid,
    GridRow,
    Recommended,
    RuntimeSummary,
)
from memfit.estimators.runtimes.budget import comfortable_bytes

_FILE_WORDS = {**VERDICT_WORDS, "unknown": ""}
_WORDS = {"fits": "", "tight": "tight", "exceeds": "no", "unknown": "-"}
_CELL_WORDS = {**_WORDS, "tight": "!"}
"""In the grid, whose legend explains the mark: a word would cost a column of prompts."""
SETTINGS = {
    "weight_bits": "{} bits",
    "kv_bits": "KV {} bits",
    "prefill_step": "prefill step {}",
    "host_experts": "the experts of {} layers on the host",
    "gpu_layers": "{} layers on the GPU and the others on the host",
}
"""How an action's settings are called; memory is a machine's."""


def _tightness(result: Estimate, units: Units) -> str:
    most = result.needed_bytes + result.peak_range_bytes[1] - result.peak_bytes
    working_set = result.device.working_set_bytes if result.device else 0
    reasons = [limit.reason for limit in result.limits if limit.verdict == "tight"]
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
    found = [note.message for note in result.notes if note.code == "mlx-verdict"]
    text = _headline(result, units)
    if found:
        text = text.removesuffix(" Nothing to change.") + f" {found[0][0].upper()}{found[0][1:]}."
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
    share += " free now" * (result.device.budget == FREE_NOW)
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


def machine(device: DeviceSummary) -> str:
    """The machine, a Mac by the memory it is sold with."""
    if device.name.startswith("Mac with") and not device.memory_bytes % GIB:
        return f"Mac with {gigabytes(device.memory_bytes)}"
    return device.name


def _machines(device: DeviceSummary, result: Estimate) -> str:
    """The machine, of several ranks the one with the least room."""
    if not result.ranks:
        return machine(device)
    ranks = result.ranks.ranks
    if len({rank.device for rank in ranks}) == 1:
        return f"{len(ranks)} x {machine(device)}"
    return f"{len(ranks)} ranks, least room on {machine(device)}"


def gigabytes(memory_bytes: int) -> str:
    """Memory as it is sold: a "GB" of it is a GiB."""
    return f"{memory_bytes // GIB} GB"


def tokens(count: int) -> str:
    """Tokens in a few characters, rounded down: 4k is 4096, but 40960 is 40k.

    >>> tokens(131072), tokens(102144), tokens(300)
    ('128k', '99k', '300')
    """
    if count >= 2**20:
        return f"{count // 2**20}M"
    return f"{count // 1024}k" if count >= 1024 else str(count)


def grid_table(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield the grid as a table; a narrow terminal drops the farthest columns first."""
    grid = result.grid
    if not grid.rows:
        return
    unit = "GB" if units is Units.GB else "GiB"
    places = range(2, 2 + len(grid.columns))
    if grid.axis == "memory_bytes":
        headings = ["", "needs", *(str(nbytes // GIB) for nbytes in grid.columns)]
        title, droppable = f"fits a Mac with {unit} of memory", list(places)[:0:-1]
    else:
        headings = ["", "weights", *map(tokens, grid.columns), "longest"]
        title = f"needs in {unit} for a prompt of"
        asked = result.workload.prompt_tokens
        droppable = [n for n in reversed(places) if grid.columns[n - 2] != asked]
    yield Table(
        headings,
        list(_grid_rows(grid, result.workload.prefill_step, units)),
        title,
        align="lr" + "l" * len(places) + "r",
        wrapped=(),
        droppable=droppable,
        only="text",
    )


def _grid_rows(grid: Grid, step: int, units: Units) -> Iterator[list[str | Toned]]:
    by_prompt = grid.axis == "context_tokens"
    cells = [[_cell(cell, by_prompt, step, units) for cell in row.cells] for row in grid.rows]
    for row, shown in zip(grid.rows, _padded(cells), strict=True):
        if by_prompt:
            longest = tokens(row.context_tokens) + at_step(row.context_step, step)
            is_server = row.program == "server"
            yield [
                "  server" if is_server else row.label,
                "" if is_server else size(row.weights_bytes, units),
                *shown,
                longest if row.context_tokens else "-",
            ]
        else:
            yield [row.label, _need(row, units), *shown]


def _need(row: GridRow, units: Units) -> str:
    needs = [cell.needed_bytes for cell in row.cells if cell.needed_bytes is not None]
    return size(max(needs), units) if needs else "-"


def at_step(step: int, usual: int) -> str:
    """The prefill step of a figure, where it is not the usual one.

    >>> at_step(512, 2048), at_step(2048, 2048)
    ('@512', '')
    """
    return "" if step == usual else f"@{step}"


def _cell(cell: Cell, by_prompt: bool, step: int, units: Units) -> Toned:
    at = at_step(cell.prefill_step, step)
    if by_prompt and cell.needed_bytes is not None:
        # Without the size of the host there is no verdict.
        word = "" if cell.verdict == "unknown" else _CELL_WORDS[cell.verdict]
        text = f"{tenths(cell.needed_bytes, units)}{at} {word}".rstrip()
    elif by_prompt:
        text = _CELL_WORDS[cell.verdict]
    else:
        text = cell.verdict.replace("exceeds", "no") + at
    return Toned(text, VERDICT_COLOURS[cell.verdict])


def _padded(rows: Sequence[Sequence[Toned]]) -> list[list[Toned]]:
    """The cells with the decimal points of each column below each other."""
    points = [max(cell.text.find(".") for cell in column) for column in zip(*rows, strict=True)]
    return [
        [
            Toned(" " * max(0, point - cell.text.find(".")) + cell.text, cell.colour)
            if "." in cell.text
            else cell
            for cell, point in zip(row, points, strict=True)
        ]
        for row in rows
    ]


def legend(result: Estimate, units: Units) -> tuple[str, ...]:
    """What the cells of the grid mean, what is left out, and what the device gives."""
    if not result.grid.rows:
        return ()
    cells = [cell for row in result.grid.rows for cell in row.cells]
    by_prompt = result.grid.axis == "context_tokens"
    steps = {cell.prefill_step for cell in cells}
    steps |= {row.context_step for row in result.grid.rows if row.context_tokens}
    parts = []
    if other := sorted(steps - {result.workload.prefill_step}, reverse=True):
        parts.append(f"@{other[0]}: with that prefill step")
    if by_prompt and any(cell.verdict == "tight" for cell in cells):
        parts.append("! tight")
    if result.device:
        if result.device.backend == "metal":
            parts.append(_of_gpu(result.device, units))
        if result.device.budget == FREE_NOW:
            used = size(result.device.used_by_others_bytes or 0, units)
            parts.append(f"{used} are in use, {size(PROCESS_BYTES, units)} left for the process")
    if result.grid.method != result.method:
        parts.append("by formula")
    if result.grid.left_out:
        parts.append(f"without {', '.join(each.what for each in result.grid.left_out)}: -v")
    return ("; ".join(parts),) if parts else ()


def recommended(found: Recommended, units: Units, *, clients: int = 0) -> str:
    """What to set for the printed command; empty where nothing fits this machine.

    ``clients`` are those of a server whose command is printed.
    """
    parts = []
    if found.context_tokens:
        count = found.context_tokens
        users = f" for {clients} client{'s' * (clients > 1)}" if clients else ""
        parts.append(f"context {tokens(count) if count >= 10240 else count}{users}")
    if found.wired_limit_bytes:
        parts.append(f"wired limit {size(found.wired_limit_bytes, units)}")
    if found.expert_capacity and parts:
        parts.append(f"all {found.expert_capacity} experts")
    return ", ".join(parts)


def _of_gpu(device: DeviceSummary, units: Units) -> str:
    """What the GPU may use, and under which macOS it is another figure."""
    budget = size(device.working_set_bytes, units, down=True)
    known = device.by_macos or ()
    own = [each.macos for each in known if each.working_set_bytes == device.working_set_bytes]
    # Short, so that the first screen keeps its lines: 15 of "macOS 13-15".
    others = [
        f"{tenths(each.working_set_bytes, units, down=True)} on {re.split('[ -]', each.macos)[-1]}"
        for each in known
        if each.working_set_bytes != device.working_set_bytes
    ]
    if own and others:
        return f"GPU {budget} on {own[0]}, {', '.join(others)}"
    return f"the GPU may use {budget} of {size(device.memory_bytes, units)}"


def task(result: Estimate) -> str:
    """The workload and the runtime, in few words."""
    work = result.workload
    text = f"{work.prompt_tokens} tokens"
    text += f" + {work.max_tokens} generated" if work.max_tokens else ", no reply"
    if work.batch > 1:
        text += f", batch {work.batch}"
    text += f", step {work.prefill_step}"
    if work.kv_bits:
        text += f", KV {work.kv_bits} bits"
    return f"{text}, {runtime_text(result.runtime)}"


def runtime_text(runtime: RuntimeSummary) -> str:
    """A runtime and its version, and that of MLX where it is not the newest."""
    # The newest MLX is in the notes alone: a line more would not fit the first screen.
    if runtime.mlx_version == format_version(MLX_VERSION):
        return f"{runtime.name} {runtime.version}"
    return str(runtime)


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


def speed(result: Estimate) -> Iterator[str]:
    """The bound of the decode speed, and what to expect of it."""
    found = result.decode_speed
    if found is None:
        return
    digits = 0 if found.most_tokens_per_second >= 10 else 1
    text = f"decodes at most {found.most_tokens_per_second:.{digits}f} tokens a second"
    if result.ranks:
        text += ", less with the time of messages between ranks"
    if found.expected_tokens_per_second:
        least, median, most = found.expected_tokens_per_second
        text += f", expect about {median:.0f} ({least:.0f} to {most:.0f})"
    elif found.range_tokens_per_second:
        least, most = found.range_tokens_per_second
        text += f", expect {least:.0f} to {most:.0f} (not measured on this chip)"
    if found.host_bytes_per_step and found.host_bandwidth_bytes_per_second:
        rate = size(found.host_bandwidth_bytes_per_second, Units.GB, down=True)
        text += f" with a host of {rate}/s"
    yield text


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
    return heading, chosen.commands, tuple(_other_ways(result, chosen, units))


_COSTS = {"none": "nothing", "speed": "speed", "quality": "quality", "hardware": "a machine"}


def files(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield the GGUF models of a repository, a row each."""
    rows = [
        (
            file.label,
            size(file.weights_bytes, units),
            size(file.needed_bytes, units) if file.needed_bytes else "-",
            Toned(_FILE_WORDS[file.verdict], VERDICT_COLOURS[file.verdict]),
            f"memfit {file.name}",
        )
        for file in result.files or ()
    ]
    if rows:
        headings = ("file", "size", "needs", "", "for its own figures")
        yield Table(headings, rows, align="lrrll", wrapped=(), droppable=(4,))


def ways(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield every action with its commands, for a page that has room for them."""
    rows = [
        (
            _change(action),
            _COSTS[action.cost],
            _needed(action, units),
            tokens(action.context_tokens) if action.context_tokens else "-",
            " && ".join(action.commands),
        )
        for action in result.actions
    ]
    if rows:
        headings = ("Change", "Costs", "Needs", "Longest prompt", "Commands")
        yield Table(headings, rows, "Every way", align="llrrl", only="picture")


def _needed(action: Action, units: Units) -> Toned:
    text = f"{size(action.needed_bytes, units)} {_WORDS[action.verdict]}".rstrip()
    if action.host_bytes:
        text += f", host {size(action.host_bytes, units)}"
    return Toned(text, VERDICT_COLOURS[action.verdict])


def _change(action: Action) -> str:
    found = [settings_text(action.settings)]
    if "memory_bytes" in action.settings:
        found.insert(0, f"a Mac with {gigabytes(action.settings['memory_bytes'])}")
    return ", ".join(filter(None, found)) or "none"


def _other_ways(result: Estimate, chosen: Action | None, units: Units) -> Iterator[str]:
    yield from _partial(result, units)
    yield from _served(result, chosen)
    kept = chosen.settings.items() if chosen else ()
    longer = [
        f"{tokens(each.context_tokens or 0)} {settings_text(dict(each.settings.items() - kept))}"
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


def _partial(result: Estimate, units: Units) -> Iterator[str]:
    """The part of the experts that fits this machine, whether it pays, and what plans it."""
    found, device = result.partial_experts, result.device
    if not found or device is None:
        return
    if found.warned:
        pays = f"but {found.reasons[0]}"
    elif found.pays is None:
        pays = "which pays if its routing is concentrated"
    else:
        pays = "which pays" if found.pays else "which does not pay by what is published"
    quantize = f" --quantize {found.weight_bits}" if found.weight_bits else ""
    yield (
        f"Or keep {found.experts} of {found.of} experts: {size(found.running_bytes, units)},"
        f" {size(found.startup_bytes, units)} at start-up, {pays}:"
        f" memfit plan experts {shlex.quote(result.model.id)}{quantize} {named(device)}"
    )


def named(device: DeviceSummary) -> str:
    """The option that names a machine to memfit."""
    if device.source == "detected":
        return "--device host"
    if device.source == "table":
        return f"--device {device.name}"
    if device.name == "Mac with a given working set":
        return f"--working-set {device.working_set_bytes}"
    return f"--memory {gigabytes(device.memory_bytes).replace(' ', '')}"


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
