"""Scenarios: the contents of a file, and the plan that follows."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.cli.render.views.plan_wired import thinned
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.plans.wired import scenario as wired_scenario
from memfit.estimators.plans.wired.plan import plan_wired
from memfit.estimators.plans.wired.scenario import read_scenario
from memfit.estimators.results.wired import TicketPlan, WiredMoment, WiredPlan
from memfit.estimators.sizing import opening
from tests.probes.measurements import LOADED, RUN, measurement

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "sample_configs" / "plans").glob("wired-*.yaml"))
HEAD = "schema: memfit.wired-scenario/1\n"
POLICIES = """policies:
  all: {kind: sum, cap: 100MB}
  alone: {kind: max}
  pair: {kind: speculative, limit: 1000MB, additional: 100MB}
tickets:
"""


@pytest.fixture
def run_scenario(tmp_path: Path) -> Any:
    """Return the plan of tickets, one per line, under the policies above."""

    def run(*tickets: str, head: str = "") -> WiredPlan:
        path = tmp_path / "scenario.yaml"
        lines = "".join(f"  - {{{ticket}}}\n" for ticket in tickets)
        path.write_text(HEAD + head + POLICIES + lines, encoding="utf-8")
        return plan_wired(read_scenario(path))

    return run


def ticket(plan: WiredPlan, name: str) -> TicketPlan:
    return next(ticket for ticket in plan.tickets if ticket.name == name)


def test_a_request_waits_for_room_and_runs_from_then_on(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: a, policy: all, size: 80MB, runs: 10s",
        "name: b, policy: all, size: 80MB, start: 2s, runs: 1.5s",
    )
    b = ticket(plan, "b")
    assert (b.waited_ms, b.started_ms, b.ended_ms) == (8000, 10_000, 11_500)
    assert (plan.verdict, plan.longest_wait_ms) == ("waits", 8000)


def test_an_end_frees_memory_before_a_start_at_the_same_time(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: a, policy: all, size: 80MB, end: 2s", "name: b, policy: all, size: 80MB, start: 2s"
    )
    assert plan.verdict == "holds"
    assert [moment.at_ms for moment in plan.moments] == [0, 2000]


def test_a_ticket_that_ends_while_waiting_is_cancelled(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: a, policy: all, size: 80MB", "name: b, policy: all, size: 80MB, start: 1s, end: 3s"
    )
    assert (ticket(plan, "b").outcome, ticket(plan, "b").waited_ms) == ("gave_up", 2000)
    assert plan.verdict == "waits"


def test_a_ticket_that_never_fits_is_rejected_with_a_reason(run_scenario: Any) -> None:
    plan = run_scenario("name: a, policy: all, size: 101MB", head="baseline: 10MB\n")
    assert (ticket(plan, "a").outcome, plan.verdict) == ("refused", "fails")
    assert ticket(plan, "a").reason == (
        "does not fit even alone under 100.0 MB, of which 10.0 MB are baseline"
    )


def test_a_ticket_that_waits_to_the_end_was_never_admitted(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: weights, policy: all, kind: reservation, size: 60MB",
        "name: large, policy: all, size: 70MB, start: 1s, runs: 1s",
        "name: small, policy: all, size: 10MB, start: 2s, runs: 1s",
    )
    assert (ticket(plan, "large").outcome, ticket(plan, "large").waited_ms) == ("waiting", 2000)
    assert ticket(plan, "small").outcome == "admitted"
    assert plan.verdict == "fails"


@pytest.mark.parametrize(
    ("draft", "outcome", "verdict"),
    [("250MB", "admitted", "holds"), ("350MB", "left_out", "holds")],
)
def test_a_draft_model_is_left_out_when_the_pair_does_not_fit(
    run_scenario: Any, draft: str, outcome: str, verdict: str
) -> None:
    plan = run_scenario(
        "name: main, policy: alone, kind: reservation, size: 600MB",
        f"name: draft, policy: pair, main: main, kind: reservation, size: {draft}",
    )
    assert (ticket(plan, "draft").outcome, plan.verdict) == (outcome, verdict)


def test_a_draft_model_without_its_main_model_is_left_out(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: main, policy: alone, size: 600MB, runs: 1s",
        "name: draft, policy: pair, main: main, size: 1MB, start: 2s",
    )
    assert ticket(plan, "draft").reason == "its main model is not loaded at that time"


def test_a_limit_above_the_working_set_is_rejected_with_the_value_to_set(run_scenario: Any) -> None:
    plan = run_scenario("name: a, policy: alone, size: 20GB, runs: 1s", head="device: m4-pro-24\n")
    assert (plan.verdict, plan.refused_limits) == ("fails", 1)
    # 20 * 10^9 / 2^20, rounded up.
    assert plan.sysctl_mebibytes == 19074
    assert [moment.limit_bytes for moment in plan.moments] == [0, 0]
    assert plan.largest_limit_bytes == 20 * 10**9


def test_a_limit_above_all_memory_has_no_possible_setting(run_scenario: Any) -> None:
    plan = run_scenario("name: a, policy: alone, size: 26GB, runs: 1s", head="device: m4-pro-24\n")
    assert plan.sysctl_mebibytes is None
    assert "no setting helps" in plan.notes[1]


def test_a_machine_without_a_wired_limit_is_policy_only(run_scenario: Any) -> None:
    plan = run_scenario("name: a, policy: alone, size: 1GB", head="device: rtx-4090\n")
    assert (plan.mode, plan.refused_limits, plan.sysctl_mebibytes) == ("policy-only", 0, None)
    assert plan.largest_limit_bytes == 10**9


def test_policy_only_on_a_mac_starts_from_its_working_set(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: a, policy: alone, size: 1GB", head="device: m4-pro-24\nmode: policy-only\n"
    )
    assert plan.baseline_bytes == 19_069_665_280


def test_the_hysteresis_of_the_file_is_used(run_scenario: Any) -> None:
    tickets = (
        "name: a, policy: all, size: 60MB, runs: 10s",
        "name: b, policy: all, size: 40MB, end: 500ms",
    )
    assert run_scenario(*tickets).moments[1].limit_bytes == 100 * 10**6
    quick = run_scenario(*tickets, head="shrink_cooldown: 500ms\nshrink_threshold: 40%\n")
    assert quick.moments[1].limit_bytes == 60 * 10**6
    slow = run_scenario(*tickets, head="shrink_cooldown: 0\nshrink_threshold: 41%\n")
    assert slow.moments[1].limit_bytes == 100 * 10**6


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_scenario_runs(path: Path) -> None:
    plan = plan_wired(read_scenario(path))
    assert plan.verdict == {"wired-server": "waits", "wired-raised-limit": "fails"}[path.stem]


GOOD = "name: a, policy: all, size: 1MB"


@pytest.mark.parametrize(
    ("ticket", "where", "words"),
    [
        ("name: a, policy: all", "tickets[0]", "size is missing"),
        ("name: a, policy: none, size: 1MB", "tickets[0].policy", "expected all, alone, pair"),
        ("name: a, policy: all, size: 1000", "tickets[0].size", "with its unit"),
        ("name: a, policy: all, size: 64G", "tickets[0].size", "64GiB"),
        ("name: a, policy: all, size: 1.5", "tickets[0].size", "with its unit"),
        ("name: a, policy: all, size: -1MB", "tickets[0].size", "not a size"),
        ("name: a, policy: all, size: null", "tickets[0].size", "with its unit"),
        (f"{GOOD}, start: 3", "tickets[0].start", "1.5s"),
        (f"{GOOD}, start: 2m", "tickets[0].start", "2min"),
        (f"{GOOD}, start: 0.1ms", "tickets[0].start", "finer than a millisecond"),
        (f"{GOOD}, runs: 1s, end: 2s", "tickets[0].end", "exclude each other"),
        (f"{GOOD}, runs: 0s", "tickets[0].runs", "longer than 0"),
        (f"{GOOD}, start: 2s, end: 2s", "tickets[0].end", "later than start"),
        (f"{GOOD}, kind: idle", "tickets[0].kind", "expected active, reservation"),
        (f"{GOOD}, main: b", "tickets[0].main", "draft model"),
        ("name: a, policy: pair, main: a, size: 1MB", "tickets[0].main", "none is defined yet"),
        ("name: a, policy: pair, size: 1MB", "tickets[0]", "main is missing"),
        (f"{GOOD}, colour: red", "tickets[0].colour", "no such key"),
        ("name: 3, policy: all, size: 1MB", "tickets[0].name", "as a name"),
        ('name: "a\\nb", policy: all, size: 1MB', "tickets[0].name", "as a name"),
        ("name: a, name: b", "tickets[0].name", "appears twice"),
    ],
)
def test_a_mistake_in_a_ticket_is_reported(
    run_scenario: Any, ticket: str, where: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        run_scenario(ticket)
    message = str(caught.value)
    assert f"scenario.yaml:7: {where}: " in message
    assert words in message
    assert "\n" not in message


def test_a_repeated_name_is_reported(run_scenario: Any) -> None:
    with pytest.raises(InputError, match=r"scenario\.yaml:8: tickets\[1\]\.name: a appears twice"):
        run_scenario(GOOD, GOOD)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping"),
        ("[]", "expected a mapping"),
        ("schema: memfit.wired-scenario/2\n", "schema"),
        (HEAD, "policies is missing"),
        (HEAD + "policies: []\n", "policies is missing"),
        (HEAD + "policies: 3\n", "expected a mapping"),
        (HEAD + "policies: {a: sum}\n", "policies.a: expected a mapping"),
        (HEAD + "policies: {a: {}}\n", "kind is missing"),
        (HEAD + "policies: {a: {kind: mean}}\n", "expected sum, max"),
        (HEAD + "policies: {a: {kind: max, cap: 1GB}}\n", "policies.a.cap: no such key"),
        (HEAD + "policies: {a: {kind: fixed}}\n", "limit is missing"),
        (HEAD + "policies: {a b: {kind: max}}\n", "as a name"),
        (HEAD + "policies: {a: {kind: max}}\n", "list of 1 to 1000"),
        (HEAD + "policies: {a: {kind: max}}\ntickets: []\n", "list of 1 to 1000"),
        (HEAD + "policies: {a: {kind: max}}\ntickets: [3]\n", "expected a mapping"),
        (HEAD + "device: m4-pro-24\nmemory: 24GB\n", "exclude each other"),
        (HEAD + "device: m9-pro-24\n", "device: unknown machine"),
        (HEAD + "device: 3\n", "expected a string"),
        (HEAD + "device: rtx-4090\nmode: wired\n", "setting of Macs"),
        (HEAD + "mode: both\n", "expected wired, policy-only"),
        (HEAD + "policies: {a: {kind: max}}\nshrink_threshold: 0.25\n", "share of 0% to 100%"),
        (HEAD + "policies: {a: {kind: max}}\nshrink_threshold: 101%\n", "share of 0% to 100%"),
        (HEAD + "policies: {a: {kind: max}}\nbaseline: -1\n", "with its unit"),
        (HEAD + "os_regime: 9\n", "os_regime"),
        ("\xff", "not UTF-8"),
    ],
)
def test_a_mistake_in_the_file_is_reported(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        read_scenario(path)
    assert "scenario.yaml" in str(caught.value)
    assert words in str(caught.value)


@given(st.text() | st.binary())
def test_any_file_is_a_scenario_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    raw = text if isinstance(text, bytes) else (HEAD + text).encode("utf-8", "replace")
    path.write_bytes(raw)
    with contextlib.suppress(InputError):
        plan_wired(read_scenario(path))


@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 9), st.integers(1, 9)), min_size=1))
def test_the_ledger_of_any_ticket_sequence_adds_up(
    tmp_path_factory: pytest.TempPathFactory, traffic: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "traffic.yaml"
    path.write_text(
        HEAD
        + POLICIES
        + "".join(
            f"  - {{name: t{index}, policy: all, size: {size}MB, start: {start}s, runs: {runs}s}}\n"
            for index, (size, start, runs) in enumerate(traffic)
        )
    )
    plan = plan_wired(read_scenario(path))
    assert len(plan.tickets) == len(traffic)
    for moment in plan.moments:
        assert moment.demand_bytes <= moment.limit_bytes <= 100 * 10**6
    for each, (size, start, runs) in zip(plan.tickets, traffic, strict=True):
        assert (each.outcome == "refused") == (size > 100)
        if each.outcome == "admitted":
            assert each.started_ms == 1000 * start + each.waited_ms
            assert each.ended_ms == each.started_ms + 1000 * runs
    last = plan.moments[-1]
    assert (last.limit_bytes, last.active, last.waiting) == (0, 0, 0)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80, unique=True), st.integers(1, 40))
def test_thinning_the_plot_keeps_the_largest_demand(times: list[int], most: int) -> None:
    moments = [WiredMoment(time, 0, 0, time * 7 % 101, 0, 0, 0, 0) for time in sorted(times)]
    kept = thinned(moments, most)
    assert 0 < len(kept) <= max(most, 1)
    assert [m.at_ms for m in kept] == sorted(m.at_ms for m in kept)
    assert max(m.demand_bytes for m in kept) == max(m.demand_bytes for m in moments)


def test_the_page_lists_every_key() -> None:
    page = (ROOT / "docs" / "wired.md").read_text(encoding="utf-8")
    keys = {
        *wired_scenario.CHANGE_KEYS,
        *wired_scenario.KEYS,
        *wired_scenario.TICKET_KEYS,
        *wired_scenario.POLICY_KEYS,
    }
    for own in wired_scenario.POLICY_KEYS.values():
        keys.update(own)
    keys.update(wired_scenario.MODES, wired_scenario.KINDS, wired_scenario.OVER_BUDGET)
    assert {key for key in keys if f"`{key}`" not in page} == set()


MODEL = ROOT / "sample_configs" / "qwen3-4b-4bit.yaml"
MODEL_HEAD = f"model: {MODEL}\n"


def test_sizes_are_those_of_the_estimate(run_scenario: Any) -> None:
    plan = run_scenario(
        "name: weights, policy: alone, kind: reservation, weights: estimate",
        'name: chat, policy: alone, kv: "estimate(context=4k)", prefill: estimate(context=4k),'
        " prefill_runs: 2s, start: 1s, runs: 5s",
        "name: whole, policy: alone, weights: 1MB, kv: estimate(context=4k)",
        head=MODEL_HEAD,
    )
    sized = opening.size(open_checkpoint(str(MODEL)), device=None)
    figures = sized.figures_for(Workload(prompt_tokens=4096, max_tokens=0))
    assert ticket(plan, "weights").size_bytes == sized.resident_bytes
    assert ticket(plan, "chat").size_bytes == figures.kv.nbytes
    assert ticket(plan, "whole").size_bytes == 10**6 + figures.kv.nbytes
    prefill = ticket(plan, "chat.prefill")
    assert prefill.size_bytes == figures.moment.workspace_bytes
    assert (prefill.started_ms, prefill.ended_ms) == (1000, 3000)
    assert "workspace of 4096 + 0 tokens by estimate" in (prefill.source or "")


def test_sizes_are_those_of_a_measurement(tmp_path: Path) -> None:
    path, taken = tmp_path / "scenario.yaml", measurement()
    of = f'"measured:{taken.id}"'
    ticket_line = f"  - {{name: a, policy: alone, weights: {of}, kv: {of}, prefill: {of}}}\n"
    path.write_text(HEAD + POLICIES + ticket_line, encoding="utf-8")
    plan = plan_wired(read_scenario(path, {taken.id: taken}.__getitem__))
    assert ticket(plan, "a").size_bytes == LOADED.active_bytes + RUN.kv_bytes
    peak = max(run.peak_bytes for run in taken.runs)
    assert ticket(plan, "a.prefill").size_bytes == peak - LOADED.active_bytes - RUN.kv_bytes
    assert taken.id in (ticket(plan, "a").source or "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("weights: estimate", "tickets[0].weights: an estimate needs the key model"),
        ("kv: measured:none", "tickets[0].kv: none: no such measurement"),
        ("kv: 7", "expected a size such as 8.3GB, measured:ID, or estimate"),
        ("size: 1GB, weights: 1GB", "tickets[0].size: excludes weights and kv"),
        ("size: 1GB, prefill_runs: 1s", "is for a ticket with prefill"),
        ("size: 1GB, prefill: 1GB, prefill_runs: 0s", "must be longer than 0"),
        ("size: 1GB, kind: reservation, prefill: 1GB", "is for an active ticket"),
        ("size: 1GB, prefill: estimate(", "expected a size such as"),
        ("size: 1GB, prefill: estimate(tokens=9)", "expected context, max_tokens"),
        ("size: 1GB, prefill: estimate(batch=2)", "needs its context"),
        ("size: 1GB, prefill: estimate(context=many)", "tickets[0].prefill: 'many'"),
    ],
)
def test_a_wrong_size_is_named_with_its_key(run_scenario: Any, line: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        run_scenario(f"name: a, policy: all, {line}")


def test_an_estimate_of_a_cache_needs_a_prompt(run_scenario: Any) -> None:
    with pytest.raises(InputError, match="kv depends on the prompt"):
        run_scenario("name: a, policy: all, kv: estimate", head=MODEL_HEAD)


def test_the_configuration_changes_only_while_nothing_runs(run_scenario: Any) -> None:
    tickets = (
        "name: weights, policy: all, kind: reservation, size: 10MB",
        "name: a, policy: all, size: 20MB, start: 1s, runs: 2s",
        "name: b, policy: all, size: 20MB, start: 5s, runs: 2s",
    )
    plan = run_scenario(*tickets, head="configure: [{at: 4s, baseline: 30MB}]\n")
    assert plan.verdict == "holds"
    limits = {moment.at_ms: moment.limit_bytes for moment in plan.moments}
    assert (limits[1000], limits[5000]) == (30_000_000, 60_000_000)
    plan = run_scenario(*tickets, head="configure: [{at: 2s, baseline: 30MB}]\n")
    assert (plan.verdict, plan.refused_changes_ms) == ("fails", (2000,))
    assert {moment.limit_bytes for moment in plan.moments} <= {0, 30_000_000}
    with pytest.raises(InputError, match="go from the first to the last"):
        run_scenario(*tickets, head="configure: [{at: 2s}, {at: 1s}]\n")


def test_a_budget_has_its_base_from_a_measurement_or_an_estimate(tmp_path: Path) -> None:
    path, taken = tmp_path / "scenario.yaml", measurement()
    peak = max(run.peak_bytes for run in taken.runs) - RUN.kv_bytes
    sized = opening.size(open_checkpoint(str(MODEL)), device=None)
    workspace = sized.figures_for(Workload(prompt_tokens=4096)).moment.workspace_bytes
    bases = {f"measured:{taken.id}": peak, "estimate(context=4k)": sized.resident_bytes + workspace}
    for base, nbytes in bases.items():
        path.write_text(
            f'{HEAD}{MODEL_HEAD}policies: {{b: {{kind: budget, base: "{base}"}}}}\n'
            "tickets: [{name: a, policy: b, size: 1MB, runs: 1s}]\n"
        )
        plan = plan_wired(read_scenario(path, {taken.id: taken}.__getitem__))
        assert plan.largest_limit_bytes == nbytes + 10**6, base


@pytest.mark.parametrize(
    ("device", "of", "warns"),
    [
        ("m4-max-64", {"device": "Apple M4 Max, 36 GiB", "backend": "metal"}, False),
        ("m4-max-64", {"device": "Apple M4 Pro, 64 GiB", "backend": "metal"}, False),
        ("m4-max-64", {"device": "Apple M4, 16 GiB", "backend": "metal"}, True),
        ("m4-max-64", {"device": "Apple M1 Max, 64 GiB", "backend": "metal"}, True),
        ("m4-max-64", {"device": "Apple Z9, 64 GiB", "backend": "metal"}, True),
        ("m4-max-64", {}, True),
    ],
)
def test_a_measurement_of_another_machine_class_gets_a_warning(
    tmp_path: Path, device: str, of: dict[str, Any], warns: bool
) -> None:
    path, taken = tmp_path / "scenario.yaml", measurement(**of)
    path.write_text(
        f"{HEAD}device: {device}\npolicies: {{s: {{kind: sum}}}}\n"
        f'tickets: [{{name: a, policy: s, weights: "measured:{taken.id}", runs: 1s}}]\n'
    )
    plan = plan_wired(read_scenario(path, {taken.id: taken}.__getitem__))
    assert any("of another class" in note for note in plan.notes) == warns


@pytest.mark.parametrize(("device", "outcome"), [("m4-max-64", "refused"), ("h100-80", "admitted")])
def test_policy_only_without_a_cap_admits_nothing_where_there_is_a_working_set(
    tmp_path: Path, device: str, outcome: str
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        f"{HEAD}device: {device}\nmode: policy-only\npolicies: {{s: {{kind: sum}}}}\n"
        "tickets: [{name: a, policy: s, size: 1GB, runs: 1s}]\n"
    )
    assert ticket(plan_wired(read_scenario(path)), "a").outcome == outcome
