"""Each kind of limit: passing, failing, and exactly at the limit, where it passes."""

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import SAMPLES, target, write_plain_config, write_policy, write_quantised
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, QWEN3_NEXT_80B, sample_config, write_config
from tests.selection import quick

AT_MOST = {
    "peak": "peak_bytes",
    "workspace": "workspace_bytes",
    "load_peak": "load_peak_bytes",
    "wired_limit": "wired_limit_bytes",
    "held": "held_bytes",
}
GROWN = {"weights": "weights_bytes", "kv_per_token": "kv_bytes_per_token", "peak": "peak_bytes"}
CASE = SAMPLES.parent / "tests" / "arch" / "cases" / "qwen3.json"
FOUR_BIT = {"group_size": 64, "bits": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with Qwen3-4B in 4 bits, as a config."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", {**QWEN3_4B, "quantization": FOUR_BIT})
    return tmp_path


def ask(memfit: Memfit, folder: Path, limits: Mapping[str, Any], **keys: Any) -> tuple[int, Any]:
    """Return the exit code and the one target's report."""
    write_policy(folder, it=target(limits, **keys))
    run = memfit("gate", "--format", "json")
    (report,) = run.json["targets"]
    return run.code, report


def figures(memfit: Memfit, folder: Path, **keys: Any) -> Any:
    return ask(memfit, folder, {"peak": "100%"}, **keys)[1]["figures"]


@pytest.mark.parametrize("limit", quick(AT_MOST, ("peak", "load_peak")))
def test_a_size_passes_at_its_limit_and_not_a_byte_below(
    memfit: Memfit, folder: Path, limit: str
) -> None:
    nbytes = figures(memfit, folder)[AT_MOST[limit]]
    assert ask(memfit, folder, {limit: f"{nbytes + 1}B"})[0] == 0
    assert ask(memfit, folder, {limit: f"{nbytes}B"})[0] == 0
    code, report = ask(memfit, folder, {limit: f"{nbytes - 1}B"})
    assert code == 1
    (check,) = report["checks"]
    assert (check["figure"], check["allowed"], check["excess"]) == (nbytes, nbytes - 1, 1)


@pytest.mark.parametrize("limit", quick(AT_MOST, ("peak", "load_peak")))
def test_a_share_of_the_working_set_passes_at_its_limit(
    memfit: Memfit, folder: Path, limit: str
) -> None:
    nbytes = figures(memfit, folder, working_set="19GB")[AT_MOST[limit]]
    # 12.5 % of 8 n bytes are exactly n; of one byte less they are less than n.
    assert ask(memfit, folder, {limit: "12.5%"}, working_set=f"{8 * nbytes}B")[0] == 0
    assert ask(memfit, folder, {limit: "12.5%"}, working_set=f"{8 * nbytes - 1}B")[0] == 1


def test_a_context_passes_at_its_limit_which_estimate_recommends(
    memfit: Memfit, folder: Path
) -> None:
    run = memfit("estimate", "model", "--device", "m1-8", "--prompt-tokens", "4096", "--json")
    tokens = run.json["recommendation"]["context_tokens"]["value"]
    assert 256 < tokens < 40960
    assert ask(memfit, folder, {"context": tokens}, device="m1-8")[0] == 0
    assert ask(memfit, folder, {"context": tokens - 1}, device="m1-8")[0] == 0
    code, report = ask(memfit, folder, {"context": tokens + 1}, device="m1-8")
    assert (code, report["checks"][0]["figure"]) == (1, tokens)


def test_a_context_limit_fails_where_nothing_fits(memfit: Memfit, folder: Path) -> None:
    code, report = ask(memfit, folder, {"context": 1}, working_set="1GB")
    assert (code, report["checks"][0]["figure"]) == (1, None)


def test_expert_capacity_passes_at_its_limit(memfit: Memfit, folder: Path) -> None:
    write_plain_config(folder / "model", {**QWEN3_NEXT_80B, "quantization": FOUR_BIT})
    # 208 of 512 experts, as in tests/cli/test_estimate.py.
    assert ask(memfit, folder, {"expert_capacity": 207}, memory="32GB")[0] == 0
    assert ask(memfit, folder, {"expert_capacity": 208}, memory="32GB")[0] == 0
    assert ask(memfit, folder, {"expert_capacity": 209}, memory="32GB")[0] == 1
    assert ask(memfit, folder, {"expert_capacity": "40.625%"}, memory="32GB")[0] == 0
    code, report = ask(memfit, folder, {"expert_capacity": "40.626%"}, memory="32GB")
    assert (code, report["checks"][0]["allowed"]) == (1, 209)


