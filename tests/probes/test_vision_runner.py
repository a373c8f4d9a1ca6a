"""A prompt with an image: by mlx-vlm where it is installed, else a one-line error."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tune_vs_estimate import tuned
from memfit.estimators.base.errors import (
    CheckpointError,
    InputError,
    MachineError,
    UnsupportedError,
)
from memfit.estimators.base.workload import Workload
from memfit.probes.process import ModelProcess
from tests.checkpoints import CASES, VOCABULARY, Checkpoints, save_weights

pytest.importorskip("mlx_lm", reason="the process needs it")
needs_mlx_vlm = pytest.mark.skipif(
    importlib.util.find_spec("mlx_vlm") is None, reason="the loop is mlx-vlm's"
)

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT = "Every byte has a reason."
RUN_ME = "open(__file__ + '.ran', 'w')"


@pytest.fixture(scope="module")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of 32 by 32: 64 patches of 4, 16 tokens after merging 2 by 2."""
    return draw_image(tmp_path_factory.mktemp("pictures") / "red.png", 32)


def draw_image(path: Path, side: int) -> Path:
    """Save a square image."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (side, side), (200, 30, 30)).save(path)
    return path


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing(tmp_path_factory.mktemp("seeing") / "model", has_code=True)


def save_seeing(path: Path, *, has_code: bool) -> Path:
    """Save a small Qwen2-VL with random weights as mlx-vlm saves its own.

    With code it names classes of its own file, which no process may run.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.qwen2_vl import Model, ModelConfig, TextConfig, VisionConfig

    config = json.loads((CASES / "qwen2_vl.json").read_text())
    config |= {
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 4]},
        "image_token_id": VOCABULARY - 2,
        "video_token_id": VOCABULARY - 1,
        "vision_start_token_id": VOCABULARY - 4,
    }
    if has_code:
        config["auto_map"] = {"AutoProcessor": "code.P", "AutoTokenizer": ["code.T", None]}
    built = ModelConfig.from_dict(dict(config))
    built.text_config = TextConfig.from_dict(config)
    built.vision_config = VisionConfig.from_dict(config["vision_config"])
    mx.random.seed(0)
    parameters: Any = tree_flatten(Model(built).parameters())
    save_weights(path, {name: array.astype(mx.bfloat16) for name, array in parameters})
    (path / "config.json").write_text(json.dumps(config))
    pixels = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64}
    (path / "preprocessor_config.json").write_text(json.dumps(pixels))
    _save_tokenizer(path, {"auto_map": {"AutoTokenizer": ["code.T", None]}} if has_code else {})
    if has_code:
        (path / "code.py").write_text(RUN_ME)
    return path


