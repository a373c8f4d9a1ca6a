"""``memfit fits``: what of the samples, of the stores and of folders fits a machine."""

import csv
import io
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.checkpoint.local.kept_models import kept_models
from tests.checkpoint.test_stores import DIGEST, layer, write_manifest
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line
from tests.gguf.writing import recorded, write
from tests.models import QWEN3_4B, write_config

SAMPLES = Path(__file__).parents[2] / "sample_configs"
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def stores(home: Path) -> Path:
    """Models in each store, and one that cannot be read; returns a folder with two more."""
    snapshot = home / "hub" / "models--org--name" / "snapshots"
    for commit in (COMMIT, "b" * 40):
        config(snapshot / commit)
    refs = snapshot.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    config(home / ".lmstudio" / "models" / "org" / "broken", hidden_size=-1)
    gguf_file(home / ".ollama" / "models" / "blobs" / f"sha256-{DIGEST}")
    manifest = "registry.ollama.ai/library/qwen3/0.6b"
    write_manifest(home / ".ollama" / "models", manifest, [layer("model")])
    folder = home / "mine"
    gguf_file(folder / "qwen3.gguf")
    (folder / "mmproj-qwen3.gguf").write_bytes(b"")
    config(folder / "deep" / "model")
    (folder / "deep" / "again").symlink_to(folder)
    return folder


