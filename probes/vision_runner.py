"""Run a vision-language model with an image in its prompt, with mlx-vlm's own loop."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import InputError, MemfitError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.images.sizes import frame_files
from memfit.estimators.trace.libraries import changed
from memfit.probes.codeless import UnloadableError, codeless_view
from memfit.probes.loading import codeless_config, memory_errors, one_line, weight_errors
from memfit.probes.model_runner import ModelRunner, TokenizedPrompt
from memfit.probes.run_monitor import OnPrompt, ReportFigures


class VisionRunner(ModelRunner):
    """A `ModelRunner` with a prompt of text and images."""

    def __init__(
        self,
        path: Path,
        images: list[str],
        videos: list[str],
        memory_limit_bytes: int | None,
        report: ReportFigures,
    ) -> None:
        super().__init__(path, memory_limit_bytes, report)
        self._images, self._videos = images, videos
        self._inputs: dict[str, Any] = {}

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "mlx_vlm": version("mlx-vlm")}

    def prompt(self, text: str | None, tokens: int | None) -> TokenizedPrompt:
        """Make the prompt with the model's own processor and template.

        Raises:
            InputError: when there is no text, or the processor rejects the image.
            UnsupportedError: when mlx-vlm has no class for the model, or it brings its own code.
        """
        if text is None or not text.strip():
            raise InputError("an image needs a text prompt as well: the prompt is empty")
        self.config = codeless_config(self.path)
        with self.errors():
            _require_class(self.config)
        try:
            self._inputs = _processed(self.path, self.config, text, self._images, self._videos)
        except MemfitError:
            raise
        except UnloadableError as error:
            raise InputError(
                f"{printable(self.path)}: its processor cannot be loaded ({error})"
            ) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a processor may raise anything
            given = printable(", ".join(self._images + self._videos))
            raise InputError(
                f"{given}: the model's processor does not accept it"
                f" ({type(error).__name__}: {one_line(error)})"
            ) from None
        return TokenizedPrompt(self._tokens, ())

    def load_model(self) -> tuple[Any, dict[str, Any]]:
        from mlx_vlm import utils

        config = codeless_config(self.path)
        # Without a path it imports no ``model_file``, also of a model that a class loads itself.
        find = utils.get_model_and_args
        stubs = {"get_model_and_args": lambda config, model_path=None: find(config)}
        with self.errors(), weight_errors(self.path), memory_errors(), changed(utils, stubs):
            return utils.load_model(self.path, lazy=False, trust_remote_code=False), config

    def model_input(self, workload: Workload) -> Any:
        """Return the processed prompt; its length cannot be changed."""
        if not self._inputs:
            raise InputError("a run needs a prompt first")
        if workload.prompt_tokens != self._tokens:
            raise InputError(
                f"a prompt with an image has a fixed length of {self._tokens} tokens, not"
                f" {workload.prompt_tokens}"
            )
        return dict(self._inputs)

    def caches(self, workload: Workload) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        made: list[Any] = make_prompt_cache(self.model.language_model, workload.max_kv_size)
        return made

    def steps(
        self, prompt: Any, workload: Workload, caches: list[Any], on_prompt: OnPrompt
    ) -> Iterator[Any]:
        """Yield the tokens of mlx-vlm's loop; its cache checkpoints report prompt progress."""
        from mlx_vlm.generate.ar import generate_step

        total = self._tokens
        steps = generate_step(
            prompt.pop("input_ids"),
            self.model,
            prompt.pop("pixel_values", None),
            prompt.pop("attention_mask", None),
            max_tokens=workload.max_tokens,
            temperature=0.0,
            prompt_cache=caches,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
            prompt_cache_checkpoint=lambda processed, _: on_prompt(processed, total),
            prompt_cache_checkpoint_lengths=[total - 1],
            **prompt,
        )
        token = next(steps, None)
        on_prompt(total, total)
        if token is not None:
            yield token
        yield from steps

    def stream(self) -> Any:
        from mlx_vlm.generate.common import generation_stream

        return generation_stream

    def swift_workspace(self, workload: Workload) -> tuple[int, int]:
        """Raise an error: the rule is only for text.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("mlx-swift-lm's rule is not described for a prompt with an image")

    def errors(self) -> AbstractContextManager[None]:
        return _vision_errors(printable(self.path / CONFIG), self.config)

    @property
    def _tokens(self) -> int:
        return int(self._inputs["input_ids"].shape[1])


def _processed(
    path: Path, config: dict[str, Any], text: str, images: list[str], videos: list[str]
) -> dict[str, Any]:
    """Return ids, pixels and the class's other inputs; source: mlx-vlm generate/dispatch.py."""
    from mlx_vlm.generate.video import processor_handles_video
    from mlx_vlm.prompt_utils import apply_chat_template
    from mlx_vlm.utils import (
        load_image_processor,
        load_processor,
        prepare_inputs,
        resolve_video_sampling,
    )
    from mlx_vlm.utils import should_add_special_tokens as adds_special_tokens

    with codeless_view(path) as view:
        processor = load_processor(view, trust_remote_code=False)
    image_processor = load_image_processor(path, trust_remote_code=False)
    if image_processor is not None:
        processor.image_processor = image_processor
    if videos and not processor_handles_video(processor):
        raise UnsupportedError(
            "mlx-vlm's processor of this model takes no videos: give its frames with --image"
        )
    requested = {"video": videos, "fps": [1] * len(videos)} if videos else {}
    loaded = [_video(each, resolve_video_sampling(processor, {}).fps) for each in videos]
    inputs: dict[str, Any] = prepare_inputs(
        processor,
        images=images or None,  # absolute paths, which are never taken for URLs
        videos=[frames for frames, _ in loaded] or None,
        video_metadata=[about for _, about in loaded] or None,
        prompts=apply_chat_template(processor, config, text, num_images=len(images), **requested),
        image_token_index=config.get("image_token_index"),
        add_special_tokens=adds_special_tokens(config["model_type"], processor),
    )
    return inputs


def _video(path: str, rate: float) -> tuple[Any, Any]:
    """Return pixels of (frames, channels, height, width), and what is said of them.

    They are sampled from a file as by default in mlx-vlm; a folder has all frames.
    """
    import numpy as np
    from mlx_vlm.utils import VideoMetadata, load_video
    from PIL import Image

    if not Path(path).is_dir():
        sampled: tuple[Any, Any] = load_video(path)
        return sampled
    opened = (Image.open(each).convert("RGB") for each in frame_files(Path(path)))
    frames = np.stack([np.asarray(each).transpose(2, 0, 1) for each in opened])
    return frames, VideoMetadata(len(frames), rate, list(range(len(frames))))


def _require_class(config: dict[str, Any]) -> None:
    from mlx_vlm.utils import get_model_and_args

    try:
        get_model_and_args(config)
    except ValueError:
        raise UnsupportedError(
            f"model_type {printable(config.get('model_type'))}: mlx-vlm has no class for it"
        ) from None


@contextmanager
def _vision_errors(name: str, config: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except MemfitError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a class may raise anything
        kind = printable(config.get("model_type"))
        raise UnsupportedError(
            f"{name}: mlx-vlm's class for model_type {kind}: {type(error).__name__}:"
            f" {one_line(error)}"
        ) from None
