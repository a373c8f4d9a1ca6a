"""``memfit estimate`` of GGUF files: llama.cpp's rules, the same answer otherwise."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Part
from memfit.estimators.weights.ggml import part_of
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, tensor, write
from tests.models import QWEN3_4B, write_config

MODELS = recorded()


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A GGUF file of Qwen3-4B's widths and four layers."""
    entry = MODELS["qwen3"]
    return write(tmp_path / "qwen3.gguf", entry.metadata, entry.tensors)


@pytest.mark.parametrize("name", MODELS)
def test_every_recorded_model_is_estimated(memfit: Memfit, tmp_path: Path, name: str) -> None:
    entry = MODELS[name]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    run = memfit("estimate", path, "--context", "4k", "--json", "--explain", "--memory", "64GB")
    assert run.code in (0, 1), run.err
    data = run.json
    assert data["model"]["source"] == "gguf"
    assert data["model"]["model_type"] == name
    assert data["runtime"] == {"name": "llama.cpp", "version": "b11549"}
    parts = data["components"]
    assert parts["weights"]["basis"] == "exact"
    assert parts["weights"]["bytes"] == sum(t.nbytes for t in entry.tensors)
    assert sum(parts["weights"]["by_part"].values()) == parts["weights"]["bytes"]
    assert parts["workspace"]["error_percent"] == 10
    assert parts["workspace"]["basis"] == "derived"
    assert parts["kv"]["basis"] == parts["ssm"]["basis"] == "exact"
    first = entry.runs[0]
    mebibytes = sum(keys + values for _, _, keys, values in first.kv)
    assert parts["kv"]["bytes"] == pytest.approx(mebibytes * 2**20, abs=2**16)
    assert data["peak_bytes"] == (
        parts["weights"]["resident_bytes"]
        + parts["kv"]["bytes"]
        + parts["ssm"]["bytes"]
        + parts["workspace"]["bytes"]
    )


def test_the_table_states_the_assumptions(memfit: Memfit, qwen: Path) -> None:
    run = memfit("estimate", qwen, "--context", "1000", "-v")
    assert run.code == 0
    text = " ".join(run.out.split())
    assert "KV cache, 1024 tokens" in text
    assert "Workspace" in text
    assert "derived ±10 %" in text
    assert "flash attention is on" in text
    assert "within 10 % of those of llama.cpp b11549; other builds were not compared" in text
    assert "MLX" not in text