def test_expert_capacity_of_a_dense_model_fails(memfit: Memfit, folder: Path) -> None:
    code, report = ask(memfit, folder, {"expert_capacity": 1})
    assert (code, report["checks"][0]["figure"]) == (1, None)


@pytest.mark.parametrize("limit", quick(GROWN, ("kv_per_token",)))
def test_growth_passes_at_its_limit_in_bytes_and_in_percent(
    memfit: Memfit, folder: Path, limit: str
) -> None:
    old = {**QWEN3_4B, "quantization": FOUR_BIT, "num_hidden_layers": 32}
    write_plain_config(folder / "old", old)
    name = GROWN[limit]

    def code(amount: str, new: str = "model") -> int:
        write_policy(folder, it=target({"growth": {limit: amount}}))
        return memfit("gate", "old", new, "--policy", "memfit.yaml").code

    now = figures(memfit, folder)[name]
    before = figures(memfit, folder, model="old")[name]
    assert now > before
    assert code(f"{now - before}B") == 0
    assert code(f"{now - before - 1}B") == 1
    assert code("0%", new="old") == 0
    assert code("0%") == 1
    if limit == "kv_per_token":
        assert (before * 8, now * 8) == (before * 8, before * 9)
        assert (code("12.5%"), code("12.499%")) == (0, 1)


@pytest.mark.exhaustive
def test_the_peak_of_training_is_that_of_plan_train(memfit: Memfit, folder: Path) -> None:
    pytest.importorskip("mlx_lm")
    write_config(folder / "model", json.loads(CASE.read_text()))
    recipe = {"num_layers": 1, "batch_size": 1, "max_seq_length": 33, "grad_checkpoint": True}
    options = ("--num-layers", "1", "--batch-size", "1", "--max-seq-length", "33")
    plan = memfit(
        *("plan", "train", "model", "--device", "m4-pro-24", *options, "--grad-checkpoint"),
        "--json",
    ).json
    nbytes = plan["needed_bytes"] - plan["margin_bytes"]
    small = {"workload": {"context": 64}, "training": recipe}
    code, report = ask(memfit, folder, {"training_peak": f"{nbytes}B"}, **small)
    assert (code, report["figures"]["training_peak_bytes"]) == (0, nbytes)
    code, report = ask(memfit, folder, {"training_peak": f"{nbytes - 1}B"}, **small)
    (check,) = report["checks"]
    assert (code, check["excess"]) == (1, 1)
    # One layer, one sequence and 33 tokens cannot be fewer; of 16-bit weights 8 bits are enough.
    assert check["remedies"] == [{"setting": "quantize", "value": 8}]


@pytest.mark.exhaustive
def test_growth_of_the_training_peak_is_limited_and_its_remedies_pass(
    memfit: Memfit, folder: Path
) -> None:
    pytest.importorskip("mlx_lm")
    config = json.loads(CASE.read_text())
    write_config(folder / "old", config)
    write_config(folder / "model", {**config, "vocab_size": 2 * config["vocab_size"]})
    recipe = {"num_layers": 2, "batch_size": 4, "max_seq_length": 256}
    small = {"workload": {"context": 64}, "training": recipe}
    ask(memfit, folder, {"training_peak": "100%"}, model="old", **small)
    write_policy(folder, it=target({"growth": {"training_peak": "0%"}}, **small))
    result = memfit("gate", "old", "model", "--policy", "memfit.yaml", "--format", "json")
    (check,) = result.json["targets"][0]["checks"]
    assert (result.code, check["limit"]) == (1, "growth.training_peak")
    remedies = {remedy["setting"]: remedy["value"] for remedy in check["remedies"]}
    assert remedies["batch_size"] in (1, 2)
    batch = {
        "batch_size": remedies["batch_size"],
        "grad_accumulation_steps": 4 // remedies["batch_size"],
    }
    code, report = ask(
        memfit,
        folder,
        {"training_peak": f"{check['allowed']}B"},
        workload={"context": 64},
        training={**recipe, **batch},
    )
    assert (code, report["status"]) == (0, "passed")


def test_a_basis_limit_is_compared_with_the_basis_of_the_weights(
    memfit: Memfit, folder: Path
) -> None:
    assert ask(memfit, folder, {"basis": "derived"})[0] == 0
    code, report = ask(memfit, folder, {"basis": "exact"})
    assert (code, report["checks"][0]["figure"]) == (1, "derived")
    pytest.importorskip("mlx_lm")
    write_quantised(folder / "headers", QWEN3_4B)
    assert ask(memfit, folder, {"basis": "exact"}, model="headers")[0] == 0


@pytest.fixture
def bounded(folder: Path) -> Path:
    """A checkpoint of PyTorch files: their sizes only bound the weights."""
    write_plain_config(folder / "model", QWEN3_4B)
    with (folder / "model" / "pytorch_model.bin").open("wb") as file:
        file.truncate(8_000_000_000)
    return folder


