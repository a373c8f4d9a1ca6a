"""The flags of a server of mlx-lm or mlx-vlm that matter for memory."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes


class ServerSettings(Struct, frozen=True, kw_only=True):
    """The flags of a server that matter for memory, with its defaults.

    mlx_vlm.server has the prefill step and the last two; it prefills 8 prompts together, decodes 32
    requests, and keeps no prompt caches.
    """

    prefill_step: int = 2048
    prompt_concurrency: int = 8
    decode_concurrency: int = 32
    prompt_cache_size: int = 10
    prompt_cache_bytes: Bytes | None = None
    max_num_seqs: int | None = None
    """Requests that mlx_vlm.server takes out of its queue; None: all."""
    vision_cache_size: int = 20
    """Requests for which mlx_vlm.server keeps features of images, where the model's class does."""

    @property
    def rows(self) -> int:
        """The most requests that run together (BatchGenerator, completion_batch_size)."""
        return max(self.prompt_concurrency, self.decode_concurrency)
