"""Models that nothing describes: what is known, the ways on, and an assumption in their place."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.registry import FAMILIES
from memfit.estimators.checkpoint.kinds import kind_of_config
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_checkpoint, write_config

TENSORS = {
    "model.norm.weight": ("BF16", (2560,)),
    "model.embed_tokens.weight": ("BF16", (1000, 2560)),
}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 256, "num_hidden_layers": 6}
NBYTES = 2 * 2560 + 2 * 1000 * 2560


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A checkpoint of an architecture that nothing describes."""
    return write_checkpoint(tmp_path / "new", {**QWEN3_4B, "model_type": "qwen9"}, TENSORS)


@pytest.mark.parametrize("method", ["auto", "formula"])
def test_an_unknown_architecture_has_exact_weights_and_ways_on(
    memfit: Memfit, unknown: Path, method: str
) -> None:
    run = memfit(unknown, "--memory", "32", "--method", method)
    lines = run.err.splitlines()
    assert (run.code, run.out) == (3, "")
    assert len(lines) <= 4
    assert all(len(line.replace(str(unknown), "")) <= 150 for line in lines)
    assert lines[0].endswith("'qwen9' is not described")
    assert f"weights: {NBYTES} bytes (exact), so at least 5.1 MB" in lines[1]
    assert "of 26.8 GB on Mac with 32 GB" in lines[1]
    assert "missing: KV cache and workspace; ways on: a newer mlx-lm" in lines[-1]
    assert "--as qwen3 (an assumption)" in lines[-1]
    # Where a trace has failed it is no way on.
    assert ("--method trace" in lines[-1]) == (method == "formula")


def test_the_ways_on_are_the_fix_in_json(memfit: Memfit, unknown: Path) -> None:
    run = memfit(unknown, "--json", "--method", "formula")
    assert (run.json["slug"], run.json["exit_code"]) == ("unsupported", 3)
    assert run.json["fix"].startswith("ways on: ")


def test_without_headers_no_weights_are_claimed(memfit: Memfit, tmp_path: Path) -> None:
    config = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen9"})
    run = memfit(config, "--method", "formula")
    assert (run.code, "no headers were read, so that nothing is known" in run.err) == (3, True)


@pytest.mark.exhaustive(daily=True)
def test_an_assumed_type_gives_that_types_figures_marked_on_every_line(
    memfit: Memfit, unknown: Path, tmp_path: Path
) -> None:
    known = write_checkpoint(tmp_path / "known" / "new", QWEN3_4B, TENSORS)
    options = ("--memory", "8GB", "--method", "formula")
    assumed = memfit(unknown, "--as", "qwen3", *options, "--json").json
    real = memfit(known, *options, "--json").json
    assert assumed["peak_bytes"] == real["peak_bytes"]
    assert assumed["model"]["model_type"] == real["model"]["model_type"] == "qwen3"
    assert assumed["model"]["assumed_from"] == "qwen9"
    assert "assumed_from" not in real["model"]
    parts = assumed["components"]
    assert {parts[name]["basis"] for name in ("kv", "ssm", "workspace")} == {"assumed"}
    assert "assumed-type" in {note["code"] for note in assumed["notes"]}
    text = memfit(unknown, "--as", "qwen3", *options, "-v").out
    assert text.startswith("assumed to be qwen3: new, Mac with 8 GB:")
    for line in memfit(known, *options, "-v").out.splitlines():
        figure = line.strip()
        if figure[:1].isdigit() and "bits" in figure[:7]:
            assert f"assumed: {figure.split()[0]} bits" in text


def test_a_comparison_assumes_a_type_only_for_what_is_unknown(
    memfit: Memfit, unknown: Path, tmp_path: Path
) -> None:
    known = write_checkpoint(tmp_path / "known", QWEN3_4B, TENSORS)
    compared = ("compare", "--model", unknown, "--model", known, "--memory", "8GB")
    assert memfit(*compared).code == 3
    first, second = memfit(*compared, "--as", "qwen3", "--json").json["models"]
    assert (first["model"]["assumed_from"], "assumed_from" in second["model"]) == ("qwen9", False)
    assert first["needed_bytes"] == second["needed_bytes"]
    assert "assumed-type" in {note["code"] for note in first["notes"]}
    text = memfit(*compared, "--as", "qwen3").out
    assert "1 assumed: new" in text
    assert "2 known" in text


