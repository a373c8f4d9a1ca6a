"""mlx-lm's own model classes, built and run lazily: the reference for the formulas.

MLX arrays are lazy, so that building a class from a config, casting, quantising and pushing
zero tokens through it gives exact shapes without allocating.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from memfit.estimators.base.workload import Workload

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}

# Classes that always create a head, and drop it at load when the checkpoint has none.
_DROP_THE_HEAD = ("gemma3", "gemma3_text", "recurrent_gemma")


class Oracle:
    """One lazily built model of mlx-lm."""

    def __init__(self, config: Mapping[str, Any], dtype: str = "BF16") -> None:
        utils = pytest.importorskip("mlx_lm.utils")
        config = copy.deepcopy(dict(config))
        model_class, args_class = utils._get_classes(config)
        self.model: Any = model_class(args_class.from_dict(config))
        self.model.eval()
        predicate = getattr(self.model, "cast_predicate", lambda _: True)
        casted = [
            (k, v.astype(_DTYPES[dtype]))
            for k, v in tree_flatten(self.model.parameters())
            if mx.issubdtype(v.dtype, mx.floating) and predicate(k)
        ]
        self.model.load_weights(casted, strict=False)
        if config["model_type"] in _DROP_THE_HEAD and config.get("tie_word_embeddings", True):
            self.model.sanitize({k: v for k, v in casted if "lm_head" not in k})

    def quantize(self, bits: int, group_size: int = 64, mode: str = "affine") -> "Oracle":
        """Quantise in place as mlx_lm.convert does, predicates included."""
        from mlx_lm.utils import quantize_model

        self.model, _ = quantize_model(self.model, {}, group_size, bits, mode=mode)
        return self

    def tensors(self) -> dict[str, mx.array]:
        """Return the parameters by path."""
        return dict(tree_flatten(self.model.parameters()))

    def weight_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(v.nbytes for v in self.tensors().values())

    def parameters(self) -> int:
        """Return the number of parameters; call it before ``quantize``."""
        return sum(v.size for v in self.tensors().values())

    def run(self, workload: Workload) -> list[Any]:
        """Push zero tokens through the model by generate_step's loop; return the caches."""
        from mlx_lm.generate import maybe_quantize_kv_cache
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model, workload.max_kv_size)
        steps = [*workload.prefill_chunks(), *[1] * (1 + workload.max_tokens)]
        for tokens in steps:
            self.model(mx.zeros((workload.batch, tokens), mx.int32), cache=caches)
            maybe_quantize_kv_cache(
                caches, workload.quantized_kv_start, workload.kv_group_size, workload.kv_bits
            )
        return caches


def cache_bytes(caches: list[Any]) -> tuple[int, int]:
    """Return the bytes of keys and values, and of states, over all layers."""
    from mlx_lm.models.cache import ArraysCache

    kv = state = 0
    for cache in _leaves(caches):
        if isinstance(cache, ArraysCache):
            state += cache.nbytes
        elif not cache.empty():
            kv += cache.nbytes
    return kv, state


def _leaves(caches: list[Any]) -> Iterator[Any]:
    for cache in caches:
        nested = getattr(cache, "caches", None)
        if nested is None:
            yield cache
        else:
            yield from _leaves(nested)
