"""A scenario of wired memory: a YAML file of policies and of tickets that start and end.

docs/wired.md lists every key; tests/plans/test_wired_scenario.py holds it against the tables
here.
"""

from collections.abc import Mapping
from pathlib import Path

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime
from memfit.estimators.plans.wired.ledger import Ticket, TicketKind, WiredSettings
from memfit.estimators.plans.wired.policies import (
    BudgetPolicy,
    FixedPolicy,
    MaxPolicy,
    OverBudget,
    SpeculativePolicy,
    SumPolicy,
    WiredPolicy,
)
from memfit.estimators.plans.wired.section import (
    Section,
    as_duration,
    as_name,
    as_share,
    as_size,
    as_text,
    one_of,
    read_section,
)

SCHEMA = "memfit.wired-scenario/1"
MAX_SCENARIO_BYTES = 1_000_000
# The work grows with the square of the tickets; a timeline of more is no longer read.
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
MODES = ("wired", "policy-only")
KINDS: tuple[TicketKind, ...] = ("active", "reservation")
OVER_BUDGET: tuple[OverBudget, ...] = ("allow", "fallback", "fail")


@record(frozen=True, slots=True)
class Draft:
    """What decides about a draft model: its policy, and the ticket of its main model."""

    policy: SpeculativePolicy
    main: str


@record(frozen=True, slots=True)
class Appointment:
    """A ticket with its times in milliseconds; ``runs_ms`` counts from when it is admitted.

    With neither an end nor a run the ticket stays. An end that comes while it waits is giving up.
    """

    ticket: Ticket
    policy: str
    start_ms: int
    end_ms: int | None
    runs_ms: int | None
    draft: Draft | None


@record(frozen=True, slots=True)
class WiredScenario:
    """A machine, how its limit moves, and what starts when."""

    name: str
    device: Device | None
    mode: str
    settings: WiredSettings
    policies: Mapping[str, str]  # name to kind
    appointments: tuple[Appointment, ...]


def read_scenario(path: Path) -> WiredScenario:
    """Return the scenario of a YAML file in the schema ``memfit.wired-scenario/1``.

    Raises:
        CheckpointError: when the file is missing, unreadable or above ``MAX_SCENARIO_BYTES``.
        InputError: at the first mistake, with its line, its key and what is expected.
    """
    top = read_section(path, KEYS, limit=MAX_SCENARIO_BYTES)
    top.need("schema", one_of((SCHEMA,)))
    device = _device(top)
    mode = top.take("mode", one_of(MODES)) or _native_mode(device)
    if mode == "wired" and device is not None and device.backend != "metal":
        raise top.error("mode", f"{device.name} has no wired limit; it is a setting of Macs")
    policies = _policies(top)
    return WiredScenario(
        name=path.stem,
        device=device,
        mode=mode,
        settings=_settings(top),
        policies={name: kind for name, (kind, _) in policies.items()},
        appointments=_appointments(top, {name: policy for name, (_, policy) in policies.items()}),
    )


def _device(top: Section) -> Device | None:
    given = [key for key in MACHINE_KEYS if key in top.values]
    if len(given) > 1:
        raise top.error(given[1], f"{' and '.join(given)} exclude each other: give one")
    regimes = {regime.value: regime for regime in OsRegime}
    regime = regimes.get(top.take("os_regime", one_of(tuple(regimes))) or "", DEFAULT_REGIME)
    if "device" in top.values:
        return top.take("device", lambda value: find_device(as_text(value), os_regime=regime))
    if "memory" in top.values:
        return top.take("memory", lambda value: memory_device(as_size(value), os_regime=regime))
    return top.take("working_set", lambda value: working_set_device(as_size(value)))


def _native_mode(device: Device | None) -> str:
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
        raise top.error(None, "policies is missing or empty: name at least one")
    section = top.below("policies")
    found = {}
    for name in section.names():
        policy = section.below(name)
        kind = policy.need("kind", one_of(tuple(POLICY_KEYS)))
        policy.only(("kind", *POLICY_KEYS[kind]))
        found[name] = (kind, _policy(policy, kind, name))
    return found


def _policy(section: Section, kind: str, name: str) -> WiredPolicy | SpeculativePolicy:
    # The name is the group: two policies of a scenario are two groups, however alike.
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


def _appointments(
    top: Section, policies: Mapping[str, WiredPolicy | SpeculativePolicy]
) -> tuple[Appointment, ...]:
    entries = top.values.get("tickets")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_TICKETS:
        raise top.error("tickets", f"expected a list of 1 to {MAX_TICKETS} tickets")
    found: dict[str, Appointment] = {}
    for index in range(len(entries)):
        section = top.below("tickets", index)
        section.only(TICKET_KEYS)
        appointment = _appointment(section, policies, found)
        if appointment.ticket.name in found:
            raise section.error("name", f"{appointment.ticket.name} stands twice")
        found[appointment.ticket.name] = appointment
    return tuple(found.values())


def _appointment(
    section: Section,
    policies: Mapping[str, WiredPolicy | SpeculativePolicy],
    earlier: Mapping[str, Appointment],
) -> Appointment:
    name = section.need("name", as_name)
    policy_name = section.need("policy", one_of(tuple(policies)))
    named = policies[policy_name]
    if isinstance(named, SpeculativePolicy):
        main = earlier[section.need("main", one_of(tuple(earlier)))]
        draft, policy = Draft(named, main.ticket.name), main.ticket.policy
    elif "main" in section.values:
        raise section.error("main", "is for a draft model, under a speculative policy")
    else:
        draft, policy = None, named
    kind = section.take("kind", one_of(KINDS)) or "active"
    ticket = Ticket(policy, section.need("size", as_size), kind, name)
    return Appointment(ticket, policy_name, *_times(section), draft)


def _times(section: Section) -> tuple[int, int | None, int | None]:
    start = section.take("start", as_duration) or 0
    runs, end = section.take("runs", as_duration), section.take("end", as_duration)
    if runs is not None and end is not None:
        raise section.error("end", "runs and end exclude each other: give one")
    if runs == 0:
        raise section.error("runs", "must be longer than nothing")
    if end is not None and end <= start:
        raise section.error("end", "must be later than start")
    return start, end, runs
