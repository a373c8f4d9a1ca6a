"""Make the models of the kit, and what only MLX itself can answer: the child's part."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from memfit.estimators.base.units import Bytes
from memfit.probes.kit.models import GROUP_SIZE, SEEING, VOCABULARY
from memfit.probes.model_runner import ModelRunner

_IMAGE_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_WIRED_BYTES = 2**28
_GIB = 2**30


class WiredAnswers(Struct, frozen=True, kw_only=True):
    """What MLX did with wired limits."""

    set_bytes: Bytes
    """The limit that it reports after one was set."""
    refuses: bool
    """Whether it refuses a limit above the recommended working set."""
    is_restored: bool
    """Whether the limit from before holds again at the end."""


class KitRunner(ModelRunner):
    """Makes a model in its directory, and checks the allocator."""

    def make(self, config: dict[str, Any], bits: int | None) -> None:
        """Save a model with random weights and a tokenizer of bytes, as mlx_lm.convert would."""
        import mlx.core as mx
        from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

        kind, arguments = _get_classes(config)
        mx.random.seed(0)
        model: Any = kind(arguments.from_dict(config))
        model.set_dtype(mx.bfloat16)
        if bits:
            model, config = quantize_model(model, config, GROUP_SIZE, bits)
        save_model(self.path, model)
        save_config(config, self.path / "config.json")
        _save_tokenizer(self.path)

    def make_seeing(self, side: int) -> None:
        """Save a model that takes images, its processor, and a square image."""
        import mlx.core as mx
        from mlx.utils import tree_flatten
        from mlx_vlm.models.qwen2_vl import Model, ModelConfig, TextConfig, VisionConfig
        from PIL import Image

        built = ModelConfig.from_dict(dict(SEEING))
        built.text_config = TextConfig.from_dict(SEEING)
        built.vision_config = VisionConfig.from_dict(SEEING["vision_config"])
        mx.random.seed(0)
        parameters: Any = tree_flatten(Model(built).parameters())
        arrays = {name: array.astype(mx.bfloat16) for name, array in parameters}
        weights = str(self.path / "model.safetensors")
        mx.save_safetensors(weights, arrays, metadata={"format": "mlx"})
        pixels = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 784}
        for name, values in {"config": SEEING, "preprocessor_config": pixels}.items():
            (self.path / f"{name}.json").write_text(json.dumps(values))
        _save_tokenizer(self.path, chat_template=_TEMPLATE)
        Image.new("RGB", (side, side), (200, 30, 30)).save(self.path / "image.png")

    def allocations(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return what MLX's allocator takes for one buffer of each size."""
        import mlx.core as mx

        taken = []
        for size in sizes:
            mx.clear_cache()
            before = mx.get_active_memory()
            array = mx.zeros(size, mx.uint8)
            mx.eval(array)
            taken.append(mx.get_active_memory() - before)
            del array
        return tuple(taken)

    def refuses_largest_buffer(self) -> bool | None:
        """Return whether one byte above the largest buffer is refused, None without such a limit.

        Metal's allocator checks the size before it allocates (mlx/backend/metal/allocator.cpp).
        """
        import mlx.core as mx

        largest = mx.device_info().get("max_buffer_length")
        if not isinstance(largest, int):
            return None
        try:
            mx.eval(mx.zeros(largest + 1, mx.uint8))
        except (RuntimeError, ValueError):
            return True
        return False

    def wired(self) -> WiredAnswers | None:
        """Set a wired limit, one that must be refused, and the first again; None without Metal."""
        import mlx.core as mx

        if not mx.metal.is_available():
            return None
        most = int(mx.device_info()["max_recommended_working_set_size"])
        before = mx.set_wired_limit(min(_WIRED_BYTES, most))
        try:
            try:
                mx.set_wired_limit(most + _GIB)
                refuses = False
            except (ValueError, RuntimeError):
                refuses = True
        finally:
            reported = mx.set_wired_limit(before)
        restored = mx.set_wired_limit(before) == before
        return WiredAnswers(set_bytes=reported, refuses=refuses, is_restored=restored)


def _save_tokenizer(path: Path, **more: str) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(alphabet), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    unused = [f"<|{n}|>" for n in range(VOCABULARY - len(alphabet) - len(_IMAGE_MARKS))]
    tokenizer.add_special_tokens([*unused, *_IMAGE_MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": unused[0],
        **more,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
