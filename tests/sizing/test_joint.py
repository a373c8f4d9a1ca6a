"""The joint search finds what brute force over all settings finds, by the figures of estimates."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.results.advice import Action, Cell, ServerRun
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.runtimes.facets import least_bytes
from memfit.estimators.runtimes.mlx_lm import MLX_LM
from memfit.estimators.runtimes.mlx_lm_commands import together
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.joint import JointSearch, RequestSettings
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.search import UNBOUNDED_CONTEXT
from memfit.estimators.sizing.server_bound import ServerBound, need_of
from memfit.estimators.sizing.serving import REPLY_TOKENS, served_here
from memfit.estimators.sizing.sized_model import SizedModel, is_known
from tests.selection import QUICK_SAMPLES, examples, quick

CASES = Path(__file__).parents[1] / "arch" / "cases"
SAMPLES = Path(__file__).parents[2] / "sample_configs"
# Dense, latent, windows, a hybrid with experts, a scan, and caches that layers share.
NAMES = ("qwen3", "deepseek_v3", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss", "gemma3n")
STEPS = (2048, 1024, 512, 256, 128)
LIMIT = 4096
GIB = 2**30


class Case(NamedTuple):
    """A request; the working set is given between that of the least and of the largest need."""

    model: str
    quantize: int | None
    workload: Workload
    share: int


@cache
def catalog() -> Catalog:
    return Catalog()


@cache
def config(name: str) -> str:
    """A config with a short limit, so that every prompt can be tried, in a directory of its own."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    values = {**json.loads((CASES / f"{name}.json").read_text()), "max_position_embeddings": LIMIT}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


cases = st.builds(
    Case,
    st.sampled_from(NAMES),
    st.sampled_from((None, None, 6, 4)),
    st.builds(
        Workload,
        prompt_tokens=st.integers(1, LIMIT),
        max_tokens=st.sampled_from((0, 0, 100)),
        batch=st.sampled_from((1, 1, 3)),
        prefill_step=st.sampled_from((2048, 2048, 700, 128)),
        kv_bits=st.sampled_from((None, None, 8)),
        quantized_kv_start=st.sampled_from((0, 5000)),
    ),
    st.integers(0, 110),
)


def sized(case: Case, device: Device | None, bits: int | None) -> SizedModel:
    bits = bits or case.quantize
    found = catalog().sized(
        config(case.model),
        quantize=converted(bits) if bits else None,
        device=device,
        margin_bytes=0,
    )
    return replace(found, _answers={})


def brute(case: Case) -> Iterator[tuple[RequestSettings, Workload]]:
    """Every set of settings, the cheapest first, without the search's own lists."""
    asked = case.workload
    kv_choices = [bits for bits in (8, 4) if bits < (asked.kv_bits or 16) and asked.batch == 1]
    bits = [b for b in (8, 6, 5, 4) if b < (case.quantize or 16)]
    steps = [step for step in STEPS if step < asked.prefill_step]
    for weights, kv, step in product((None, *bits), (None, *kv_choices), (None, *steps)):
        workload = replace(asked, prefill_step=step or asked.prefill_step)
        if kv:
            workload = replace(workload, kv_bits=kv, quantized_kv_start=0)
        yield RequestSettings(workload.prefill_step, workload.kv_bits, weights), workload


