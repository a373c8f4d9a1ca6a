"""Small models with images, run with mlx-vlm on the CPU: what MLX itself holds at most."""

import copy
from functools import cache
from typing import Any

from memfit.estimators.trace.libraries import PrivateLibrary
from memfit.estimators.trace.vision_builder import made
from memfit.estimators.trace.vision_inputs import inputs
from memfit.estimators.trace.vision_loops import batch_generating, denoising
from tests.mlx_memory import settled_bytes
from tests.trace.vision_cases import Case


@cache
def library() -> PrivateLibrary:
    """mlx-vlm's modules with MLX as it is: they compute."""
    return PrivateLibrary("computing")


def measured(case: Case, caches: list[Any] | None = None) -> int:
    """Return the peak of a run until the second token, with the model's weights.

    Its caches are added to ``caches``.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    utils, nn = library().load("mlx_vlm.utils"), library().load("mlx.nn")
    model = made(utils, nn, copy.deepcopy(case.config), case.dtype)
    mx.eval(model.parameters())
    given: dict[str, Any] = inputs(model, case.plan, case.workload)
    given = tree_map(mx.contiguous, given)  # a value may be a list of arrays
    mx.eval(given)
    before = settled_bytes()
    # A head may be the array of the embedding.
    weights = {id(array): array.nbytes for _, array in tree_flatten(model.parameters())}
    own = sum(weights.values()) + sum(array.nbytes for _, array in tree_flatten(given))
    if hasattr(model, "diffusion_decoder_logits"):
        loop = library().load("mlx_vlm.generate.diffusion").stream_diffusion_generate
        steps = denoising(loop, model, given, case.prefill_step)
    else:
        steps = _generating(model, given, case, caches)
    for _ in steps:
        pass
    # Other tests' arrays may be alive in this process.
    peak: int = mx.get_peak_memory() - before + own
    return peak


def _generating(model: Any, given: dict[str, Any], case: Case, caches: list[Any] | None) -> Any:
    loop = library().load("mlx_vlm.generate.ar")
    if case.batch > 1:
        return batch_generating(loop, model, given, case.workload)
    if caches is not None:
        make = library().load("mlx_vlm.models.cache").make_prompt_cache
        caches += make(model.language_model)
    return loop.generate_step(
        given.pop("input_ids"),
        model,
        given.pop("pixel_values", None),
        given.pop("attention_mask"),
        max_tokens=2,
        temperature=0.0,
        prompt_cache=caches,
        prefill_step_size=case.prefill_step,
        kv_bits=case.kv_bits,
        quantized_kv_start=case.workload.quantized_kv_start,
        **given,
    )