@pytest.mark.parametrize("plan", ["context", "server"])
def test_a_plan_marks_an_assumed_type_on_every_line(
    memfit: Memfit, unknown: Path, plan: str
) -> None:
    bare = ("plan", plan, unknown, "--memory", "8GB")
    assert memfit(*bare).code == 3
    asked = (*bare, "--as", "qwen3")
    assert "assumed-type" in {note["code"] for note in memfit(*asked, "--json").json["notes"]}
    page = memfit(*asked, "--format", "markdown").out
    lines = [line for line in page.splitlines() if any(map(str.isdigit, line))]
    assert len(lines) > 8
    unmarked = ("#", "mlx_", "| Tokens each")  # a title, a command, the headings of a table
    assert [line for line in lines if "assumed" not in line and not line.startswith(unmarked)] == []


@pytest.mark.parametrize("command", ["fits", "gate", "tune x", "plan train x"])
def test_other_commands_say_where_a_type_can_be_assumed(memfit: Memfit, command: str) -> None:
    run = memfit(*command.split(), "--as", "qwen3")
    assert (run.code, "--as: an architecture is assumed by memfit estimate" in run.err) == (2, True)


def test_keys_that_the_assumed_type_does_not_know_are_named(memfit: Memfit, tmp_path: Path) -> None:
    config = write_config(tmp_path, {**QWEN3_4B, "num_memory_layers": 3})
    asked = (config, "--method", "formula", "--json")
    assert memfit(*asked).code == 3
    notes = memfit(*asked, "--as", "qwen3").json["notes"]
    assert any("num_memory_layers: unknown to qwen3, and ignored" in n["message"] for n in notes)


