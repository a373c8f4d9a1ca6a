"""`memfit gate` as a whole: exit codes, targets, bad input, the first policy, and its speed."""

from pathlib import Path

import pytest
import yaml

from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.checkpoint.manifest import Checkpoint
from tests.cli.gating import target, write_policy, write_quantised
from tests.cli.running import Memfit, validated
from tests.cli.test_bad_input import assert_one_line
from tests.models import QWEN3_4B, QWEN3_NEXT_80B, sample_config, write_config

PEAK = {"peak": "90%"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", QWEN3_4B)
    write_config(tmp_path / "unknown", {**QWEN3_4B, "model_type": "qwen99"})
    return tmp_path


# docs/decisions.md, 21: it cannot be a name on the Hub.
def test_a_sample_is_taken_by_its_name_and_never_for_a_missing_path(
    memfit: Memfit, folder: Path
) -> None:
    gone = target(PEAK, path="qwen3-0.6b")
    write_policy(folder, named=target(PEAK, model="qwen3-0.6b"), gone=gone)
    named, missing = memfit("gate", "--format", "json").json["targets"]
    asked = ("--device", "m4-pro-24", "--prompt-tokens", "4096", "--max-tokens", "256")
    estimate = memfit("estimate", "qwen3-0.6b", *asked, "--json").json
    assert named["figures"]["peak_bytes"] == estimate["peak_bytes"]
    assert (missing["status"], "no such path" in missing["message"]) == ("invalid", True)


def test_all_targets_are_evaluated_even_if_one_fails(memfit: Memfit, folder: Path) -> None:
    write_policy(
        folder,
        good=target(PEAK),
        broken=target({"peak": "1GB"}),
        gone=target(PEAK, model="./gone"),
        unknown=target(PEAK, model="unknown"),
    )
    run = memfit("gate", "--format", "json")
    assert [report["status"] for report in run.json["targets"]] == [
        "passed",
        "broken",
        "invalid",
        "undecided",
    ]
    assert (run.code, run.json["verdict"]) == (1, "broken")


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("good",), 0),
        (("broken", "gone", "unknown"), 1),
        (("gone", "unknown", "good"), 2),
        (("unknown", "good"), 3),
    ],
)
def test_the_exit_code_is_that_of_the_worst_target(
    memfit: Memfit, folder: Path, names: tuple[str, ...], code: int
) -> None:
    write_policy(
        folder,
        good=target(PEAK),
        broken=target({"peak": "1GB"}),
        gone=target(PEAK, model="./gone"),
        unknown=target(PEAK, model="unknown"),
    )
    options = [word for name in names for word in ("--target", name)]
    run = memfit("gate", "--format", "json", *options)
    assert run.code == code
    assert {report["name"] for report in run.json["targets"]} == set(names)


def test_an_unknown_structure_is_not_decided_even_by_bounds(memfit: Memfit, folder: Path) -> None:
    write_policy(folder, it=target(PEAK, model="unknown"))
    for option in ((), ("--allow-bounds",)):
        run = memfit("gate", "--format", "json", *option)
        assert run.code == 3
        assert "qwen99" in run.json["targets"][0]["message"]


def test_a_runtime_that_cannot_run_the_workload_is_not_decided(
    memfit: Memfit, folder: Path
) -> None:
    write_config(folder / "model", {**QWEN3_4B, "model_type": "gemma2"})
    work = {"context": "8k", "kv_bits": 8}
    write_policy(folder, it=target(PEAK, workload=work))
    assert memfit("gate").code == 3


def test_a_missing_policy_is_an_error(memfit: Memfit, folder: Path) -> None:
    assert_one_line(memfit("gate"), 2, "memfit.yaml", "no such file", "memfit gate init MODEL")
    assert_one_line(memfit("gate", "ini"), 2, "ini", "check, init", "both OLD and NEW")


def test_an_unknown_target_is_an_error(memfit: Memfit, folder: Path) -> None:
    write_policy(folder, chat=target(PEAK), code=target(PEAK))
    assert_one_line(memfit("gate", "--target", "chta"), 2, "chta", "chat, code")


def test_every_mistake_in_a_policy_is_a_line_with_its_position(
    memfit: Memfit, folder: Path
) -> None:
    (folder / "memfit.yaml").write_text("schema: memfit.policy/1\ntargets:\n  a: {}\n  b: 3\n")
    run = memfit("gate")
    assert (run.code, run.out) == (2, "")
    lines = run.err.splitlines()
    assert len(lines) >= 6
    assert all(line.startswith("memfit: memfit.yaml:") for line in lines)
    assert any(line.startswith("memfit: memfit.yaml:4: targets.b: ") for line in lines)


