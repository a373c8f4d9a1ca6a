"""No measuring process runs code of a model repository, wherever its files say that it is.

Each piece of code here leaves a file behind when it runs. It is in the model's directory, in a
folder of the working directory and in a snapshot of the Hub's cache.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import UnsupportedError
from memfit.probes.codeless import codeless_view
from memfit.probes.process import CHILD_ENVIRONMENT, ModelProcess
from tests.checkpoints import Checkpoints

pytest.importorskip("transformers", reason="it would import the code")
needs_mlx_vlm = pytest.mark.skipif(
    importlib.util.find_spec("mlx_vlm") is None, reason="the processors are mlx-vlm's"
)

COMMIT = "0" * 40
REPOSITORY = "someone/evil"
CODE = "evil"
WHERES = ("", "folder--", f"{REPOSITORY}--")
AUTO_CLASSES = (
    *("AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor"),
    *("AutoVideoProcessor", "AutoFeatureExtractor", "AutoModel", "AutoModelForCausalLM"),
)
FILES = (
    *("config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "generation_config.json"),
)
# Attributes lead from any object of a template to Python's own functions.
TEMPLATE = "{{ cycler.__init__.__globals__.os.system('echo ran >> %s') }}{{ messages }}"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that code leaves behind; the code is in the folder and in the cache."""
    mark, home = tmp_path / "ran", tmp_path / "hub"
    snapshot = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    for place in (tmp_path / "folder", snapshot / "snapshots" / COMMIT):
        write_code(place, mark)
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HOME", str(home))
    for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return mark


def write_code(place: Path, mark: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name in (CODE, "modeling"):
        (place / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__)\n")


def auto_map(where: str) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(AUTO_CLASSES, f"{where}{CODE}.T")
    return found | {"AutoTokenizer": [f"{where}{CODE}.T", None]}


def write_model(path: Path, mark: Path, model_type: str, where: str) -> None:
    """Write a model of mlx-vlm whose every file, and every part of one, names the code."""
    write_code(path, mark)
    own = {"auto_map": auto_map(where), "model_type": model_type}
    part = {"text_config": own, "vision_config": own, "image_processor": own}
    settings = {"tokenizer_class": "X", "chat_template": TEMPLATE % mark, "eos_token": "a"}
    for name in FILES:
        (path / name).write_text(json.dumps({**own, **part, **settings}))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE % mark}))
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "<image>": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    words.save(str(path / "tokenizer.json"))


def classes(pattern: str) -> set[str]:
    """Return the types of mlx-vlm whose modules contain a pattern."""
    spec = importlib.util.find_spec("mlx_vlm")
    folders = spec.submodule_search_locations if spec else None
    models = Path(next(iter(folders or ("",)))) / "models"
    files = (path for path in models.rglob("*.py") if path.parent != models)
    return {
        path.relative_to(models).parts[0]
        for path in files
        if re.search(pattern, path.read_text("utf-8"))
    }


def trusting() -> list[str]:
    return sorted(classes(r"trust_remote_code(\"?, |\s*=\s*)True"))


def rendering() -> list[str]:
    return sorted(classes(r"from jinja2 import"))


# A child's main, for many models in one process: each start takes seconds.
PROMPTS = """
import sys
from pathlib import Path
from memfit.estimators.base.errors import MemfitError
from memfit.probes.codeless import forbid_repository_code, refusals
from memfit.probes.vision_runner import VisionRunner
forbid_repository_code()
for path in map(Path, sys.argv[2:]):
    try:
        with refusals():
            VisionRunner(path, [sys.argv[1]], [], None, lambda _: None).prompt("a b", None)
        print(path.name, "prompted")
    except MemfitError as error:
        print(path.name, type(error).__name__, error)
"""