def test_an_assumed_type_can_be_traced(memfit: Memfit, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    small = {**QWEN3_4B, "model_type": "qwen9", "num_hidden_layers": 1, "vocab_size": 512}
    run = memfit(write_config(tmp_path, small), "--as", "qwen3", "--method", "trace", "--json")
    assert (run.json["method"], run.json["components"]["kv"]["basis"]) == ("trace", "assumed")


def test_a_type_cannot_be_assumed_for_a_gguf_file(memfit: Memfit, tmp_path: Path) -> None:
    from tests.gguf.test_files import LLAMA, WEIGHTS
    from tests.gguf.writing import write

    run = memfit(write(tmp_path / "a.gguf", LLAMA, WEIGHTS), "--as", "qwen3")
    assert (run.code, "a GGUF file says what it is" in run.err) == (3, True)


@pytest.mark.parametrize(
    ("files", "config", "kind"),
    [
        (["model_index.json"], None, "a diffusion pipeline"),
        ([], {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30"}, "diffusion"),
        (["modules.json"], QWEN3_4B, "an embedding model (sentence-transformers)"),
        ([], {"model_type": "bert"}, "an encoder, as embedding models are"),
        ([], {"model_type": "t5"}, "an encoder with a decoder"),
        ([], {"model_type": "whisper"}, "a model of speech or sound"),
        ([], {"model_type": "siglip"}, "a model of images"),
        ([], {"model_type": "modernbert"}, "an encoder, as embedding models are"),
        ([], {"model_type": "qwen3_vl_embedding"}, "an embedding model, or a reranker"),
        ([], {**QWEN3_4B, "architectures": ["Qwen3Model"]}, "an embedding model, or a reranker"),
        ([], {**QWEN3_4B, "architectures": ["Qwen3ForSequenceClassification"]}, "a reranker"),
        ([], {**GEMMA, "use_bidirectional_attention": True}, "an embedding model, or a reranker"),
        ([], {"model_type": "qwen3_tts"}, "a model of speech or sound"),
        ([], {"istftnet": {"upsample_rates": [10, 6]}}, "a model of speech or sound"),
        ([], {"target": "nemo.collections.asr.models.EncDecRNNTBPEModel"}, "a model of speech"),
        ([], {"model_type": "llada"}, "a masked diffusion model"),
    ],
)
def test_a_model_of_another_kind_is_named(
    memfit: Memfit, tmp_path: Path, files: list[str], config: dict[str, Any] | None, kind: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    if config is not None:
        write_config(tmp_path, config)
    run = memfit(tmp_path)
    lines = run.err.splitlines()
    assert (run.code, len(lines)) == (3, 1 if config is None else 3)
    assert kind in lines[0]
    assert "not a language model" in lines[0]
    if config is not None:
        assert lines[2].startswith("memfit: not decided: ")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            {"model_type": "qwen3_5_mtp", "text_config": {"hidden_size": 5120}},
            "a drafter (an MTP head) for a qwen3_5 target, hidden size 5120",
        ),
        (
            {"model_type": "gemma4_assistant", "backbone_hidden_size": 2560},
            "a drafter (an assistant) for a gemma4 target, hidden size 2560",
        ),
        (
            {**QWEN3_4B, "dflash_config": {"mask_token_id": 1}, "num_target_layers": 36},
            "a drafter (DFlash) for a qwen3 target, hidden size 2560, layers 36",
        ),
        (
            {**QWEN3_4B, "architectures": ["LlamaForCausalLMEagle3"]},
            "a drafter (EAGLE) for a qwen3 target",
        ),
        (
            {
                "speculators_model_type": "eagle3",
                "speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
            },
            "a drafter (EAGLE) for Qwen/Qwen3-8B",
        ),
    ],
)
def test_a_drafter_is_named_with_its_target(
    memfit: Memfit, tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    model = write_checkpoint(tmp_path / "head", config, TENSORS)
    for command in ([], ["plan", "server"], ["plan", "train"], ["card"]):
        run = memfit(*command, model, "--memory", "32")
        assert (run.code, what in run.err) == (3, True), command
        assert f"weights: {NBYTES} bytes (exact)" in run.err
    compared = memfit("compare", "--model", model, "--model", model, "--memory", "32", "--json")
    assert compared.code == 3
    assert "a drafter" in compared.out


def test_a_checkpoint_of_mtp_tensors_alone_is_a_drafter(memfit: Memfit, tmp_path: Path) -> None:
    tensors = {"mtp.fc.weight": ("BF16", (2560, 5120))}
    run = memfit(write_checkpoint(tmp_path / "head", QWEN3_4B, tensors))
    assert (run.code, "a drafter" in run.err) == (3, True)


@pytest.mark.parametrize("name", ["Qwen3-Embedding-4B-4bit-DWQ", "qwen3-reranker-4b"])
def test_an_embedding_model_with_a_generators_config_is_known_by_its_name(
    memfit: Memfit, tmp_path: Path, name: str
) -> None:
    model = write_checkpoint(tmp_path / name, QWEN3_4B, TENSORS)
    run = memfit(model)
    assert (run.code, "an embedding model, or a reranker by its name" in run.err) == (3, True)
    assert f"weights: {NBYTES} bytes (exact)" in run.err
    assumed = memfit(model, "--as", "qwen3", "--method", "formula")
    assert assumed.out.startswith("assumed to be qwen3: ")


def test_a_base_class_without_a_head_is_not_sized_as_a_generator(
    memfit: Memfit, tmp_path: Path
) -> None:
    tensors = {"embed_tokens.weight": ("BF16", (1000, 2560))}
    run = memfit(write_checkpoint(tmp_path / "new", QWEN3_4B, tensors))
    assert (run.code, "a base class without a head" in run.err) == (3, True)


def test_attention_in_both_directions_is_refused_for_an_assumed_type_too(
    memfit: Memfit, tmp_path: Path
) -> None:
    model = write_config(tmp_path, {**GEMMA, "use_bidirectional_attention": True})
    assert memfit(model, "--as", "gemma3_text").code == 3


def test_no_class_of_mlx_lm_is_taken_for_another_kind() -> None:
    models = pytest.importorskip("mlx_lm.models")
    classes = {path.stem for path in Path(models.__path__[0]).glob("*.py")}
    assert [name for name in classes | {*FAMILIES} if kind_of_config({"model_type": name})] == []


def test_an_embedding_model_can_be_sized_by_an_assumption(memfit: Memfit, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    run = memfit(write_config(tmp_path, QWEN3_4B), "--as", "qwen3", "--method", "formula")
    assert run.out.startswith("assumed to be qwen3: ")
