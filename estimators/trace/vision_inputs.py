"""The arrays that a run of mlx-vlm is given: ids with placeholders, a mask, pixels and grids.

Ids, grids and masks are real arrays, because classes compute shapes from them. Pixels are real too,
all equal, so that they take no memory.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.images.plan import ImagePlan, InputArray

_TEXT_TOKEN = 1
# Placeholders of classes that look for other ids than their config names.
_PLACEHOLDERS = {"phi3_v": -1}


def inputs(model: Any, plan: ImagePlan, workload: Workload) -> dict[str, Any]:
    """Return the arrays of a prompt that begins with its images."""
    import mlx.core as mx

    ids: list[int] = []
    rows, plan = workload.batch, replace(plan, arrays=tuple(_of_rows(plan, workload.batch)))
    for image in plan.images:
        for run in image.tokens:
            ids += [_token(model, run.kind)] * run.count
    ids += [_TEXT_TOKEN] * max(1, workload.prompt_tokens - plan.added - len(ids))
    given: dict[str, Any] = {
        "input_ids": mx.array([ids] * rows),
        "attention_mask": mx.ones((rows, len(ids)), mx.int32),
    }
    for name in dict.fromkeys(array.name for array in plan.arrays):
        result = [_input(array, plan) for array in plan.arrays if array.name == name]
        given[name] = result[0] if len(result) == 1 else result
    if model.config.model_type in ("diffusion_gemma", "gemma4", "gemma4_unified"):
        # By it an image attends to all of itself, and a prompt is prefilled in one call.
        given["mm_token_type_ids"] = (given["input_ids"] == _token(model, "image")).astype(mx.int32)
    if "images_spatial_crop" in given:
        # deepseek_vl_v2.py and those of DeepSeek-OCR put features where it is true.
        given["images_seq_mask"] = given["input_ids"] == _token(model, "image")
        crops = given["images_spatial_crop"]
        if crops.ndim > 2:
            # It reads a row for each tile, also beyond the end; a row of zeros ends its loop.
            rest = given["pixel_values"].shape[1] - crops.shape[1]
            given["images_spatial_crop"] = mx.pad(crops, [(0, 0), (0, rest), (0, 0)])
    mx.eval(given)
    return given


def _of_rows(plan: ImagePlan, rows: int) -> Iterator[InputArray]:
    """Yield the arrays of prompts with the same images: longer ones, or a longer list of them."""
    names = [array.name for array in plan.arrays]
    if len(set(names)) < len(names):
        yield from plan.arrays * rows
        return
    for array in plan.arrays:
        first, *others = array.shape
        yield replace(array, shape=(first * rows, *others), values=array.values * rows)


def _input(array: InputArray, plan: ImagePlan) -> Any:
    import mlx.core as mx

    dtype = getattr(mx, array.dtype)
    shapes = next((each.values for each in plan.arrays if each.name == "spatial_shapes"), ())
    if array.name == "pixel_attention_mask" and shapes:
        # Of each image the patches that it has; the others fill the row.
        patches = mx.array([[height * width] for height, width in shapes])
        return (mx.arange(array.shape[1]) < patches).astype(dtype)
    if array.values:
        return mx.array(array.values, dtype)
    # One element in memory, whatever the shape.
    return mx.broadcast_to(mx.array(1, dtype), array.shape)


def _token(model: Any, kind: str) -> int:
    """Return the id of a placeholder, and set every name of it in the class's config to that."""
    if kind == "text":
        return _TEXT_TOKEN
    if own := _PLACEHOLDERS.get(model.config.model_type):
        return own
    names = (f"{kind}_token_index", f"{kind}_token_id", f"{kind}_patch_id")
    tokens = {name: getattr(model.config, name, None) for name in names}
    given = {name: token for name, token in tokens.items() if isinstance(token, int)}
    token = next(iter(given.values()), _TEXT_TOKEN)
    for name in given:  # Where a config has two of them, the class reads either.
        setattr(model.config, name, token)
    return token