def test_a_bound_decides_nothing_unless_it_is_accepted(memfit: Memfit, bounded: Path) -> None:
    code, report = ask(memfit, bounded, {"peak": "15GB"})
    assert (code, report["status"], report["figures"]["basis"]) == (3, "undecided", "bound")
    assert "--allow-bounds" in report["message"]
    assert memfit("gate", "--allow-bounds").code == 0
    write_policy(bounded, it=target({"peak": "5GB"}))
    assert memfit("gate").code == 3
    assert memfit("gate", "--allow-bounds").code == 1
    assert memfit("gate", "--update").code == 2
    assert not (bounded / "memfit.lock.json").exists()


def test_growth_from_a_bound_is_also_undecided(memfit: Memfit, bounded: Path) -> None:
    (bounded / "model").rename(bounded / "old")
    write_plain_config(bounded / "new", QWEN3_4B)
    for basis, code in (({}, 3), ({"basis": "derived"}, 3), ({"basis": "bound"}, 0)):
        write_policy(bounded, it=target({"growth": {"weights": "100%"}, **basis}))
        assert (basis, memfit("gate", "old", "new").code) == (basis, code)
    assert memfit("gate", "old", "new", "--allow-bounds").code == 0


def test_a_policy_can_accept_bounds_or_forbid_them(memfit: Memfit, bounded: Path) -> None:
    assert ask(memfit, bounded, {"peak": "15GB", "basis": "bound"})[0] == 0
    assert ask(memfit, bounded, {"peak": "15GB", "basis": "derived"})[0] == 1
    assert memfit("gate", "--allow-bounds").code == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("limits", [{"peak": "4.01GB"}, {"wired_limit": "51%"}])
def test_every_remedy_passes_and_the_next_value_does_not(
    memfit: Memfit, folder: Path, limits: dict[str, str]
) -> None:
    work = {"prompt_tokens": 8192, "prefill_step": 4096}
    keys: dict[str, Any] = {"working_set": "8GB", "workload": work}
    code, report = ask(memfit, folder, limits, **keys)
    assert code == 1
    remedies = {remedy["setting"]: remedy["value"] for remedy in report["checks"][0]["remedies"]}
    assert remedies.keys() == {"context", "prefill_step", "quantize"}
    for setting, value in remedies.items():
        assert (setting, _with(memfit, folder, limits, keys, setting, value)) == (setting, 0)
    assert _with(memfit, folder, limits, keys, "context", remedies["context"] + 256) == 1
    assert _with(memfit, folder, limits, keys, "prefill_step", remedies["prefill_step"] * 2) == 1


def _with(
    memfit: Memfit, folder: Path, limits: dict[str, str], keys: Any, setting: str, value: int
) -> int:
    if setting == "quantize":
        return ask(memfit, folder, limits, quantize=value, **keys)[0]
    name = "prompt_tokens" if setting == "context" else setting
    start = {"quantized_kv_start": 0} if setting == "kv_bits" else {}
    work = {**keys["workload"], name: value, **start}
    return ask(memfit, folder, limits, **{**keys, "workload": work})[0]


def test_fewer_bits_are_suggested_for_weights_that_have_more(memfit: Memfit, folder: Path) -> None:
    write_plain_config(folder / "model", sample_config("qwen3-8b-4bit"))
    code, report = ask(memfit, folder, {"load_peak": "9GB"})
    assert (code, report["checks"][0]["remedies"]) == (1, [{"setting": "quantize", "value": 8}])
    assert ask(memfit, folder, {"load_peak": "9GB"}, quantize=8)[0] == 0


@pytest.mark.parametrize(
    ("sample", "work", "machine"),
    [
        # Prompts above 200,000 tokens would have more chunks than a workload allows.
        ("qwen3-next-80b-a3b-4bit", {"prompt_tokens": 300, "prefill_step": 2}, "128GB"),
    ],
)
def test_settings_rejected_for_longer_prompts_still_give_figures(
    memfit: Memfit, folder: Path, sample: str, work: dict[str, int], machine: str
) -> None:
    path = str(SAMPLES / f"{sample}.yaml")
    code, report = ask(memfit, folder, {"peak": "90%"}, model=path, memory=machine, workload=work)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in work.items()]
    run = memfit("estimate", path, "--memory", machine, "--max-tokens", "0", "--json", *options)
    assert (code, report["status"], run.json["verdict"]) == (0, "passed", "fits")
    tokens = run.json["recommendation"]["context_tokens"]["value"]
    assert report["figures"]["context_tokens"] == tokens > work["prompt_tokens"]


