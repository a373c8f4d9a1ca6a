"""Addresses of the Hub and the names of GGUF quantisations, typed on the command line."""

import json
from pathlib import Path

import pytest

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.checkpoint.gguf.files import choose_model
from memfit.estimators.checkpoint.hub.address import hub_name
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.cli.running import Memfit
from tests.gguf.test_estimate import MODELS
from tests.gguf.test_files import LLAMA, WEIGHTS, write_series
from tests.gguf.writing import write
from tests.hub.conftest import NAME
from tests.hub.server import COMMIT, FakeHub, Repo

FILES = "org/files"


@pytest.fixture
def memfit(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Memfit:
    """The command line with a Hub that has a model, and a repository of GGUF files."""
    folder = tmp_path / "gguf"
    (folder / "Q8_0").mkdir(parents=True)
    for name in ("model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model-UD-Q4_K_XL.gguf", "mmproj.gguf"):
        write(folder / name, LLAMA, WEIGHTS)
    write_series(folder / "Q8_0")
    for part in (folder / "Q8_0").iterdir():
        part.rename(part.with_name(part.name.replace("big", "model-Q8_0")))
    hub.repos[FILES] = Repo(folder)
    monkeypatch.chdir(tmp_path)
    # huggingface-hub reads its environment when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Memfit(monkeypatch, capsys)


def opened(memfit: Memfit, reference: str) -> tuple[str, str]:
    """The name and the commit of what a reference opens."""
    run = memfit(reference, "--method", "formula", "--json")
    assert run.code == 0, run.err
    return run.json["model"]["id"], run.json["model"]["revision"]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("org/name", NAME),
        ("org/name/", NAME),
        ("org/name?library=mlx#usage", NAME),
        ("org/name/tree/main", f"{NAME}@main"),
        ("org/name/blob/main/config.json", f"{NAME}@main"),
        ("org/name/resolve/main/model-00001-of-00003.safetensors?download=true", f"{NAME}@main"),
        (f"org/name/tree/{COMMIT}", f"{NAME}@{COMMIT}"),
        (f"org/name/commit/{COMMIT}", f"{NAME}@{COMMIT}"),
        ("org/name/discussions/3", NAME),
    ],
)
def test_the_address_of_a_page_opens_its_model(
    memfit: Memfit, hub: FakeHub, page: str, name: str
) -> None:
    assert opened(memfit, f"{hub.endpoint}/{page}") == (name, COMMIT)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("http://www.huggingface.co/org/name/tree/v1.0", "org/name@v1.0"),
        ("HTTPS://HF.CO/org/name", "org/name"),
        ("huggingface.co/org/name", "org/name"),
        ("hf.co/org/name", "org/name"),
        ("hf.co/org/name:latest", "org/name"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("hf.co/org/name:a-Q4_0.gguf", "org/name:a-Q4_0.gguf"),
        ("https://hf.co/org/name/tree/refs%2Fpr%2F1", "org/name@refs/pr/1"),
        ("https://hf.co/org/name/blob/main/big/a.gguf", "org/name@main:big/a.gguf"),
        ("https://hf.co/org/name?show_file_info=a.gguf", "org/name:a.gguf"),
        ("https://hf.co/org/name?show_file_info=model.safetensors", "org/name"),
    ],
)
def test_an_address_is_read_as_a_name(address: str, name: str) -> None:
    assert hub_name(address, endpoint="https://huggingface.co") == name


@pytest.mark.parametrize(
    "address",
    (
        "https:// https://hf.co hf.co/ hf.co/a https://hf.co/../.. https://[ http://x hf.co/a%2fb/c"
        " https://hf.co/org/name/tree/main/a/b https://hf.co/datasets/org/name hf.co/a/b:c:d"
        " hf.co/org/na%20me hf.co/org/name%00 https://hf.co/org/%2e%2e"
    ).split(),
)
def test_an_address_of_no_model_is_one_clear_line(address: str) -> None:
    with pytest.raises(MemfitError) as caught:
        open_checkpoint(address)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("reference", "file"),
    [
        (f"{FILES}:Q4_K_M", "model-Q4_K_M.gguf"),
        (f"{FILES}:q4_k_s", "model-Q4_K_S.gguf"),
        (f"{FILES}@main:Q8_0", "Q8_0/model-Q8_0-00001-of-00003.gguf"),
        (f"hub:{FILES}:Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        (f"{FILES}:UD-Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        (f"hf.co/{FILES}:Q4_K_M", "model-Q4_K_M.gguf"),
    ],
)
def test_a_quantisation_names_the_file_of_it(memfit: Memfit, reference: str, file: str) -> None:
    assert open_checkpoint(reference.replace("hf.co/", "")).config_name.endswith(f"/{file}")


@pytest.mark.parametrize("reference", ["org/rows", "hub:org/rows"])
def test_a_repository_of_gguf_files_has_a_row_for_each(
    memfit: Memfit, hub: FakeHub, tmp_path: Path, reference: str
) -> None:
    folder, entry = tmp_path / "rows", MODELS["qwen3moe"]
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # of the original model, as many have it
    for label in ("Q8_0", "Q4_K_M", "IQ2_XS"):
        write(folder / f"model-{label}.gguf", entry.metadata, entry.tensors)
    hub.repos["org/rows"] = Repo(folder)
    asked = ("--memory", "8GB", "--json")
    run = memfit(reference, *asked)
    assert run.code == 0, run.err
    assert run.json["model"]["id"] == "org/rows:Q4_K_M"
    rows = {row["label"]: row for row in run.json["files"]}
    assert list(rows) == ["IQ2_XS", "Q4_K_M", "Q8_0"]
    assert {row["verdict"] for row in rows.values()} == {"fits"}
    assert rows["Q4_K_M"]["needed_bytes"] == run.json["needed_bytes"]
    for row in rows.values():
        own = memfit(row["name"], *asked).json
        assert "files" not in own
        assert own["needed_bytes"] <= row["needed_bytes"]
        assert own["components"]["weights"]["bytes"] <= row["weights_bytes"]
    text = memfit(reference, "--memory", "8GB").out
    assert all(f"memfit {row['name']}" in text for row in rows.values())
    assert "none was named" in " ".join(memfit(reference, "--memory", "8GB", "-v").out.split())


def test_a_policy_names_one_file_of_a_repository(memfit: Memfit) -> None:
    with pytest.raises(MemfitError, match="name one of them, org/files:"):
        open_checkpoint(f"hub:{FILES}", guess_hub=False)


def test_a_quantisation_that_is_not_there_is_refused_with_the_nearest(memfit: Memfit) -> None:
    run = memfit(f"{FILES}:Q4_K_L")
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert "org/files: no file is Q4_K_L; nearest: " in run.err
    assert "Q4_K_M" in run.err


def test_a_quantisation_of_two_files_is_not_guessed() -> None:
    names = ["a-Q4_0.gguf", "b-Q4_0.gguf"]
    with pytest.raises(MemfitError, match="2 files are Q4_0; it has"):
        choose_model(names, "Q4_0", "org/name")


def test_a_policy_takes_no_address(memfit: Memfit, hub: FakeHub) -> None:
    target = {
        "model": f"{hub.endpoint}/{NAME}",
        "device": "m4-max-64",
        "workload": {"context": 4096},
        "limits": {"peak": "90%"},
    }
    policy = {"schema": "memfit.policy/1", "targets": {"a": target}}
    Path("memfit.yaml").write_text(json.dumps(policy))
    run = memfit("gate")
    assert (run.code, f"a URL, not a name; write hub:{NAME}" in run.out + run.err) == (2, True)