def test_a_target_without_a_model_needs_old_and_new(memfit: Memfit, folder: Path) -> None:
    keys = {key: value for key, value in target(PEAK).items() if key != "model"}
    write_policy(folder, chat=keys)
    assert_one_line(memfit("gate"), 2, "memfit.yaml:4: targets.chat: name a model")
    assert memfit("gate", "model", "model").code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("old",), "OLD and NEW"),
        (("old", "new", "--update"), "--update"),
        (("--output", "junit"), "FORMAT=FILE"),
        (("--output", "csv=x"), "junit"),
        (("--output", "json=x", "--output", "junit=x"), "twice"),
        (("--output", "json=nowhere/x"), "nowhere/x"),
        (("--policy", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_bad_options_are_reported(
    memfit: Memfit, folder: Path, arguments: tuple[str, ...], word: str
) -> None:
    write_policy(folder, chat=target(PEAK))
    assert_one_line(memfit("gate", *arguments), 2, word)


def test_models_are_found_relative_to_the_policy(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy(folder, chat=target(PEAK))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert memfit("gate", "--policy", policy).code == 0
    assert memfit("gate", "--policy", policy, "--update").code == 0
    assert (folder / "memfit.lock.json").exists()


def test_init_writes_a_policy_that_passes_once_it_has_a_baseline(
    memfit: Memfit, folder: Path
) -> None:
    run = memfit("gate", "init", "model", "--device", "m4-pro-24", "--device", "m4-max-64")
    assert (run.code, run.out) == (0, "")
    text = (folder / "memfit.yaml").read_text()
    assert validated(yaml.safe_load(text))
    assert text.count("#") > 10
    assert 'path: "./model"' in text
    assert memfit("gate").code == 2
    assert memfit("gate", "--update").code == 0
    assert memfit("gate").code == 0


def test_init_names_a_model_of_the_index_so_that_the_gate_finds_it(
    memfit: Memfit, folder: Path
) -> None:
    assert memfit("gate", "init", "qwen3:8b", "--memory", "32GB").code == 0
    assert 'model: "index:Qwen/Qwen3-8B"' in (folder / "memfit.yaml").read_text()
    assert memfit("gate", "--update").code == 0


def test_init_never_overwrites_a_policy(memfit: Memfit, folder: Path) -> None:
    (folder / "memfit.yaml").write_text("mine")
    assert_one_line(memfit("gate", "init", "model", "--device", "m1-8"), 2, "memfit.yaml")
    assert (folder / "memfit.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("./gone", "--device", "m1-8"), "gone"), (("model", "--device", "m0-8"), "m0-8")],
)
def test_init_writes_nothing_after_a_mistake(
    memfit: Memfit, folder: Path, arguments: tuple[str, ...], word: str
) -> None:
    assert_one_line(memfit("gate", "init", *arguments), 2, word)
    assert not (folder / "memfit.yaml").exists()


def test_a_model_name_that_yaml_would_misread_is_quoted(memfit: Memfit, folder: Path) -> None:
    name = 'a: "#x'
    write_config(folder / name, QWEN3_4B)
    assert memfit("gate", "init", f"./{name}", "--device", "m4-max-64").code == 0
    assert memfit("gate", "--update").code == 0


@pytest.mark.exhaustive
def test_twenty_targets_on_five_models_read_each_checkpoint_once(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    models = {
        "a": QWEN3_4B,
        "b": sample_config("qwen3-8b-4bit"),
        "c": sample_config("qwen3-30b-a3b-4bit"),
        "d": QWEN3_NEXT_80B,
        "e": sample_config("llama-3.1-8b"),
    }
    for name, config in models.items():
        write_quantised(folder / name, config)
    devices = ("m4-pro-24", "m4-max-64", "m1-8", "m3-ultra-512")
    limits = {"peak": "90%", "context": "8k"}
    policy = {f"{m}_{d}": target(limits, model=m, device=d) for m in models for d in devices}
    write_policy(folder, **policy)
    opened: list[str] = []

    def noted(path: Path) -> Checkpoint:
        opened.append(path.name)
        return read_directory(path)

    monkeypatch.setattr("memfit.estimators.checkpoint.opening.read_directory", noted)
    run = memfit("gate", "--format", "json")
    assert len(run.json["targets"]) == 20
    assert sorted(opened) == sorted(models)


def test_a_workload_beyond_the_models_context_does_not_pass(memfit: Memfit, folder: Path) -> None:
    most = int(str(QWEN3_4B["max_position_embeddings"]))
    work = {"prompt_tokens": most, "max_tokens": 1}
    one = target({"peak": "100%"}, workload=work)
    write_policy(folder, chat=one)
    run = memfit("gate", "--format", "json")
    (check,) = [c for c in run.json["targets"][0]["checks"] if not c["passed"]]
    assert (run.code, check["limit"], check["excess"]) == (1, "model_context", 1)
    assert "allow_beyond_context" in memfit("gate").out
    write_policy(folder, chat={**one, "allow_beyond_context": True})
    run = memfit("gate", "--format", "json")
    assert run.code == 0
    assert "beyond-context" in [note["code"] for note in run.json["targets"][0]["notes"]]
    write_policy(folder, chat={**one, "workload": {**work, "prompt_tokens": most - 1}})
    assert memfit("gate").code == 0


@pytest.mark.parametrize("keys", [{"hub": "a/b", "path": "model"}, {"model": "a", "path": "model"}])
def test_a_target_has_one_model(memfit: Memfit, folder: Path, keys: dict[str, str]) -> None:
    write_policy(folder, chat={**target({"peak": "90%"}, path="model"), **keys})
    assert_one_line(memfit("gate"), 2, "give one of model, hub, path")


def test_json_is_an_option_of_the_gate_as_of_every_command(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert memfit("gate", "init", "qwen3-8b-4bit", "--memory", "32", "--memory", "64GB").code == 0
    assert "memory: 32GB" in Path("memfit.yaml").read_text(encoding="utf-8")
    assert memfit("gate", "--update").code == 0
    run = memfit("gate", "--json")
    assert [target["status"] for target in run.json["targets"]] == ["passed", "passed"]
    assert run.out == memfit("gate", "--format", "json").out
    assert memfit("gate", "--json", "--format", "json").code == 2
    Path("memfit.yaml").unlink()
    assert memfit("gate", "init", "qwen3-8b-4bit").code == 2