def config(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write_config(directory, {**QWEN3_4B, **changes})


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = recorded()["qwen3"]
    return write(path, entry.metadata, entry.tensors)


def test_every_sample_has_a_row(memfit: Memfit) -> None:
    data = memfit("fits", "--memory", "32GB", "--json").json
    assert not data["not_sized"]
    names = sorted(row["name"] for row in data["models"])
    assert names == sorted(path.stem for path in SAMPLES.glob("*.yaml"))


def test_what_fits_comes_first_and_the_largest_of_it(memfit: Memfit) -> None:
    run = memfit("fits", "--memory", "32GB", "--json")
    assert run.code == 0
    verdicts = [row["verdict"] for row in run.json["models"]]
    assert verdicts == sorted(verdicts, key=["fits", "tight", "exceeds"].index)
    assert run.json["fitting"] == len(verdicts) - verdicts.count("exceeds")
    sizes = [row["model"]["parameters"] for row in run.json["models"] if row["verdict"] == "fits"]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {row["name"]: row for row in run.json["models"]}
    assert by_name["qwen3.5-35b-a3b"]["weight_bits"] == 4
    assert by_name["qwen3-next-80b-a3b-4bit"]["smallest_memory_bytes"] == 64 * 2**30


def test_the_stores_and_folders_are_looked_through(memfit: Memfit, stores: Path) -> None:
    data = memfit("fits", "--memory", "32GB", "--json", stores).json
    found = {(row["name"], row["store"]) for row in data["models"] if row["store"] != "sample"}
    assert found == {
        ("org/name", "hub"),
        ("ollama:qwen3:0.6b", "ollama"),
        ("qwen3.gguf", "folder"),
        ("deep/model", "folder"),
    }
    [unread] = data["not_sized"]
    assert (unread["name"], unread["why"]["slug"]) == ("org/broken", "bad-config")
    assert "hidden_size" in unread["why"]["reason"]


def test_without_a_main_branch_every_snapshot_counts(stores: Path, home: Path) -> None:
    (home / "hub" / "models--org--name" / "refs" / "main").unlink()
    hub = [each.reference for each in kept_models([]) if each.store == "hub"]
    assert [Path(reference).name[0] for reference in hub] == ["a", "b"]
    assert stores.is_dir()


def test_lm_studio_may_keep_models_elsewhere(home: Path) -> None:
    config(home / "else" / "models" / "org" / "name")
    (home / ".lmstudio-home-pointer").write_text(f"{home}/else\n")
    assert next(kept_models([]))[:2] == ("org/name", "lm-studio")


def test_a_row_is_what_estimate_says_of_what_the_stores_hold(memfit: Memfit, stores: Path) -> None:
    data = memfit("fits", "--memory", "16GB", "--context", "8k", "--json", stores).json
    rows = [row for row in data["models"] if row["store"] != "sample"]
    for row in rows:
        bits = ("--quantize", row["weight_bits"]) if row["weight_bits"] else ()
        step = ("--prefill-step", row["prefill_step"])
        asked = ("--memory", "16GB", "--context", "8k", "--json")
        same = memfit("estimate", row["reference"], *map(str, (*bits, *step)), *asked).json
        for name in ("model", "runtime", "verdict", "peak_bytes", "needed_bytes", "exceeded"):
            assert row[name] == same[name], (row["name"], name)
    assert len(rows) == 4


def test_configs_and_samples_in_a_folder_are_models(memfit: Memfit, home: Path) -> None:
    config(home / "one").joinpath("config.json").rename(home / "one" / "org--name.json")
    shutil.copy(SAMPLES / "gemma-2-2b.yaml", home / "one" / "copy.yaml")
    (home / "one" / "package.json").write_text("{}")
    data = memfit("fits", "--memory", "32GB", "--json", home / "one").json
    names = [row["name"] for row in data["models"] if row["store"] == "folder"]
    assert sorted(names) == ["copy.yaml", "org--name.json"]
    assert [each["name"] for each in data["not_sized"]] == ["package.json"]


def test_csv_has_a_row_for_each_model(memfit: Memfit, stores: Path) -> None:
    out = memfit("fits", "--device", "m4-max-64", "--format", "csv", stores).out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == len(list(SAMPLES.glob("*.yaml"))) + 5
    assert rows[-1]["name"] == "org/broken"
    assert "hidden_size" in rows[-1]["reason"]
    assert float(rows[0]["most_tokens_per_second"]) > 0


def test_a_page_and_the_table_name_what_has_no_figures(memfit: Memfit, stores: Path) -> None:
    for form in ("table", "markdown"):
        out = memfit("fits", "--memory", "32GB", "--format", form, stores).out
        assert "Not sized" in out
        assert "org/broken/config.json: hidden" in out


def test_a_name_cannot_write_to_the_terminal(memfit: Memfit, home: Path) -> None:
    config(home / "mine" / "\x1b[31mred")
    for form in ("table", "csv"):
        assert "\x1b" not in memfit("fits", "--memory", "8GB", "--format", form, home / "mine").out


def test_nothing_that_fits_is_exit_1(memfit: Memfit) -> None:
    run = memfit("fits", "--working-set", "100MB")
    assert run.code == 1
    assert ": 0 of " in run.out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("./nowhere",), "nowhere: no such"),
        (("",), "holds no models"),
        ((".",), "holds no models"),
        (("--context", "many"), "--context"),
        (("--device", "m4-max-64"), "give only one"),
        (("--mlx-version", "x"), "--mlx-version"),
    ],
)
def test_bad_input_is_one_line(memfit: Memfit, arguments: tuple[str, ...], word: str) -> None:
    assert_one_line(memfit("fits", "--memory", "32GB", *arguments), 2, word)


def test_without_a_machine_nothing_can_fit(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.estimators.machine.host.detect_host", lambda: None)
    assert_one_line(memfit("fits"), 2, "--memory 32GB")


@pytest.mark.exhaustive
def test_60_models_take_at_most_ten_times_an_estimate(home: Path) -> None:
    folder = home / "mine"
    for number in range(60 - len(list(SAMPLES.glob("*.yaml")))):
        config(folder / str(number), num_hidden_layers=20 + number)

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "memfit.cli", *arguments, "--memory", "32GB"]
        subprocess.run(command, check=False, capture_output=True, cwd=home)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime

    sample = str(shutil.copy(SAMPLES / "qwen3-4b-4bit.yaml", home))
    seconds("estimate", sample)  # compiles modules
    one = min(seconds("estimate", sample) for _ in range(3))
    assert min(seconds("fits", str(folder)) for _ in range(3)) <= 10 * one


def test_a_folder_that_is_called_like_the_hub_is_a_folder(memfit: Memfit) -> None:
    config(Path("hub:org") / "name")
    data = memfit("fits", "--memory", "32GB", "--json", "hub:org").json
    assert not data["not_sized"]
    assert "name" in [row["name"] for row in data["models"] if row["store"] == "folder"]