@pytest.mark.exhaustive
@needs_mlx_vlm
def test_no_class_of_mlx_vlm_that_trusts_a_repository_runs_its_code(
    ran: Path, tmp_path: Path
) -> None:
    kinds = {*trusting(), *rendering()}
    assert {"got", "inkling", "internvl_chat", "minicpmo", "minicpmv4_6", "molmo"} <= kinds
    names = [(kind, where) for kind in sorted(kinds) for where in WHERES]
    paths = [tmp_path / f"{kind}-{WHERES.index(where)}" for kind, where in names]
    for path, (kind, where) in zip(paths, names, strict=True):
        write_model(path, ran, kind, where)
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "red.png"
    image.new("RGB", (64, 64)).save(picture)
    done = subprocess.run(
        (sys.executable, "-c", PROMPTS, str(picture), *map(str, paths)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **CHILD_ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not ran.exists(), ran.read_text()
    answers = [line.split()[:2] for line in done.stdout.splitlines()]
    assert [name for name, _ in answers] == [path.name for path in paths]
    assert {answer for _, answer in answers} <= {"prompted", "InputError", "UnsupportedError"}


@needs_mlx_vlm
def test_a_tokenizer_of_another_repository_is_refused_with_its_name(
    ran: Path, tmp_path: Path
) -> None:
    # This class takes the tokenizer of a fixed repository (moondream2/processing_moondream2.py).
    model, repository = tmp_path / "model", tmp_path / "moondream" / "starmie-v1"
    write_model(model, ran, "moondream2", "")
    write_model(repository, ran, "moondream2", "folder--")
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64)).save(tmp_path / "red.png")
    process = ModelProcess(model, timeout_seconds=120, images=(tmp_path / "red.png",))
    refusal = r"^moondream/starmie-v1: auto_map: folder--evil\.T is code of a repository"
    with process, pytest.raises(UnsupportedError, match=refusal):
        process.prompt("a b", None)
    assert not ran.exists()


@pytest.mark.parametrize("where", WHERES)
def test_a_model_of_text_runs_none_of_the_code_that_it_names(
    where: str, ran: Path, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    path = shutil.copytree(checkpoints("chat"), tmp_path / "model")
    write_code(path, ran)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((path / name).read_text())
        values |= {"auto_map": auto_map(where), "tokenizer_class": "X"}
        (path / name).write_text(json.dumps(values))
    with ModelProcess(path, timeout_seconds=60) as process:
        assert process.prompt("How many bytes?", None).notes == ()
        process.load()
    assert not ran.exists()


def test_the_files_that_a_library_sees_have_neither_code_nor_a_way_to_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("code.py", "code.pyc", "code.so", "weights.bin", "CODE.PY", "broken.json"):
        (model / name).write_text('{"auto_map"')
    (model / "deep.json").write_text('{"auto_map": 1, "a": ' + "[" * 900 + "]" * 900 + "}")
    (model / "folder.json").mkdir()
    named = {"auto_map": {"AutoTokenizer": ["where--code.T", None]}, "kept": [1, {"auto_map": 2}]}
    (model / "nested.json").write_text(json.dumps([named]))
    escaped = json.dumps(named).replace("auto_map", "a\\u0075to\\u005Fmap")
    (model / "escaped.json").write_text(escaped)
    (model / "other.json").write_text('{"a": 1e999}')
    (model / "inner").mkdir()
    with codeless_view(model / "inner" / "..") as view:
        # A file that nests too deeply may be left out.
        assert sorted({path.name for path in view.iterdir()} - {"deep.json"}) == [
            *("escaped.json", "nested.json", "other.json")
        ]
        emptied = {"auto_map": {}, "kept": [1, {"auto_map": {}}]}
        assert json.loads((view / "escaped.json").read_text()) == emptied
        assert json.loads((view / "nested.json").read_text()) == [emptied]
        assert view.name == "model"
        assert (view / "other.json").samefile(model / "other.json")
    assert not view.exists()


def test_what_cannot_be_loaded_without_code_names_the_file_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": ["code.T", null]}')
    refusal = r"tokenizer_config\.json: auto_map: cannot be loaded"
    with pytest.raises(UnsupportedError, match=refusal), codeless_view(tmp_path) as view:
        raise ValueError(f"no class in {view}\nsecond line")
