"""``memfit fits``: what of the samples, of the stores and of folders fits a machine."""

import csv
import io
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memfit as library
from memfit.cli.render.output import rendered
from memfit.cli.render.views.fits import FitsView
from memfit.estimators.base.units import Units
from memfit.estimators.checkpoint.local.local_models import local_models
from memfit.estimators.machine.devices import find_device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.results.fits import Fits
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.fits import fits
from tests.checkpoint.test_stores import DIGEST, layer, write_manifest
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line
from tests.gguf.writing import recorded, write
from tests.models import QWEN3_4B, write_config

SAMPLES = Path(__file__).parents[2] / "sample_configs"
COMMIT = "a" * 40
MACHINE = "m4-32"


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with models in each store, one that cannot be read, and folders with more."""
    home = tmp_path_factory.mktemp("home")
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
    config(folder / "\x1b[31mred")
    config(home / "one").joinpath("config.json").rename(home / "one" / "org--name.json")
    shutil.copy(SAMPLES / "gemma-2-2b.yaml", home / "one" / "copy.yaml")
    (home / "one" / "package.json").write_text("{}")
    return home


@pytest.fixture(scope="module")
def answered(shared_home: Path) -> Iterator[Fits]:
    """What fits 32 GB, of everything there is: a list of all samples takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        live_in(shared_home, patch)
        kept = list(local_models([str(shared_home / "mine"), str(shared_home / "one")]))
        question = WorkloadQuestion(prompt_tokens=8192)
        yield fits(Catalog(), kept, find_device(MACHINE), question)


def live_in(home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HOME", str(home))
    patch.delenv("OLLAMA_MODELS", raising=False)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models."""
    live_in(tmp_path, monkeypatch)
    return tmp_path


def config(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write_config(directory, {**QWEN3_4B, **changes})


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = recorded()["qwen3"]
    return write(path, entry.metadata, entry.tensors)


def test_every_sample_has_a_row(answered: Fits) -> None:
    names = sorted(row.name for row in answered.models if row.store == "sample")
    assert names == sorted(path.stem for path in SAMPLES.glob("*.yaml"))


def test_what_fits_comes_first_and_the_largest_of_it(answered: Fits) -> None:
    verdicts = [row.verdict for row in answered.models]
    assert verdicts == sorted(verdicts, key=["fits", "tight", "exceeds"].index)
    assert answered.fitting == len(verdicts) - verdicts.count("exceeds")
    sizes = [row.model.parameters for row in answered.models if row.verdict == "fits"]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {row.name: row for row in answered.models}
    assert by_name["qwen3.5-35b-a3b"].weight_bits == 4
    assert by_name["qwen3-next-80b-a3b-4bit"].smallest_memory_bytes == 64 * 2**30


def test_the_stores_and_folders_are_looked_through(answered: Fits) -> None:
    found = {(row.name, row.store) for row in answered.models if row.store != "sample"}
    assert found == {
        ("org/name", "hub"),
        ("ollama:qwen3:0.6b", "ollama"),
        ("qwen3.gguf", "folder"),
        ("deep/model", "folder"),
        (r"\x1b[31mred", "folder"),
        ("copy.yaml", "folder"),
        ("org--name.json", "folder"),
    }
    unread = {each.name: each.why for each in answered.not_sized}
    assert list(unread) == ["org/broken", "package.json"]
    assert unread["org/broken"].slug == "bad-config"
    assert "hidden_size" in unread["org/broken"].reason


def test_a_row_is_what_estimate_says_of_what_the_stores_hold(
    answered: Fits, shared_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_in(shared_home, monkeypatch)
    # The name of one is not that of its folder: it would write to the terminal.
    rows = [row for row in answered.models if row.store != "sample" and "red" not in row.name]
    for row in rows:
        same = library.estimate(
            row.reference,
            device=MACHINE,
            context="8k",
            prefill_step=row.prefill_step,
            quantize=row.weight_bits or None,
        )
        for name in ("model", "runtime", "verdict", "peak_bytes", "needed_bytes", "exceeded"):
            assert getattr(row, name) == getattr(same, name), (row.name, name)
    assert len(rows) == 6


def test_csv_has_a_row_for_each_model(answered: Fits) -> None:
    out = rendered(FitsView(answered, Units.GB), "csv", to_file=True)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == len(list(SAMPLES.glob("*.yaml"))) + 9
    assert rows[-2]["name"] == "org/broken"
    assert "hidden_size" in rows[-2]["reason"]
    assert float(rows[0]["most_tokens_per_second"]) > 0
    assert "\x1b" not in out


def test_a_page_and_the_table_name_what_has_no_figures(answered: Fits) -> None:
    for form in ("table", "markdown"):
        out = rendered(FitsView(answered, Units.GB), form, to_file=True)
        assert "Not sized" in out
        assert "org/broken/config.json: hidden" in out
        assert "\x1b" not in out


def test_without_a_main_branch_every_snapshot_counts(home: Path) -> None:
    for commit in (COMMIT, "b" * 40):
        config(home / "hub" / "models--org--name" / "snapshots" / commit)
    hub = [each.reference for each in local_models([]) if each.store == "hub"]
    assert [Path(reference).name[0] for reference in hub] == ["a", "b"]


def test_lm_studio_may_keep_models_elsewhere(home: Path) -> None:
    config(home / "else" / "models" / "org" / "name")
    (home / ".lmstudio-home-pointer").write_text(f"{home}/else\n")
    assert next(local_models([]))[:2] == ("org/name", "lm-studio")


def test_nothing_that_fits_is_exit_1_and_a_folder_may_be_called_like_the_hub(
    memfit: Memfit,
) -> None:
    config(Path("hub:org") / "name")
    run = memfit("fits", "--working-set", "100MB", "--json", "hub:org")
    assert run.code == 1
    assert (run.json["fitting"], run.json["not_sized"]) == (0, [])
    assert "name" in [row["name"] for row in run.json["models"] if row["store"] == "folder"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("./nowhere",), "nowhere: no such"),
        (("qwen3:8b",), "qwen3:8b: no such folder; memfit qwen3:8b answers for a model of that"),
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
