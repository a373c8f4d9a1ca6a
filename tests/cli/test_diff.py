"""``memfit diff``: another version of mlx-lm, from a folder and from the package index."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Memfit

mlx_lm = pytest.importorskip("mlx_lm")

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "docs" / "examples" / "tiny-qwen3.json")


def changed_copy(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Make a folder with mlx_lm as it is installed, but for texts of some files."""
    package = Path(mlx_lm.__file__).parent
    for source in package.rglob("*.py"):
        name = str(source.relative_to(package))
        copy = folder / "mlx_lm" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in changes:
            text = source.read_text(encoding="utf-8")
            assert changes[name][0] in text
            copy.write_text(text.replace(*changes[name]), encoding="utf-8")
        else:
            copy.symlink_to(source)
    return folder


def test_a_larger_array_in_a_class_and_another_loop_are_found(
    memfit: Memfit, tmp_path: Path
) -> None:
    new = changed_copy(
        tmp_path / "new",
        {
            "models/qwen3.py": (
                "self.down_proj(swiglu(",
                "self.down_proj(1.0 * nn.silu(self.gate_proj(x)) * self.up_proj(x) + swiglu(",
            ),
            "generate.py": ("prefill_step_size: int = 2048", "prefill_step_size: int = 1024"),
        },
    )
    run = memfit("diff", TINY, "--mlx-lm", "installed", new, "--context", "2k", "--json")
    assert run.code == 1, run.err
    answer = json.loads(run.out)
    (model,) = answer["models"]
    assert model["peaks"][0]["new_bytes"] > model["peaks"][0]["old_bytes"] > 0
    calls = {loop["prompt_tokens"]: loop["new_calls"] for loop in answer["loops"]}
    assert calls[2048][:2] == [[1024, 1024], [1023, 1023]]


def test_a_class_that_only_the_new_version_lacks_is_not_decided(
    memfit: Memfit, tmp_path: Path
) -> None:
    new = changed_copy(tmp_path / "new", {"models/qwen3.py": ("class Model(", "class Gone(")})
    run = memfit("diff", TINY, "--mlx-lm", "installed", new, "--context", "1k")
    assert run.code == 3
    assert "not decided for" in run.out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("qwen3-0.6b",), "give either --mlx-lm OLD NEW or --mlx-vlm OLD NEW"),
        (("qwen3-0.6b", "--mlx-lm", "installed", "new"), "name a version such as 0.32.1"),
        (("qwen3-0.6b", "--mlx-lm", "0.0.1", "installed"), "it is traced from 0.26.0 on"),
        (("no-such-model", "--mlx-lm", "installed", "installed"), "no such path"),
        (
            ("qwen3-0.6b", "--mlx-lm", "installed", "installed", "--image", "8x8"),
            "give --mlx-vlm OLD NEW",
        ),
    ],
)
def test_a_wrong_question_is_one_line(
    memfit: Memfit, arguments: tuple[str, ...], error: str
) -> None:
    run = memfit("diff", *arguments)
    assert (run.code, run.out) == (2, "")
    assert error in run.err


@pytest.mark.exhaustive
def test_a_release_is_downloaded_and_its_change_found(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """edbf61dd (mlx-lm 0.30.4): one compiled function multiplies where two kernels did.

    At 128k the peak is in the last chunk: 2,047 tokens x 8,192 values of the product, 2 bytes each.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = memfit("diff", "llama-3.2-3b", "--mlx-lm", "0.30.2", "0.30.4", "--json")
    if "cannot be downloaded" in run.err:
        pytest.skip("mlx-lm 0.30.2 cannot be downloaded here")
    peaks = json.loads(run.out)["models"][0]["peaks"]
    changes = [peak["new_bytes"] - peak["old_bytes"] for peak in peaks]
    assert changes == [58720256, 0, -2047 * 8192 * 2]