def test_the_error_of_small_micro_batches_is_that_of_others(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    errors = {
        step: memfit(path, "-ub", step, "--json").json["components"]["workspace"]["error_percent"]
        for step in ("64", "256")
    }
    assert errors == {"64": 10, "256": 10}


def test_prediction_layers_are_not_loaded(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["glm4moe"]
    path = write(tmp_path / "glm.gguf", entry.metadata, entry.tensors)
    data = memfit("estimate", path, "--json").json
    ahead = sum(t.nbytes for t in entry.tensors if t.name.startswith("blk.3."))
    weights = data["components"]["weights"]
    assert ahead > 0
    assert weights["bytes"] - weights["loaded_bytes"] == ahead
    notes = {note["code"]: note["message"] for note in data["notes"]}
    assert "llama.cpp" in notes["not-loaded"]
    assert "--mtp-tokens" in notes["prediction-layers"]
    assert "recurrent states" not in notes["prediction-layers"]


def test_a_note_says_what_states_drafting_adds(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen35"]
    ahead = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 9}
    block = [tensor("blk.8.nextn.eh_proj.weight", (4096, 2048))]
    path = write(tmp_path / "m.gguf", {**entry.metadata, **ahead}, [*entry.tensors, *block])
    data = memfit("estimate", path, "-c", "8k", "--json").json
    (text,) = (n["message"] for n in data["notes"] if n["code"] == "prediction-layers")
    # Build b11549 with n_rs_seq 2: R and S are 1.69 and 36.00 MiB, with 0 0.56 and 12.00.
    assert data["components"]["ssm"]["bytes"] == pytest.approx(12.56 * 2**20, abs=2**14)
    assert "for each drafted token the recurrent states again, 13.2 MB" in text


def test_kv_bits_select_llama_cpps_block_types(memfit: Memfit, qwen: Path) -> None:
    def kv_bytes(*options: str) -> int:
        return int(memfit("estimate", qwen, "--json", *options).json["components"]["kv"]["bytes"])

    plain = kv_bytes()
    assert kv_bytes("--kv-bits", "8") == plain * 34 // 64 == kv_bytes("--cache-type", "q8_0")
    assert kv_bytes("--kv-bits", "4") == plain * 18 // 64 == kv_bytes("--cache-type", "q4_0,q4_0")
    assert kv_bytes("--cache-type", "q8_0,f16") == (plain * 34 // 64 + plain) // 2
    assert kv_bytes("--cache-type", "f32") == 2 * plain
    assert kv_bytes("-ctk", "q8_0") == kv_bytes("--cache-type", "q8_0,f16")
    assert kv_bytes("-ctk", "q8_0", "-ctv", "q8_0") == kv_bytes("--cache-type", "q8_0")


@pytest.mark.parametrize(
    ("options", "code", "fault"),
    [
        (["--runtime", "mlx-lm"], 3, "mlx-lm loads no GGUF file"),
        (["--kv-bits", "6"], 3, "KV bits 6: llama.cpp keeps its cache in 16, 8, 5 or 4 bits"),
        (["--max-kv-size", "64"], 3, "no rotating cache"),
        (["--cache-type", "q3_k"], 2, "--cache-type: 'q3_k': llama.cpp keeps a cache in f32"),
        (["--cache-type", "f16,f16,f16"], 2, "--cache-type: 'f16,f16,f16'"),
        (["-ctk", "f16,q8_0"], 2, "--cache-type-k: 'f16,q8_0': give one type"),
        (["--quantize", "4"], 3, "conversions of a GGUF file are not described"),
    ],
)
def test_an_option_llama_cpp_lacks_gives_a_one_line_error(
    memfit: Memfit, qwen: Path, options: list[str], code: int, fault: str
) -> None:
    run = memfit("estimate", qwen, *options)
    assert run.code == code
    assert fault in run.err
    assert run.err.count("\n") == 1


def test_settings_of_llama_cpp_are_not_those_of_another_runtime(
    memfit: Memfit, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", QWEN3_4B)
    for option in (["--cache-type", "q8_0"], ["--no-flash-attn"]):
        run = memfit("estimate", folder, *option)
        assert (run.code, run.err.count("\n")) == (2, 1)
        assert f"{option[0]}: mlx-lm has no such setting" in run.err


def test_a_plain_config_takes_the_settings_of_llama_cpp(memfit: Memfit, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", QWEN3_4B)

    def components(*options: str) -> dict[str, dict[str, int]]:
        run = memfit("estimate", folder, "--runtime", "llama.cpp", "--json", *options)
        found: dict[str, dict[str, int]] = run.json["components"]
        return found

    plain = components()
    quantised = components("--cache-type", "q8_0,f16")
    assert quantised["kv"]["bytes"] == (plain["kv"]["bytes"] * 34 // 64 + plain["kv"]["bytes"]) // 2
    assert components("--kv-bits", "8")["kv"]["bytes"] == plain["kv"]["bytes"] * 34 // 64
    spread = components("--no-flash-attn")
    assert spread["workspace"]["bytes"] > plain["workspace"]["bytes"]
    run = memfit(
        *("estimate", folder, "--runtime", "llama.cpp", "--no-flash-attn", "--cache-type", "q8_0")
    )
    assert (run.code, "only with flash attention" in run.err) == (3, True)


def test_layers_are_divided_between_the_gpu_and_the_host(memfit: Memfit, qwen: Path) -> None:
    def shares(*options: str) -> list[dict[str, int]]:
        run = memfit("estimate", qwen, "--context", "4k", "--json", *options)
        found: list[dict[str, int]] = run.json.get("memories", [])
        return found

    assert shares() == []
    gpu, host = shares("--gpu-layers", "3")
    whole = memfit("estimate", qwen, "--context", "4k", "--json").json["components"]
    assert (gpu["layers"], host["layers"]) == (2, 2)
    assert gpu["cache_bytes"] == host["cache_bytes"] == whole["kv"]["bytes"] // 2
    # The head is the embedding's matrix, which is then in both.
    tied = 151936 * 2560 * 2
    assert gpu["weights_bytes"] + host["weights_bytes"] == whole["weights"]["bytes"] + tied
    data = memfit("estimate", qwen, "--context", "4k", "--json", "--gpu-layers", "3").json
    assert data["peak_bytes"] == gpu["total_bytes"]
    assert data["components"]["weights"]["resident_bytes"] == gpu["weights_bytes"]
    nothing, everything = shares("-ngl", "0")
    assert nothing["weights_bytes"] == nothing["cache_bytes"] == 0
    assert everything["weights_bytes"] == whole["weights"]["bytes"]
    assert shares("--gpu-layers", "all", "--device", "rtx-3090") == shares("--device", "rtx-3090")


def test_auto_has_the_most_layers_on_the_gpu_that_fit(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3moe"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "--device", "rtx-3070", "--json", "--context")

    def shares(context: str, layers: str) -> tuple[dict[str, int], int]:
        data = memfit(*where, context, "--gpu-layers", layers).json
        return data["memories"][0], data["device"]["working_set_bytes"]

    assert shares("4k", "auto") == shares("4k", "4")
    # 5 GB of cache in three layers: one of them, and the head, are on the GPU.
    chosen, budget = shares("800k", "auto")
    assert (chosen["layers"], shares("800k", "2")[0]) == (1, chosen)
    assert chosen["total_bytes"] <= budget - 2**30 < shares("800k", "3")[0]["total_bytes"]
    # Without a device there is nothing to fit.
    fitted = memfit("estimate", path, "--gpu-layers", "auto", "--json").json
    assert fitted["peak_bytes"] == memfit("estimate", path, "--json").json["peak_bytes"]
    run = memfit("estimate", path, "--gpu-layers", "some")
    assert (run.code, "--gpu-layers: 'some': expected a number of layers" in run.err) == (2, True)


def test_a_mac_has_one_memory_for_both_sides(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3moe"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "--memory", "8GB", "--context", "500k", "--json")
    data = memfit(*where, "--gpu-layers", "1").json
    assert data["verdict"] == "exceeds"
    assert "memory" in data["exceeded"]
    # Half of the cache would fit.
    assert "kv_bits" in data["actions"][0]["settings"]
    assert any("GPU and host share" in note["message"] for note in data["notes"])
    assert memfit(*where).json["verdict"] == "exceeds"


def test_experts_can_be_on_the_host(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3moe"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    asked = ("estimate", path, "--context", "4k", "--device", "rtx-3090", "--json")
    gpu, host = memfit(*asked, "--n-cpu-moe", "2").json["memories"]
    all_gpu, all_host = memfit(*asked).json["memories"]
    moved = sum(
        t.nbytes
        for t in entry.tensors
        if "_exps." in t.name and t.name.startswith(("blk.0.", "blk.1."))
    )
    assert all_gpu["weights_bytes"] - gpu["weights_bytes"] == moved
    assert host["weights_bytes"] - all_host["weights_bytes"] == moved
    assert gpu["layers"] == all_gpu["layers"] == 3
    text = memfit("estimate", path, "--n-cpu-moe", "2", "--explain").out
    assert "layers 0 to 1: caches on the GPU, weights of each" in text


def test_the_batch_limits_the_micro_batch(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3moe"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "-c", "16384", "-ub", "4096", "--device", "rtx-4090", "--json")
    whole = next(run for run in entry.runs if run.batch == 4096)
    given = memfit(*where, "-b", "4096", "--all-logits").json
    assert given["memories"][0]["compute_bytes"] == pytest.approx(whole.gpu * 2**20, abs=2**16)
    assert "-b 4096 -ub 4096" in given["actions"][0]["commands"][0]
    assert "micro-batch" not in {note["code"] for note in given["notes"]}
    default = memfit(*where, "--all-logits").json
    assert default["memories"][0]["compute_bytes"] < whole.gpu * 2**19 + 2**20
    (note,) = (note for note in default["notes"] if note["code"] == "micro-batch")
    assert "2048 tokens; for a micro-batch of 4096 give -b 4096 too" in note["message"]


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen35"])
def test_sequences_share_a_cache_or_have_their_own(
    memfit: Memfit, tmp_path: Path, name: str
) -> None:
    entry = MODELS[name]
    path = write(tmp_path / "m.gguf", entry.metadata, entry.tensors)
    runs = [run for run in entry.runs if run.unified or run.swa_full]
    assert len(runs) == 4
    for run in runs:
        options = ["--kv-unified"] * run.unified + ["--swa-full"] * run.swa_full
        where = ("estimate", path, "-np", "4", "-c", str(run.context), "--memory", "64GB")
        flash = "--flash-attn" if run.flash else "--no-flash-attn"
        data = memfit(*where, flash, *options, "--json").json
        expected = sum(keys + values for *_, keys, values in run.kv)
        assert data["components"]["kv"]["bytes"] == pytest.approx(expected * 2**20, abs=2**15)
        assert data["components"]["ssm"]["bytes"] == pytest.approx(
            sum(run.states) * 2**20, abs=2**15
        )
        printed = data["actions"][0]["commands"][0].split()
        assert [option for option in printed if option in ("--kv-unified", "--swa-full")] == options


# Build b11549 with n_outputs_max 1, as llama-server sets it; a library leaves it 0.
@pytest.mark.parametrize(("options", "all_logits"), [((), False), (("--all-logits",), True)])
def test_the_logits_are_those_of_llama_server_unless_all_are_wanted(
    memfit: Memfit, tmp_path: Path, options: tuple[str, ...], all_logits: bool
) -> None:
    entry = MODELS["qwen35"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "-c", "8192", "--device", "rtx-4090", "--json")
    gpu = memfit(*where, *options).json["memories"][0]
    (server,) = (
        run
        for run in entry.runs
        if run.outputs and run.flash and (run.context, run.gpu_layers) == (8192, 9)
    )
    if all_logits:
        assert gpu["compute_bytes"] > 512 * 248320 * 4
    else:
        assert gpu["compute_bytes"] == pytest.approx(server.gpu * 2**20, rel=0.02)


def test_a_draft_model_of_another_runtime_is_rejected(
    memfit: Memfit, qwen: Path, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", QWEN3_4B)
    run = memfit("estimate", qwen, "--draft", folder)
    assert (run.code, "cannot serve a model that runs on llama.cpp" in run.err) == (3, True)
    assert memfit("estimate", qwen, "--draft", qwen).code == 0


def test_a_draft_model_has_a_context_of_its_own(memfit: Memfit, qwen: Path) -> None:
    def answer(*options: str) -> dict[str, Any]:
        run = memfit("estimate", qwen, "--context", "4k", "--json", *options)
        found: dict[str, Any] = run.json
        return found

    alone = answer()
    draft = answer("--draft", str(qwen))["components"]["draft"]
    assert draft["basis"] == "derived"
    # As the target, which has the logits of three drafted tokens in addition where they count.
    logits = 3 * 151936 * 4
    assert alone["peak_bytes"] <= draft["bytes"] <= alone["peak_bytes"] + logits
    # A draft's context is llama-server's, whatever the target's is.
    whole = answer("--draft", str(qwen), "--all-logits")["components"]["draft"]
    assert whole["bytes"] == alone["peak_bytes"]
    # The options of the target are not those of the draft.
    for option in (["--cache-type", "q8_0"], ["--kv-bits", "4"], ["--gpu-layers", "2"]):
        assert answer("--draft", str(qwen), *option)["components"]["draft"] == draft


def test_a_projector_adds_its_weights(memfit: Memfit, qwen: Path, tmp_path: Path) -> None:
    tensors = (tensor("v.blk.0.attn_q.weight", (1024, 1024)), tensor("mm.0.weight", (1024, 2560)))
    metadata = {"general.architecture": "clip", "general.type": "mmproj"}
    projector = write(tmp_path / "mmproj.gguf", metadata, tensors)
    plain = memfit("estimate", qwen, "--context", "4k", "--json").json
    data = memfit("estimate", qwen, "--context", "4k", "--json", "--mmproj", projector).json
    added = sum(t.nbytes for t in tensors)
    assert data["components"]["weights"]["by_part"]["vision"] == added
    assert data["peak_bytes"] - plain["peak_bytes"] == added
    assert any("what it computes with is not" in n["message"] for n in data["notes"])
    split = memfit(
        "estimate", qwen, "--gpu-layers", "0", "--json", "--mmproj", projector, "--context", "4k"
    ).json["memories"]
    assert split[0]["weights_bytes"] == added
    run = memfit("estimate", qwen, "--mmproj", qwen)
    assert (run.code, "is not a vision projector" in run.err) == (3, True)
    folder = write_config(tmp_path / "model", QWEN3_4B)
    run = memfit("estimate", folder, "--mmproj", projector)
    assert (run.code, "a projector belongs to a GGUF file" in run.err) == (3, True)


def test_models_of_two_runtimes_are_compared_each_under_its_own(
    memfit: Memfit, qwen: Path, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", QWEN3_4B)
    run = memfit("compare", folder, qwen, "--json")
    assert run.code == 0
    models = run.json["models"]
    assert [model["runtime"]["name"] for model in models] == ["mlx-lm", "llama.cpp"]
    for reference, model in zip((folder, qwen), models, strict=True):
        one = memfit("estimate", reference, "--json").json
        needed = one["peak_bytes"] + one["components"]["margin"]["bytes"]
        assert model["needed_bytes"] == needed


def test_models_of_both_runtimes_are_shown_side_by_side_each_with_its_runtime(
    memfit: Memfit, qwen: Path, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", QWEN3_4B)
    shown = memfit("compare", qwen, folder, "--memory", "8GB").out
    written = memfit("compare", qwen, folder, "--memory", "8GB", "--format", "markdown").out
    for text in (shown, written):
        joined = " ".join(text.split())  # a long path wraps
        first, second = (joined.index(name) for name in ("llama.cpp b11549", "mlx-lm 0.32.2"))
        assert first < second < joined.index("prompt tokens, no reply; each under its own runtime")
        assert "prefill step 2048" not in text
    (peak,) = (line for line in shown.splitlines() if line.startswith("Peak"))
    assert peak.endswith("%")  # the difference from the first model
    assert "Runtime" not in shown


def test_an_unknown_architecture_still_has_exact_weights(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3"]
    metadata = {**entry.metadata, "general.architecture": "qwen99"}
    run = memfit("estimate", write(tmp_path / "a.gguf", metadata, entry.tensors))
    total = sum(t.nbytes for t in entry.tensors)
    assert run.code == 3
    assert "'qwen99' is not described" in run.err
    assert f"its weights hold {total} bytes (exact)" in run.err


def test_parts_cover_every_tensor_name_of_the_recorded_models() -> None:
    other = {
        t.name.rpartition("blk.")[2].partition(".")[2]
        for entry in MODELS.values()
        for t in entry.tensors
        if part_of(t.name) is Part.OTHER
    }
    # Per-layer embeddings' projections, AltUp and LAuReL, rope tables and prediction heads.
    known = ("altup_", "laurel_", "inp_gate", "proj.", "nextn.", "rope_", "per_layer_model_proj")
    assert [name for name in other if name and not name.startswith((*known, "weight"))] == []


def test_a_projector_has_a_bound_of_what_its_largest_image_takes(
    memfit: Memfit, qwen: Path, tmp_path: Path
) -> None:
    sizes = {"image_size": 896, "patch_size": 14, "embedding_length": 1152, "block_count": 27}
    widths = {"feed_forward_length": 4304, "attention.head_count": 16}
    metadata = {
        "general.architecture": "clip",
        "clip.projector_type": "gemma3",
        **{f"clip.vision.{key}": value for key, value in (sizes | widths).items()},
    }
    projector = write(tmp_path / "mmproj.gguf", metadata, (tensor("mm.0.weight", (32, 32)),))
    plain = memfit("estimate", qwen, "--context", "4k", "--memory", "32GB", "--json").json
    arguments = ("--context", "4k", "--memory", "32GB", "--json", "--mmproj", projector)
    data = memfit("estimate", qwen, *arguments).json
    work = [each["components"]["workspace"] for each in (plain, data)]
    # 4,096 patches and a class: the feed-forward's two branches, their product and the residual.
    least = 4097 * 4 * (3 * 4304 + 1152)
    assert least < work[1]["bytes"] - work[0]["bytes"] < 2 * least
    assert work[1]["basis"] == "bound"
    assert any("computes its largest image in at most" in n["message"] for n in data["notes"])
    del metadata["clip.vision.patch_size"]
    broken = write(tmp_path / "broken.gguf", metadata, (tensor("mm.0.weight", (32, 32)),))
    run = memfit("estimate", qwen, "--mmproj", broken)
    assert (run.code, run.err.count("\n")) == (2, 1)
