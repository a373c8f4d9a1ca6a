"""The trace also runs on the oldest MLX and mlx-lm that memfit's dependencies allow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.estimators.mlx.versions import OLDEST_MLX, format_version

pytest.importorskip("mlx_lm")

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "examples" / "tiny-qwen3.json"
OLDEST = format_version(OLDEST_MLX)
ARGUMENTS = ("--method", "trace", "--context", "1k", "--device", "m4-max-64", "--json")


def traced(*folders: Path) -> dict[str, object]:
    """Return an estimate by trace, with packages of these folders and without mlx-vlm, if any."""
    code = (
        f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r};"
        f" sys.modules.update({{'mlx_vlm': None}} if {bool(folders)} else {{}});"
        f" sys.argv[1:] = {['estimate', str(CONFIG), *ARGUMENTS]!r};"
        " from memfit.cli.app import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


@pytest.mark.exhaustive
def test_the_oldest_versions_give_the_same_figures(tmp_path: Path) -> None:
    mlx = f"mlx[cpu]=={OLDEST}" if sys.platform == "linux" else f"mlx=={OLDEST}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    for package, options in ((mlx, []), (f"mlx-lm=={OLDEST}", ["--no-deps"])):
        done = subprocess.run([*pip, *options, package], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed here")
    old, new = traced(tmp_path), traced()
    assert f"traced with mlx {OLDEST}, mlx-lm {OLDEST}" in str(old["assumptions"])
    assert old["peak_bytes"] == new["peak_bytes"]
    assert old["components"] == new["components"]


@pytest.mark.exhaustive
def test_a_build_that_decodes_no_tagged_floats_is_traced(tmp_path: Path) -> None:
    import mlx_lm

    package = Path(mlx_lm.__file__).parent
    (tmp_path / "mlx_lm").mkdir()
    for path in package.iterdir():
        (tmp_path / "mlx_lm" / path.name).symlink_to(path)
    utils = tmp_path / "mlx_lm" / "utils.py"
    utils.unlink()
    text = (package / "utils.py").read_text(encoding="utf-8")
    utils.write_text(text.replace("_decode_tagged_floats", "_decode_otherwise"), encoding="utf-8")
    assert traced(tmp_path)["peak_bytes"] == traced()["peak_bytes"]
