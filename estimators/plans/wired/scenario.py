"""A wired memory scenario: a YAML file of policies, and of tickets that start and end.

docs/wired.md lists every key; tests/plans/test_wired_scenario.py compares it with the tables here.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import path_near, printable
from memfit.estimators.base.reading.section import (
    Section,
    as_duration,
    as_name,
    as_share,
    as_size,
    as_text,
    one_of,
    read_yaml,
)
from memfit.estimators.guard.ledger import Ticket, WiredSettings
from memfit.estimators.guard.policies import (
    BudgetPolicy,
    FixedPolicy,
    MaxPolicy,
    OverBudget,
    SpeculativePolicy,
    SumPolicy,
    WiredPolicy,
)
from memfit.estimators.machine.device import DEFAULT_REGIME, Device, OsRegime
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.plans.wired.ticket_sizes import Part, Saved, TicketSize, TicketSizes
from memfit.estimators.results.wired import TicketKind, WiredMode
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel, require_loaded

SCHEMA = "memfit.wired-scenario/1"
MAX_SCENARIO_BYTES = 1_000_000
# The work grows with the square of the number of tickets.
MAX_TICKETS = 1000

MACHINE_KEYS = ("device", "memory", "working_set")
SETTING_KEYS = ("mode", "baseline", "shrink_threshold", "shrink_cooldown")
CHANGE_KEYS = ("at", *SETTING_KEYS[1:])
KEYS = (
    *("schema", *MACHINE_KEYS, "os_regime", *SETTING_KEYS),
    *("model", "adapter", "policies", "tickets", "configure"),
)
SIZE_KEYS = ("size", "weights", "kv", "prefill", "prefill_runs")
TICKET_KEYS = ("name", "policy", "main", "kind", *SIZE_KEYS, "start", "runs", "end")
POLICY_KEYS: dict[str, tuple[str, ...]] = {
    "sum": ("cap",),
    "max": (),
    "baseline-max": (),
    "fixed": ("limit",),
    "budget": ("base", "cap"),
    "speculative": ("limit", "additional", "over_budget"),
}
MODES: tuple[WiredMode, ...] = ("wired", "policy-only")
KINDS: tuple[TicketKind, ...] = ("active", "reservation")
OVER_BUDGET: tuple[OverBudget, ...] = ("allow", "fallback", "fail")


class DraftAdmission(Struct, frozen=True):
    """How a draft model is admitted: its policy, and the ticket of its main model."""

    policy: SpeculativePolicy
    main: str


class ScheduledTicket(Struct, frozen=True):
    """A ticket with its times in milliseconds; without ``end_ms`` and ``runs_ms`` it never ends."""

    ticket: Ticket
    policy: str
    start_ms: int
    end_ms: int | None
    """A ticket that still waits at its end is cancelled."""
    runs_ms: int | None
    """Counted from admission."""
    draft: DraftAdmission | None
    source: str | None = None
    """Where its size comes from, None when it was given."""


class Change(Struct, frozen=True):
    """Settings from some time on, as updateConfiguration of mlx-swift changes them."""

    at_ms: int
    settings: WiredSettings


class WiredScenario(Struct, frozen=True):
    """A machine, how its limit moves, and which ticket starts when."""

    name: str
    device: Device | None
    mode: WiredMode
    settings: WiredSettings
    policies: Mapping[str, str]
    """The kind of each policy, by its name."""
    tickets: tuple[ScheduledTicket, ...]
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    """Warnings about where sizes come from."""


def none_saved(id: str) -> Measurement:
    """Return no measurement.

    Raises:
        InputError: always.
    """
    raise InputError(f"{printable(id)}: no such measurement")


def read_scenario(
    path: Path, saved: Saved = none_saved, versioned: Callable[[Runtime], Runtime] | None = None
) -> WiredScenario:
    """Return the scenario of a YAML file in the schema ``memfit.wired-scenario/1``.

    ``saved`` returns the measurement of an id, ``versioned`` sets the versions for estimates.

    Raises:
        CheckpointError: when the file is missing, unreadable or above ``MAX_SCENARIO_BYTES``.
        InputError: at the first error, with its line, its key and what is expected.
    """
    top = read_yaml(path, KEYS, limit=MAX_SCENARIO_BYTES)
    top.need("schema", one_of((SCHEMA,)))
    device = _device(top)
    mode = top.take("mode", one_of(MODES)) or _native_mode(device)
    if mode == "wired" and device is not None and device.backend != "metal":
        raise top.fail("mode", f"{device.name} has no wired limit; it is a setting of Macs")
    settings = _settings(top, WiredSettings())
    catalog = Catalog(path.parent, versioned=versioned, guess_hub=False)
    sizes = TicketSizes(lambda: _model(top, catalog, device, path.parent), saved, device)
    policies = _policies(top, sizes)
    tickets = _tickets(top, {name: policy for name, (_, policy) in policies.items()}, sizes)
    return WiredScenario(
        name=path.stem,
        device=device,
        mode=mode,
        settings=settings,
        policies={name: kind for name, (kind, _) in policies.items()},
        tickets=tickets,
        changes=tuple(_changes(top, settings)),
        notes=tuple(sizes.notes.values()),
    )


def _device(top: Section) -> Device | None:
    given = [key for key in MACHINE_KEYS if key in top]
    if len(given) > 1:
        raise top.fail(given[1], f"{' and '.join(given)} exclude each other: give one")
    regimes = {regime.value: regime for regime in OsRegime}
    regime = regimes.get(top.take("os_regime", one_of(tuple(regimes))) or "", DEFAULT_REGIME)
    if "device" in top:
        return top.take("device", lambda value: find_device(as_text(value), os_regime=regime))
    if "memory" in top:
        return top.take("memory", lambda value: memory_device(as_size(value), os_regime=regime))
    return top.take("working_set", lambda value: working_set_device(as_size(value)))


def _model(top: Section, catalog: Catalog, device: Device | None, directory: Path) -> SizedModel:
    if "model" not in top:
        raise InputError("an estimate needs the key model at the top")
    adapter = top.take("adapter", lambda value: Path(path_near(directory, as_text(value))))
    return require_loaded(catalog.sized(top.need("model", as_text), device=device, adapter=adapter))


def _native_mode(device: Device | None) -> WiredMode:
    return "wired" if device is None or device.backend == "metal" else "policy-only"


def _changes(top: Section, settings: WiredSettings) -> Iterator[Change]:
    if "configure" not in top:
        return
    before = 0
    for section in top.mappings("configure", CHANGE_KEYS):
        at = section.need("at", as_duration)
        if at < before:
            raise section.fail("at", "changes go from the first to the last")
        before, settings = at, _settings(section, settings)
        yield Change(at, settings)


def _settings(top: Section, default: WiredSettings) -> WiredSettings:
    baseline = top.take("baseline", as_size)
    threshold = top.take("shrink_threshold", as_share)
    cooldown = top.take("shrink_cooldown", as_duration)
    return WiredSettings(
        shrink_threshold=default.shrink_threshold if threshold is None else threshold,
        shrink_cooldown_ms=default.shrink_cooldown_ms if cooldown is None else cooldown,
        baseline_override=default.baseline_override if baseline is None else baseline,
    )


def _policies(
    top: Section, sizes: TicketSizes
) -> dict[str, tuple[str, WiredPolicy | SpeculativePolicy]]:
    if not top.values.get("policies"):
        raise top.fail(None, "policies is missing or empty: define at least one")
    section = top.mapping("policies")
    found = {}
    for name in section.values:
        try:
            as_name(name)
        except InputError as error:
            raise section.fail(name, str(error)) from None
        policy = section.mapping(name)
        kind = policy.need("kind", one_of(tuple(POLICY_KEYS)))
        policy.only(("kind", *POLICY_KEYS[kind]))
        found[name] = (kind, _policy(policy, kind, name, sizes))
    return found


def _policy(
    section: Section, kind: str, name: str, sizes: TicketSizes
) -> WiredPolicy | SpeculativePolicy:
    # The name is the group: two policies of a scenario are two groups, even when they are equal.
    if kind == "sum":
        return SumPolicy(section.take("cap", as_size), group=name)
    if kind == "fixed":
        return FixedPolicy(section.need("limit", as_size), group=name)
    if kind == "budget":
        base = sizes.of(section, "base")
        nbytes = base.nbytes if base else section.need("base", as_size)
        return BudgetPolicy(nbytes, section.take("cap", as_size), group=name)
    if kind == "speculative":
        return SpeculativePolicy(
            section.take("limit", as_size),
            section.take("additional", as_size) or 0,
            section.take("over_budget", one_of(OVER_BUDGET)) or "fallback",
        )
    return MaxPolicy(on_baseline=kind == "baseline-max", group=name)


def _tickets(
    top: Section, policies: Mapping[str, WiredPolicy | SpeculativePolicy], sizes: TicketSizes
) -> tuple[ScheduledTicket, ...]:
    entries = top.values.get("tickets")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_TICKETS:
        raise top.fail("tickets", f"expected a list of 1 to {MAX_TICKETS} tickets")
    found: dict[str, ScheduledTicket] = {}
    for section in top.mappings("tickets", TICKET_KEYS):
        for scheduled in _with_prefill(section, _ticket(section, policies, found, sizes), sizes):
            name = scheduled.ticket.name
            if name in found:
                raise section.fail("name", f"{name} appears twice")
            found[name] = scheduled
    return tuple(found.values())


def _with_prefill(
    section: Section, scheduled: ScheduledTicket, sizes: TicketSizes
) -> Iterator[ScheduledTicket]:
    """Yield a ticket, and the one that is added during its prefill."""
    yield scheduled
    found, runs = sizes.of(section, "prefill"), section.take("prefill_runs", as_duration)
    if found is None:
        if runs is not None:
            raise section.fail("prefill_runs", "is for a ticket with prefill")
        return
    if scheduled.draft or scheduled.ticket.kind == "reservation":
        raise section.fail("prefill", "is for an active ticket that is not a draft model's")
    if runs == 0:
        raise section.fail("prefill_runs", "must be longer than 0")
    ticket = scheduled.ticket
    added = Ticket(ticket.policy, found.nbytes, "active", f"{ticket.name}.prefill")
    times = {} if runs is None else {"runs_ms": runs, "end_ms": None}
    yield replace(scheduled, ticket=added, source=found.source, **times)


def _size(section: Section, sizes: TicketSizes) -> TicketSize:
    """Return the size that is given, or the sum of weights and caches."""
    parts: tuple[Part, ...] = ("weights", "kv")
    found = [size for part in parts if (size := sizes.of(section, part))]
    if not found:
        return TicketSize(section.need("size", as_size), None)
    if "size" in section:
        raise section.fail("size", "excludes weights and kv: give one")
    sources = [size.source for size in found if size.source]
    return TicketSize(sum(size.nbytes for size in found), "; ".join(sources) or None)


def _ticket(
    section: Section,
    policies: Mapping[str, WiredPolicy | SpeculativePolicy],
    earlier: Mapping[str, ScheduledTicket],
    sizes: TicketSizes,
) -> ScheduledTicket:
    name = section.need("name", as_name)
    policy_name = section.need("policy", one_of(tuple(policies)))
    named = policies[policy_name]
    if isinstance(named, SpeculativePolicy):
        main = earlier[section.need("main", one_of(tuple(earlier)))]
        draft, policy = DraftAdmission(named, main.ticket.name), main.ticket.policy
    elif "main" in section:
        raise section.fail("main", "is for a draft model, under a speculative policy")
    else:
        draft, policy = None, named
    kind = section.take("kind", one_of(KINDS)) or "active"
    size = _size(section, sizes)
    ticket = Ticket(policy, size.nbytes, kind, name)
    return ScheduledTicket(ticket, policy_name, *_times(section), draft, size.source)


def _times(section: Section) -> tuple[int, int | None, int | None]:
    start = section.take("start", as_duration) or 0
    runs, end = section.take("runs", as_duration), section.take("end", as_duration)
    if runs is not None and end is not None:
        raise section.fail("end", "runs and end exclude each other: give one")
    if runs == 0:
        raise section.fail("runs", "must be longer than 0")
    if end is not None and end <= start:
        raise section.fail("end", "must be later than start")
    return start, end, runs
