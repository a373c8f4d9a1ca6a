"""A wired memory scenario: a YAML file of policies, and of tickets that start and end.

docs/wired.md lists every key; tests/plans/test_wired_scenario.py compares it with the tables here.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.section import Section, read_yaml
from memfit.estimators.base.reading.values import (
    as_duration,
    as_name,
    as_share,
    as_size,
    as_text,
    one_of,
)
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime
from memfit.estimators.plans.wired.ledger import Ticket, WiredSettings
from memfit.estimators.plans.wired.policies import (
    BudgetPolicy,
    FixedPolicy,
    MaxPolicy,
    OverBudget,
    SpeculativePolicy,
    SumPolicy,
    WiredPolicy,
)
from memfit.estimators.results.wired import TicketKind, WiredMode

SCHEMA = "memfit.wired-scenario/1"
MAX_SCENARIO_BYTES = 1_000_000
# The work grows with the square of the number of tickets.
MAX_TICKETS = 1000

MACHINE_KEYS = ("device", "memory", "working_set")
SETTING_KEYS = ("mode", "baseline", "shrink_threshold", "shrink_cooldown")
KEYS = ("schema", *MACHINE_KEYS, "os_regime", *SETTING_KEYS, "policies", "tickets")
TICKET_KEYS = ("name", "policy", "main", "kind", "size", "start", "runs", "end")
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


class Draft(Struct, frozen=True):
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
    draft: Draft | None


class WiredScenario(Struct, frozen=True):
    """A machine, how its limit moves, and which ticket starts when."""

    name: str
    device: Device | None
    mode: WiredMode
    settings: WiredSettings
    policies: Mapping[str, str]
    """The kind of each policy, by its name."""
    tickets: tuple[ScheduledTicket, ...]


def read_scenario(path: Path) -> WiredScenario:
    """Return the scenario of a YAML file in the schema ``memfit.wired-scenario/1``.

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
    policies = _policies(top)
    return WiredScenario(
        name=path.stem,
        device=device,
        mode=mode,
        settings=_settings(top),
        policies={name: kind for name, (kind, _) in policies.items()},
        tickets=_tickets(top, {name: policy for name, (_, policy) in policies.items()}),
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


def _native_mode(device: Device | None) -> WiredMode:
    return "wired" if device is None or device.backend == "metal" else "policy-only"


def _settings(top: Section) -> WiredSettings:
    default = WiredSettings()
    threshold = top.take("shrink_threshold", as_share)
    cooldown = top.take("shrink_cooldown", as_duration)
    return WiredSettings(
        shrink_threshold=default.shrink_threshold if threshold is None else threshold,
        shrink_cooldown_ms=default.shrink_cooldown_ms if cooldown is None else cooldown,
        baseline_override=top.take("baseline", as_size),
    )


def _policies(top: Section) -> dict[str, tuple[str, WiredPolicy | SpeculativePolicy]]:
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
        found[name] = (kind, _policy(policy, kind, name))
    return found


def _policy(section: Section, kind: str, name: str) -> WiredPolicy | SpeculativePolicy:
    # The name is the group: two policies of a scenario are two groups, even when they are equal.
    if kind == "sum":
        return SumPolicy(section.take("cap", as_size), group=name)
    if kind == "fixed":
        return FixedPolicy(section.need("limit", as_size), group=name)
    if kind == "budget":
        return BudgetPolicy(section.need("base", as_size), section.take("cap", as_size), group=name)
    if kind == "speculative":
        return SpeculativePolicy(
            section.take("limit", as_size),
            section.take("additional", as_size) or 0,
            section.take("over_budget", one_of(OVER_BUDGET)) or "fallback",
        )
    return MaxPolicy(on_baseline=kind == "baseline-max", group=name)


def _tickets(
    top: Section, policies: Mapping[str, WiredPolicy | SpeculativePolicy]
) -> tuple[ScheduledTicket, ...]:
    entries = top.values.get("tickets")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_TICKETS:
        raise top.fail("tickets", f"expected a list of 1 to {MAX_TICKETS} tickets")
    found: dict[str, ScheduledTicket] = {}
    for section in top.mappings("tickets", TICKET_KEYS):
        scheduled = _ticket(section, policies, found)
        name = scheduled.ticket.name
        if name in found:
            raise section.fail("name", f"{name} appears twice")
        found[name] = scheduled
    return tuple(found.values())


def _ticket(
    section: Section,
    policies: Mapping[str, WiredPolicy | SpeculativePolicy],
    earlier: Mapping[str, ScheduledTicket],
) -> ScheduledTicket:
    name = section.need("name", as_name)
    policy_name = section.need("policy", one_of(tuple(policies)))
    named = policies[policy_name]
    if isinstance(named, SpeculativePolicy):
        main = earlier[section.need("main", one_of(tuple(earlier)))]
        draft, policy = Draft(named, main.ticket.name), main.ticket.policy
    elif "main" in section:
        raise section.fail("main", "is for a draft model, under a speculative policy")
    else:
        draft, policy = None, named
    kind = section.take("kind", one_of(KINDS)) or "active"
    ticket = Ticket(policy, section.need("size", as_size), kind, name)
    return ScheduledTicket(ticket, policy_name, *_times(section), draft)


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