def _save_tokenizer(path: Path, more: dict[str, Any]) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    unused = [f"<|{n}|>" for n in range(VOCABULARY - 256 - len(IMAGE_TOKENS))]
    tokenizer.add_special_tokens([*unused, *IMAGE_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": unused[0],
        "chat_template": TEMPLATE,
        **more,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def started(path: Path, image_file: Path) -> ModelProcess:
    return ModelProcess(path, timeout_seconds=120, images=(image_file,))


@pytest.fixture(scope="module")
def looking(seeing: Path, image_file: Path) -> Iterator[ModelProcess]:
    with started(seeing, image_file) as process:
        prompt = process.prompt(TEXT, None)
        # The text's bytes, 16 tokens of the image, and the two around it.
        assert prompt.tokens == len(TEXT) + 16 + 2
        yield process


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_an_image_is_measured_with_its_tower(looking: ModelProcess, seeing: Path) -> None:
    index = json.loads((seeing / "model.safetensors.index.json").read_text())
    loaded = looking.load()
    assert loaded.weights_bytes == index["metadata"]["total_size"]
    tokens = len(TEXT) + 18
    run = looking.run(Workload(prompt_tokens=tokens, max_tokens=3, prefill_step=16))
    per_token = 3 * 2 * 2 * 24 * 2  # layers, heads, keys and values, width, bytes
    assert run.prefill_kv_held_bytes == (tokens - 1) * per_token
    assert run.kv_held_bytes == (tokens + 3) * per_token
    assert run.kv_bytes == 256 * per_token
    # The tower runs over 64 patches before the first chunk of the prompt.
    assert run.prefill_peak_bytes > loaded.active_bytes + run.prefill_kv_bytes
    assert run.first_token_ns > 0
    assert run.decode_ns > 0
    assert not list(seeing.glob("*.ran"))


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_the_whole_command_counts_the_tower(seeing: Path, image_file: Path, tmp_path: Path) -> None:
    about = ("--prompt", TEXT, "--image", str(image_file), "--max-tokens", "3")
    row = tuned("seeing", seeing, tmp_path, about)
    assert row.is_exact
    environment = {**os.environ, "MEMFIT_HOME": str(tmp_path)}
    image = ("--image", str(image_file), "--device", "host", "--json")

    def estimate(text_tokens: int, max_tokens: int) -> Any:
        tokens = ("--prompt-tokens", str(text_tokens), "--max-tokens", str(max_tokens))
        command = (sys.executable, "-m", "memfit", "estimate", str(seeing), *tokens, *image)
        return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE).stdout)

    # The text and what the template adds are the user's to count.
    measured = estimate(len(TEXT), 3)
    assert measured["workload"]["prompt_tokens"] == len(TEXT) + 18
    assert measured["components"]["workspace"]["basis"] == "measured"
    [kept] = (json.loads(path.read_text()) for path in tmp_path.rglob("measurements/*.json"))
    runs = (kept["warm_up"], *kept["runs"])
    peaks = {max(run["prefill_peak_bytes"], run["decode_peak_bytes"]) for run in runs}
    # Where the warm-up took the most, it counts.
    assert measured["peak_bytes"] in {row.figures["peak"].measured, max(peaks)} & peaks
    assert any("and mlx-vlm" in line for line in measured["assumptions"])
    other = estimate(len(TEXT), 4)
    assert other["components"]["workspace"]["basis"] != "measured"
    (note,) = (note for note in other["notes"] if note["code"] == "measured-otherwise")
    assert "with 32x32" in note["message"]
    assert "--prompt TEXT --image FILE" in note["message"]


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_a_video_file_a_folder_of_frames_and_images_are_one_prompt(
    seeing: Path, image_file: Path, tmp_path: Path
) -> None:
    cv2, numpy = pytest.importorskip("cv2"), pytest.importorskip("numpy")
    frames, film = tmp_path / "frames", tmp_path / "film.mp4"
    frames.mkdir()
    for number in range(4):
        shutil.copy(image_file, frames / f"{number}.png")
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 32))
    for _ in range(33):  # three seconds: six frames of two a second
        writer.write(numpy.zeros((32, 64, 3), numpy.uint8))
    writer.release()
    given = ("--video", str(film), "--video", str(frames), *("--image", str(image_file)) * 2)
    row = tuned("seeing", seeing, tmp_path, ("--prompt", TEXT, *given, "--max-tokens", "3"))
    assert row.is_exact
    peak = row.figures["peak"]
    assert abs(peak.estimated - peak.measured) * 10 < peak.measured


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_a_prompt_with_an_image_cannot_be_shortened(looking: ModelProcess) -> None:
    with pytest.raises(InputError, match="fixed length"):
        looking.run(Workload(prompt_tokens=512))


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_an_image_needs_a_text_prompt(seeing: Path, image_file: Path) -> None:
    with started(seeing, image_file) as process, pytest.raises(InputError, match="needs a text"):
        process.prompt(None, 100)


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_an_invalid_image_is_reported(seeing: Path) -> None:
    process = started(seeing, seeing / "config.json")
    with process, pytest.raises(InputError, match=r"config.json.*does not accept it"):
        process.prompt(TEXT, None)


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_a_model_that_mlx_vlm_lacks_is_not_supported(
    checkpoints: Checkpoints, image_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zork"}))
    with started(tmp_path, image_file) as process, pytest.raises(UnsupportedError, match="zork"):
        process.prompt(TEXT, None)


@needs_mlx_vlm
@pytest.mark.exhaustive
def test_a_missing_image_is_reported(seeing: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        started(seeing, seeing / "none.png").__enter__()


@pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is not None, reason="it is installed")
def test_without_mlx_vlm_an_image_gives_a_one_line_error(checkpoints: Checkpoints) -> None:
    with pytest.raises(MachineError, match=r"install memfit\[vlm\]"):
        started(checkpoints("dense"), Path("red.png")).__enter__()