CUDA: dict[str, Any] = {
    "device": "h100-80",
    "workload": {"prompt_tokens": 1024, "max_tokens": 128},
}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"peak": "10GB"}, 3),
        ({"peak": "20GB"}, 3),
        ({"context": 2048}, 3),
        # The weights and the cache alone take 8.2 GB.
        ({"peak": "8.2GB"}, 1),
        ({"peak": "10GB", "load_peak": "8GB"}, 1),
        ({"load_peak": "9GB"}, 0),
    ],
)
def test_a_bound_of_the_workspace_decides_only_what_is_certain(
    memfit: Memfit, folder: Path, limits: dict[str, Any], code: int
) -> None:
    write_plain_config(folder / "model")
    found, report = ask(memfit, folder, limits, **CUDA)
    assert (found, report["figures"]["workspace_basis"]) == (code, "bound")
    arguments = ("--prompt-tokens", "1024", "--max-tokens", "128", "--device", "h100-80")
    alone = memfit("estimate", "model", *arguments, "--json").json
    if code == 3:
        least, most = (f"{nbytes / 1e9:.3f} GB" for nbytes in alone["peak_range_bytes"])
        assert f"the peak is from {least} to {most}" in report["message"]
        assert report["checks"][0]["undecided_by"] == ["workspace"]
        assert "not decided" in memfit("gate").out
    accepted = ask(memfit, folder, {**limits, "basis": "bound"}, **CUDA)[0]
    assert accepted == int(any(not check["passed"] for check in report["checks"]))
    assert memfit("gate", "--allow-bounds").code == accepted


def test_no_baseline_is_written_of_a_bound_that_was_not_accepted(
    memfit: Memfit, folder: Path
) -> None:
    write_plain_config(folder / "model")
    write_policy(folder, it=target({"growth": {"peak": "0%"}}, **CUDA))
    assert memfit("gate", "--update").code == 2
    assert memfit("gate", "--update", "--allow-bounds").code == 0
    assert memfit("gate").code == 3
    assert memfit("gate", "--allow-bounds").code == 0


def test_the_first_policy_accepts_the_bound_of_its_machine(memfit: Memfit, folder: Path) -> None:
    write_plain_config(folder / "model")
    for device, accepts in (("h100-80", True), ("m4-max-64", False)):
        (folder / "memfit.yaml").unlink(missing_ok=True)
        assert memfit("gate", "init", "./model", "--device", device).code == 0
        assert ("\n      basis: bound" in (folder / "memfit.yaml").read_text()) is accepts
        assert memfit("gate", "--update").code == 0
        assert memfit("gate").code == 0


def test_a_remedy_is_named_only_where_the_whole_target_passes_with_it(
    memfit: Memfit, folder: Path
) -> None:
    """Fewer bits lower the peak; a context that no setting reaches stays broken."""
    keys: dict[str, Any] = {"working_set": "4GB", "workload": {"prompt_tokens": 4096}}
    alone = ask(memfit, folder, {"peak": "70%"}, **keys)[1]["checks"][0]
    assert "quantize" in {remedy["setting"] for remedy in alone["remedies"]}
    limits: Any = {"peak": "70%", "context": 40960}
    both = ask(memfit, folder, limits, **keys)[1]["checks"]
    assert [check["passed"] for check in both] == [False, False]
    for check in both:
        for remedy in check["remedies"]:
            setting, value = remedy["setting"], remedy["value"]
            assert _with(memfit, folder, limits, keys, setting, value) == 0


def test_a_first_token_passes_at_its_limit_and_not_a_millisecond_below(
    memfit: Memfit, folder: Path
) -> None:
    run = memfit("estimate", "model", "--device", "m4-max-64", "--prompt-tokens", "4096", "--json")
    most = run.json["first_tokens"][0]["range_seconds"][1]
    known = {"device": "m4-max-64"}
    milliseconds = ceil(1000 * most)
    assert ask(memfit, folder, {"first_token": f"{milliseconds + 1}ms"}, **known)[0] == 0
    assert ask(memfit, folder, {"first_token": f"{milliseconds}ms"}, **known)[0] == 0
    code, report = ask(memfit, folder, {"first_token": f"{milliseconds - 1}ms"}, **known)
    (check,) = report["checks"]
    assert (code, check["figure"], check["excess"]) == (1, milliseconds, 1)
    assert [each["setting"] for each in check["remedies"]] == ["context"]
    for wrong in (20, "20", "20 hours", "0s"):
        write_policy(folder, it=target({"first_token": wrong}, **known))
        assert memfit("gate").code == 2


def test_a_first_token_of_an_unknown_chip_does_not_pass(memfit: Memfit, folder: Path) -> None:
    code, report = ask(memfit, folder, {"first_token": "60min"}, memory="16GB")
    assert (code, report["checks"][0]["figure"]) == (1, None)
