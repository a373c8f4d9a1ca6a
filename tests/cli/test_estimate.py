"""`memfit estimate` on checkpoints of real size, compared with published and measured figures."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cli.running import Memfit
from tests.models import (
    QWEN3_4B,
    QWEN3_4B_4BIT,
    QWEN3_NEXT_80B,
    quantised_tensors,
    write_checkpoint,
    write_config,
)
from tests.selection import quick
from tests.sparse import write_safetensors


@pytest.fixture(scope="module")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_lm")
    directory = tmp_path_factory.mktemp("qwen3-4b-4bit")
    return write_checkpoint(directory, QWEN3_4B_4BIT, quantised_tensors(QWEN3_4B, 4))


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_lm")
    directory = tmp_path_factory.mktemp("qwen3-next-4bit")
    config = {**QWEN3_NEXT_80B, "quantization": {"group_size": 64, "bits": 4}}
    return write_checkpoint(directory, config, quantised_tensors(QWEN3_NEXT_80B, 4), shards=9)


def test_qwen3_4b_has_the_measured_bytes(memfit: Memfit, qwen3_4b: Path) -> None:
    weights = memfit("estimate", qwen3_4b, "--json").json["components"]["weights"]
    # nbytes measured, and active memory predicted, by mlx-swift-lm's "Observed deltas".
    assert weights["bytes"] == weights["loaded_bytes"] == 2_262_535_712
    assert weights["resident_bytes"] == 2_264_333_312
    assert weights["basis"] == "exact"
    assert sum(weights["by_part"].values()) == weights["bytes"]


def test_a_config_alone_gives_the_bytes_of_the_headers(
    memfit: Memfit, qwen3_4b: Path, tmp_path: Path
) -> None:
    whole = memfit("estimate", qwen3_4b, "--json").json
    alone = memfit("estimate", write_config(tmp_path, QWEN3_4B_4BIT), "--json").json
    assert alone["components"]["weights"].pop("basis") == "derived"
    assert whole["components"]["weights"].pop("basis") == "exact"
    assert alone["components"] == whole["components"]
    assert alone["model"]["parameters"] == whole["model"]["parameters"] == 4_021_784_576


def test_a_benchmark_run_allocates_2304_tokens(memfit: Memfit, qwen3_4b: Path) -> None:
    run = memfit("estimate", qwen3_4b, "--prompt-tokens", "2048", "--max-tokens", "128", "--json")
    kv = run.json["components"]["kv"]
    assert (kv["bytes"], kv["allocated_tokens"], kv["held_tokens"]) == (339_738_624, 2304, 2176)
    assert kv["bytes_per_token"] == 147_456


def test_qwen3_next_splits_into_experts_and_state_as_measured(
    memfit: Memfit, qwen3_next: Path
) -> None:
    data = memfit("estimate", qwen3_next, "--memory", "32GB", "--json").json
    weights = data["components"]["weights"]
    assert weights["bytes"] == 44_844_060_160
    assert weights["resident_bytes"] == 44_844_092_928
    assert weights["by_part"]["experts"] == 43_486_543_872
    assert data["components"]["ssm"]["bytes"] == 77_266_944
    assert data["model"]["layers"] == {"gated_delta": 36, "full_attention": 12}


def test_the_recommended_context_fits_and_the_next_does_not(memfit: Memfit, qwen3_4b: Path) -> None:
    def answer(*more: str) -> dict[str, object]:
        data: dict[str, object] = memfit(
            "estimate", qwen3_4b, "--memory", "8GB", "--json", *more
        ).json
        return data

    recommended = answer()["recommendation"]
    assert isinstance(recommended, dict)
    context = recommended["context_tokens"]["value"]
    assert 0 < context < 40960
    assert context % 256 == 0
    assert answer("--context", str(context))["verdict"] == "fits"
    assert answer("--context", str(context + 256))["verdict"] != "fits"


def test_the_hub_layout_of_a_model_loads_to_the_same_bytes(memfit: Memfit, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from tests.oracle import Oracle

    shapes = {n: ("BF16", v.shape) for n, v in Oracle(QWEN3_4B).tensors().items()}
    # Published checkpoints of tied models often repeat the head; mlx-lm drops it.
    shapes["lm_head.weight"] = ("BF16", (151669, 2560))
    weights = memfit("estimate", write_checkpoint(tmp_path, QWEN3_4B, shapes), "--json").json[
        "components"
    ]["weights"]
    assert weights["loaded_bytes"] == 8_043_569_152
    assert weights["bytes"] == 8_043_569_152 + 151669 * 2560 * 2
    assert weights["basis"] == "exact"


def test_quantize_gives_the_figures_of_a_conversion(memfit: Memfit, tmp_path: Path) -> None:
    config = write_config(tmp_path, QWEN3_4B)
    converted = memfit("estimate", config, "--quantize", "4", "--json").json
    assert converted["components"]["weights"]["bytes"] == 2_262_535_712
    assert converted["model"]["bits_per_weight"] == 4.501


def test_pytorch_weights_are_bounded_by_their_file_sizes(memfit: Memfit, tmp_path: Path) -> None:
    write_config(tmp_path, QWEN3_4B)
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        file.truncate(8_100_000_000)
    weights = memfit("estimate", tmp_path, "--json").json["components"]["weights"]
    assert (weights["bytes"], weights["basis"]) == (8_100_000_000, "bound")


@pytest.mark.parametrize("quantize", [(), ("--quantize", "4")], ids=["as it is", "converted"])
@pytest.mark.parametrize(
    "command",
    quick(
        ["estimate", "plan server", "plan train --num-layers 2", "plan ranks"],
        ("estimate", "plan ranks"),
    ),
)
def test_no_command_names_a_checkpoint_that_mlx_lm_cannot_load(
    memfit: Memfit, tmp_path: Path, command: str, quantize: tuple[str, ...]
) -> None:
    small = {**QWEN3_4B, "num_hidden_layers": 2}
    plain = write_config(tmp_path / "plain", small)
    block = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    packed = write_config(tmp_path / "gptq", {**small, "quantization_config": block})
    asked = (*command.split(), "--device", "m4-max-128", *quantize)
    # Commands name a model of the directory, or what is converted from it.
    named = f"--model {tmp_path}/", "--hf-path"
    assert any(each in memfit(*asked, plain, "--json").out for each in named)
    assert not any(each in memfit(*asked, packed, "--json").out for each in named)
    assert "No flags" not in memfit(*asked, packed).out


def test_an_adapter_is_added_to_the_weights(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", QWEN3_4B)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"num_layers": 1}))
    path = "model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_a": ("F32", (2560, 8)), f"{path}.lora_b": ("F32", (8, 4096))}
    write_safetensors(adapter / "adapters.safetensors", tensors)
    plain = memfit("estimate", model, "--json").json["components"]["weights"]
    added = memfit("estimate", model, "--adapter", adapter, "--json").json["components"]["weights"]
    assert added["bytes"] - plain["bytes"] == (2560 + 4096) * 8 * 4


def test_a_draft_model_adds_weights_caches_and_its_part_of_a_step(
    memfit: Memfit, qwen3_4b: Path, tmp_path: Path
) -> None:
    alone = memfit("estimate", qwen3_4b, "--json").json
    both = memfit("estimate", qwen3_4b, "--draft", qwen3_4b, "--json").json
    added = both["components"]["draft"]
    assert added["basis"] == "derived"
    assert both["peak_bytes"] == alone["peak_bytes"] + added["bytes"]
    weights = alone["components"]["weights"]["resident_bytes"]
    # Both caches are there, and the chunks of one model run after those of the other.
    assert added["bytes"] - weights - alone["components"]["kv"]["bytes"] < 2**20
    draft = write_config(tmp_path / "draft", QWEN3_4B)
    packed = memfit("estimate", draft, "--quantize", "4", "--json").json["components"]["weights"]
    quantised = memfit(
        *("estimate", qwen3_4b, "--draft", draft, "--draft-quantize", "4", "--json")
    ).json["components"]["draft"]
    assert 0 < quantised["bytes"] - packed["resident_bytes"] < added["bytes"] - weights + 2**20


def test_a_draft_that_mlx_lm_rejects_is_not_sized(memfit: Memfit, qwen3_4b: Path) -> None:
    hybrid = Path(__file__).parents[2] / "sample_configs" / "qwen3-next-80b-a3b-4bit.yaml"
    run = memfit("estimate", hybrid, "--draft", qwen3_4b)
    assert (run.code, run.err.count("\n")) == (3, 1)
    assert "qwen3_next: mlx-lm rejects a draft model for it" in run.err
    run = memfit("estimate", qwen3_4b, "--draft", qwen3_4b, "--batch", "2")
    assert "one sequence" in run.err
    run = memfit("estimate", qwen3_4b, "--draft", qwen3_4b, "--max-kv-size", "512")
    assert "ignores max_kv_size" in run.err
    run = memfit("estimate", qwen3_4b, "--draft-quantize", "4")
    assert (run.code, run.err) == (2, "memfit: --draft-quantize needs --draft MODEL\n")


def test_commands_run_the_draft_model_too(memfit: Memfit, qwen3_4b: Path, tmp_path: Path) -> None:
    draft = write_config(tmp_path / "draft", QWEN3_4B)
    options = ("--draft", draft, "--draft-quantize", "4", "--num-draft-tokens", "5")
    run = memfit("estimate", qwen3_4b, *options, "--device", "m4-max-64", "--json")
    commands = [command for action in run.json["actions"] for command in action["commands"]]
    assert any("-q --q-bits 4" in command for command in commands)
    served = [command for command in commands if command.startswith("mlx_lm.server")]
    assert served
    assert all(f"--draft-model {draft.name}-4bit --num-draft-tokens 5" in c for c in served)


def test_yaml_and_json_have_the_same_content(memfit: Memfit, qwen3_4b: Path) -> None:
    as_json = memfit("estimate", qwen3_4b, "--json", "--explain", "--plot").json
    as_yaml = memfit("estimate", qwen3_4b, "--format", "yaml", "--explain", "--plot").out
    assert yaml.safe_load(as_yaml) == as_json
    assert as_json["curve"][-1]["context_tokens"] == 40960
    assert as_json["explanation"]


def test_a_piped_table_is_plain_and_numbers_are_never_cut(
    memfit: Memfit, qwen3_4b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("100", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        out = memfit("estimate", qwen3_4b, "--device", "m4-pro-24", "--plot").out
        assert "\x1b" not in out
        assert "fits (3.8 GB of 19.0 GB, 20 %)" in " ".join(out.split())
        assert "peak 3.7 GB (3.4 to 3.9)" in " ".join(out.split())
        assert "working set" in out


def test_the_units_option_changes_every_size(memfit: Memfit, qwen3_4b: Path) -> None:
    arguments = ("--device", "m4-pro-24", "--units", "gib", "--breakdown")
    out = memfit("estimate", qwen3_4b, *arguments).out
    assert "2.2 GiB" in out
    assert " GB" not in out


def test_output_goes_to_a_file_and_nothing_to_the_screen(
    memfit: Memfit, qwen3_4b: Path, tmp_path: Path
) -> None:
    target = tmp_path / "estimate.json"
    run = memfit("estimate", qwen3_4b, "--json", "-o", target)
    assert (run.code, run.out) == (0, "")
    assert json.loads(target.read_text())["schema"] == "memfit.estimate/2"
    assert [path.name for path in tmp_path.iterdir()] == ["estimate.json"]


def test_without_a_model_the_embedded_sample_is_estimated(memfit: Memfit) -> None:
    data = memfit("estimate", "--json").json
    assert data["model"]["source"] == "sample"
    assert data["components"]["weights"]["bytes"] == 2_262_920_192


def test_explain_puts_the_numbers_into_every_formula(memfit: Memfit, qwen3_4b: Path) -> None:
    out = memfit(
        "estimate", qwen3_4b, "--explain", "--prompt-tokens", "2048", "--max-tokens", "128"
    ).out
    line = "36 x 8 heads x (128 + 128) x 2 bytes x 2304 tokens allocated (2176 held) x batch 1"
    assert line in out
    assert "= 339738624 bytes" in out
    assert "bits per weight = 4 + 2 x 16 / 64 = 4.5, unless" in out


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--kv-bits", "4", "--quantized-kv-start", "0"),
        ("--draft", "DRAFT", "--margin", "1", "--max-tokens", "600", "--prompt-tokens", "1"),
        ("--batch", "3", "--max-kv-size", "1000"),
    ],
    ids=str,
)
def test_every_explained_sum_and_difference_is_correct(
    memfit: Memfit, qwen3_4b: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    draft = write_config(tmp_path, QWEN3_4B)
    given = [str(draft) if option == "DRAFT" else option for option in options]
    data = memfit("estimate", qwen3_4b, "--explain", "--json", *given).json
    sums = [
        line.replace(",", "").split(" = ")
        for line in data["explanation"]
        if line.startswith(("weights", "need", "workspace", "prefill", "decode"))
    ]
    assert len(sums) == 4
    for *_, terms, total in sums:
        subtracted = " - " in terms
        numbers = [int(number) for number in re.findall(r"[a-z] (\d+)", terms)]
        expected = 2 * numbers[0] - sum(numbers) if subtracted else sum(numbers)
        assert expected == int(total.removesuffix(" bytes")), terms