def device_of(case: Case) -> Device:
    """A machine with a budget between the least need of all settings and the largest."""
    needs = []
    for chosen, workload in brute(case):
        try:
            needs.append(sized(case, None, chosen.weight_bits).requirement(workload).peak_bytes)
        except UnsupportedError:
            continue
    least, most = min(needs), max(needs)
    return working_set_device((least + (most - least) * case.share // 100) * 10 // 9 + 1)


def is_possible(case: Case) -> bool:
    try:
        sized(case, None, None).figures_for(case.workload)
    except UnsupportedError:
        return False
    return True


def verdict_of(case: Case, device: Device, chosen: RequestSettings, workload: Workload) -> str:
    try:
        model = sized(case, device, chosen.weight_bits)
        return estimate(model, workload, advises=False).verdict
    except UnsupportedError:
        return "refused"


@settings(max_examples=examples(100), deadline=None)
@given(cases)
def test_no_cheaper_set_fits_than_the_one_found(case: Case) -> None:
    if not is_possible(case):
        return
    device = device_of(case)
    model = sized(case, device, None)
    found = JointSearch(model, case.workload, weight_bits_of(model)).cheapest()
    verdicts = [(chosen, verdict_of(case, device, chosen, w)) for chosen, w in brute(case)]
    fitting = next((n for n, (_, verdict) in enumerate(verdicts) if verdict == "fits"), None)
    tight = [chosen for chosen, verdict in verdicts[:fitting] if verdict == "tight"]
    expected = tight[:1] + ([] if fitting is None else [verdicts[fitting][0]])
    assert list(found) == expected


@settings(max_examples=examples(20), deadline=None)
@given(cases)
def test_the_longest_prompt_of_all_steps_is_that_of_brute_force(case: Case) -> None:
    if not is_possible(case):
        return
    device = device_of(case)
    model = sized(case, device, None)
    search = JointSearch(model, case.workload)
    found = search.longest(search.requested)
    asked, longest, best = case.workload, 0, None
    for step in [s for s in (asked.prefill_step, *STEPS) if s <= asked.prefill_step]:
        tokens = longest_by_steps(model, replace(asked, prefill_step=step))
        if tokens > longest:
            longest, best = tokens, step
    assert found.tokens == longest
    assert best is None or found.settings.prefill_step == best


def longest_by_steps(model: SizedModel, workload: Workload) -> int:
    longest = 0
    limit = min(LIMIT, model.model.max_context or LIMIT)
    for tokens in range(256, limit + 1, 256):
        try:
            answer = estimate(model, workload.prompt_only(tokens), advises=False)
        except UnsupportedError:
            break
        if answer.verdict != "fits":
            break
        longest = tokens
    return longest


def test_kept_caches_leave_room_for_a_request_that_needs_more_than_the_longest_prompt() -> None:
    case = Case("mamba2", None, Workload(prompt_tokens=2816, max_tokens=100, prefill_step=700), 0)
    model = sized(case, working_set_device(38_621_251), None)
    server = served_here(model, case.workload)
    assert server is not None
    assert server.context_tokens == 3840
    check_printed_server(model, case.workload, server)


@settings(max_examples=examples(15), deadline=None)
# Fewer KV bits fit this prompt, but their longest is shorter than without them.
@example(Case("qwen3", None, Workload(prompt_tokens=1122, prefill_step=128), 0))
@given(cases)
def test_every_answer_is_what_an_estimate_says_for_its_settings(case: Case) -> None:
    if not is_possible(case):
        return
    device = device_of(case)
    answer = estimate(sized(case, device, None), case.workload)
    assert answer.actions or answer.verdict == "exceeds"
    for action in answer.actions:
        check_action(case, device, answer, action)
    for row in answer.grid.rows:
        for tokens, cell in zip(answer.grid.columns, row.cells, strict=True):
            workload = changed(case.workload, {**row.settings, "prefill_step": cell.prefill_step})
            workload = replace(workload, prompt_tokens=tokens)
            if cell.needed_bytes is None:
                continue
            model = sized(case, device, row.settings.get("weight_bits"))
            if row.program == "server":
                check_server(model, workload, cell)
                continue
            alone = estimate(model, workload, advises=False)
            assert (alone.verdict, alone.needed_bytes) == (cell.verdict, cell.needed_bytes)


def check_server(model: SizedModel, workload: Workload, cell: Cell) -> None:
    assert cell.prompt_cache_size is not None
    served = replace(workload, max_tokens=workload.max_tokens or REPLY_TOKENS)
    flags = together(served, cell.prompt_cache_size)
    need = need_of(ServerBound(model, served, workload.batch).moment(flags))
    assert (judge(need, model.device)[0], need.peak_bytes) == (cell.verdict, cell.needed_bytes)


def check_action(case: Case, device: Device, answer: Estimate, action: Action) -> None:
    chosen = action.settings
    machine = memory_device(chosen["memory_bytes"]) if "memory_bytes" in chosen else device
    model = sized(case, machine, chosen.get("weight_bits"))
    alone = estimate(model, changed(case.workload, chosen))
    assert (alone.verdict, alone.peak_bytes) == (action.verdict, action.peak_bytes)
    assert alone.needed_bytes == action.needed_bytes
    assert (alone.recommendation.context_tokens.value or 0) == action.context_tokens
    if action.server:
        check_printed_server(model, changed(case.workload, chosen), action.server)
    if action.goal == "longer_prompt":
        assert action.context_tokens > (answer.recommendation.context_tokens.value or 0)


def check_printed_server(model: SizedModel, workload: Workload, server: ServerRun) -> None:
    """The printed flags fit the request and their longest prompt, and no longer one."""
    served = replace(
        workload,
        max_tokens=workload.max_tokens or REPLY_TOKENS,
        prefill_step=server.settings.prefill_step,
    )

    def need(tokens: int) -> Need:
        longer = replace(served, prompt_tokens=tokens)
        return need_of(ServerBound(model, longer, workload.batch).moment(server.settings))

    assert judge(need(served.prompt_tokens), model.device)[0] == "fits"
    assert need(served.prompt_tokens).peak_bytes == server.needed_bytes
    if server.context_tokens is None:
        return
    assert need(server.context_tokens).peak_bytes == server.context_needed_bytes
    most = (model.model.max_context or UNBOUNDED_CONTEXT) - served.max_tokens
    if served.prompt_tokens < server.context_tokens <= most - 256:
        assert judge(need(server.context_tokens + 256), model.device)[0] != "fits"


def changed(workload: Workload, chosen: dict[str, int]) -> Workload:
    workload = replace(workload, prefill_step=chosen.get("prefill_step", workload.prefill_step))
    if "kv_bits" in chosen:
        return replace(workload, kv_bits=chosen["kv_bits"], quantized_kv_start=0)
    return workload


@pytest.mark.parametrize("name", quick(sorted(SAMPLES.glob("*.yaml")), QUICK_SAMPLES))
def test_figures_are_never_below_the_part_that_is_quick_to_compute(name: Path) -> None:
    model = catalog().sized(str(name), device=memory_device(64 * GIB))
    for prompt, step in product((1, 300, 9001), (2048, 100)):
        workload = Workload(prompt_tokens=prompt, prefill_step=step, max_tokens=50)
        least = least_bytes(model.runtime_model, workload)
        assert least <= model.figures_for(workload).moment.nbytes


def answered(name: str, device: Device | None, **changes: Any) -> Estimate:
    quantize, mlx = changes.pop("quantize", None), changes.pop("mlx_version", ())
    workload = Workload(**{"prompt_tokens": 4096, **changes})
    model = catalog().sized(
        str(SAMPLES / f"{name}.yaml"),
        quantize=converted(quantize) if quantize else None,
        device=device,
        runtime=replace(MLX_LM, mlx_version=mlx),
    )
    return estimate(model, workload)


@pytest.mark.exhaustive(daily=True)
def test_a_model_too_large_at_16_bits_fits_converted_to_4() -> None:
    answer = answered("qwen3.5-35b-a3b", memory_device(32 * GIB))
    assert answer.verdict == "exceeds"
    tight, fits, larger_mac = [a for a in answer.actions if a.goal == "request"]
    assert (tight.settings, tight.verdict) == ({"weight_bits": 5}, "tight")
    assert (fits.settings, fits.verdict, fits.context_tokens) == ({"weight_bits": 4}, "fits", 34560)
    assert larger_mac.settings == {"memory_bytes": 96 * GIB}
    assert answer.recommendation.weight_bits.value == 4
    convert, serve = fits.commands
    assert convert.startswith("mlx_lm.convert --hf-path Qwen/Qwen3.5-35B-A3B ")
    assert convert.endswith("-q --q-bits 4")
    assert serve.startswith("mlx_lm.server --model Qwen3.5-35B-A3B-4bit ")


def test_a_smaller_prefill_step_is_found_for_a_long_prompt() -> None:
    device = memory_device(32 * GIB)
    answer = answered("qwen3.5-35b-a3b", device, quantize=4, prompt_tokens=65536)
    assert answer.recommendation.prefill_step.value == 512
    assert answer.recommendation.kv_bits.state == "keep"
    found = next(a for a in answer.actions if a.verdict == "fits")
    assert (found.settings, found.cost) == ({"prefill_step": 512}, "speed")
    assert found.context_tokens == 102_144
    assert [a.settings for a in answer.actions if a.goal == "longer_prompt"] == [
        {"prefill_step": 128},
        {"kv_bits": 8, "prefill_step": 128},
    ]
    # Newer releases of MLX fuse attention of this width.
    gemma = answered(
        "gemma-4-26b-a4b", device, quantize=4, prompt_tokens=131_072, mlx_version=(0, 32, 2)
    )
    assert gemma.recommendation.prefill_step.value == 1024


def test_the_smallest_mac_is_named_where_no_setting_is_enough() -> None:
    answer = answered("qwen3-next-80b-a3b-4bit", memory_device(32 * GIB))
    assert answer.recommendation.memory_bytes.state == "change"
    assert answer.recommendation.memory_bytes.value == 64 * GIB
    assert [(a.settings, a.cost) for a in answer.actions] == [
        ({"memory_bytes": 64 * GIB}, "hardware")
    ]
    assert answer.recommendation.prefill_step.state == "impossible"


def test_settings_that_cannot_fit_comfortably_are_not_computed_once_one_fits_tightly() -> None:
    workload = Workload(prompt_tokens=20_000, prefill_step=256)
    model = catalog().sized(str(SAMPLES / "qwen3-4b-4bit.yaml"))
    search = JointSearch(
        model.on(working_set_device(model.requirement(workload).peak_bytes)), workload
    )
    assert search.best([search.requested, smaller := RequestSettings(128, None)]) == (
        search.requested,
    )
    assert not is_known(search.sized, search.workload_with(smaller))


def test_a_smaller_step_that_takes_more_is_reported() -> None:
    # 1,024 tokens on 64k keys at head width 256: no fused kernel of an M5 takes them.
    answer = answered("qwen3.5-35b-a3b", find_device("m5-max-128"), prompt_tokens=65536)
    reason = answer.recommendation.prefill_step.reason
    assert "a step of 1024 takes more memory, not less" in reason


def test_kv_bits_that_raise_the_peak_of_a_short_prompt_are_never_recommended() -> None:
    device = memory_device(8 * GIB)
    plain = answered("qwen3-4b-4bit", device, prompt_tokens=6000)
    eight = answered("qwen3-4b-4bit", device, prompt_tokens=6000, kv_bits=8, quantized_kv_start=0)
    assert eight.peak_bytes > plain.peak_bytes
    tight = working_set_device(plain.needed_bytes * 10 // 9 - 10)
    answer = answered("qwen3-4b-4bit", tight, prompt_tokens=6000)
    assert all(
        "kv_bits" not in a.settings or a.peak_bytes < plain.peak_bytes for a in answer.actions
    )


def test_a_batch_never_gets_kv_bits_and_a_rotating_cache_neither() -> None:
    for changes in ({"batch": 4}, {"max_kv_size": 2000}):
        answer = answered("qwen3-4b-4bit", memory_device(8 * GIB), prompt_tokens=40_000, **changes)
        assert all("kv_bits" not in action.settings for action in answer.actions)


@pytest.mark.exhaustive
def test_cells_of_macs_are_what_an_estimate_says_on_each() -> None:
    answer = answered("qwen3.5-35b-a3b", None, prompt_tokens=20_000)
    assert answer.verdict == "unknown"
    assert answer.recommendation.context_tokens.state == "not_applicable"
    path = str(SAMPLES / "qwen3.5-35b-a3b.yaml")
    for row in answer.grid.rows:
        bits = row.settings.get("weight_bits")
        for nbytes, cell in zip(answer.grid.columns, row.cells, strict=True):
            model = Catalog().sized(
                path, quantize=converted(bits) if bits else None, device=memory_device(nbytes)
            )
            workload = Workload(prompt_tokens=20_000, prefill_step=cell.prefill_step)
            alone = estimate(model, workload, advises=False)
            assert (alone.verdict, alone.needed_bytes) == (cell.verdict, cell.needed_bytes)
    assert answer.recommendation.memory_bytes.value == 32 * GIB
    columns = zip(answer.grid.columns, answer.grid.rows[0].cells, strict=True)
    assert next(nbytes for nbytes, cell in columns if cell.verdict == "fits") == 96 * GIB
