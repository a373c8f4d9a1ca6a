"""The size after resizing equals that of the processors' own functions, for any image."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.plan import PlannedImage
from memfit.estimators.images.processor import image_plan
from tests.selection import examples

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")
SIDES = st.integers(1, 10_000)


def planned(kind: str, width: int, height: int) -> PlannedImage | None:
    """The plan of an image by the settings of published models, None where it is refused."""
    checkpoint = Checkpoint(kind, "config", {"model_type": kind}, "config.json")
    try:
        (image,) = image_plan(checkpoint, Images((ImageSize(width, height),))).images
    except InputError:
        return None
    return image


def expected(kind: str, width: int, height: int) -> tuple[int, int]:
    """Height and width by the processor's own function."""
    if kind.startswith("qwen"):
        from mlx_vlm.models.qwen3_vl import processing_qwen3_vl as qwen

        unit, least, most = (28, 3136, 12_845_056) if kind == "qwen2_vl" else (32, 65536, 16777216)
        found = qwen._smart_resize_image(height, width, unit, least, most)
    elif kind == "glm4v":
        from transformers.models.glm4v import image_processing_pil_glm4v as glm

        found = glm.smart_resize(2, height, width, 2, 28, 12544, 9_633_792)
    elif kind == "gemma4":
        from mlx_vlm.models.gemma4 import processing_gemma4 as gemma4

        found = gemma4.get_aspect_ratio_preserving_size(height, width, 16, 2520, 3)
    else:
        from mlx_vlm.models.pixtral import image_processing_pixtral as pixtral

        found = pixtral.get_resize_output_image_size((height, width), 1024, 16)
    height, width = found
    return height, width


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(["qwen2_vl", "qwen3_vl", "glm4v", "gemma4", "pixtral"]),
    sides=st.tuples(SIDES, SIDES),
)
@example(kind="qwen3_vl", sides=(1, 1))
@example(kind="glm4v", sides=(10_000, 50))
@example(kind="gemma4", sides=(10_000, 1))
@example(kind="pixtral", sides=(10_000, 10_000))
@example(kind="pixtral", sides=(1, 1025))
def test_any_size_is_resized_as_the_processor_does(kind: str, sides: tuple[int, int]) -> None:
    image: Any = planned(kind, *sides)
    try:
        height, width = expected(kind, *sides)
    except ValueError:
        height = width = 0
    if min(height, width) < 1:
        assert image is None
    else:
        assert (image.height, image.width) == (height, width)


@settings(max_examples=examples(40), deadline=None)
@given(sides=st.tuples(SIDES, SIDES))
@example(sides=(1, 10_000))
def test_any_image_has_the_tiles_that_the_processors_give_it(sides: tuple[int, int]) -> None:
    from mlx_vlm.models.lfm2_vl import processing_lfm2_vl as lfm2
    from mlx_vlm.models.phi3_v import processing_phi3_v as phi3
    from transformers.models.mllama import image_processing_pil_mllama as mllama

    width, height = sides
    images: dict[str, Any] = {
        kind: planned(kind, *sides) for kind in ("phi3_v", "lfm2_vl", "mllama")
    }
    wide, high = phi3._calc_hd_transform_size(width, height, 4)
    assert images["phi3_v"].tiles == (wide // 336) * (high // 336) + 1
    tiles = 1
    if lfm2._is_image_too_large(height, width, 256, 16, 2, 2.0):
        columns, rows, *_ = lfm2._get_grid_layout(height, width, 2, 10, 512)
        tiles = columns * rows + 1
    assert images["lfm2_vl"].tiles == tiles
    view = lfm2._smart_resize(height, width, 2, 64, 256, 16)
    assert (images["lfm2_vl"].width, images["lfm2_vl"].height) == view
    canvas = mllama.get_optimal_tiled_canvas(height, width, 4, 560)
    asked = Images((ImageSize(width, height),))
    plan = image_plan(Checkpoint("m", "config", {"model_type": "mllama"}, "config.json"), asked)
    mask = next(array for array in plan.arrays if array.name == "aspect_ratio_mask")
    assert sum(mask.values[0][0]) == canvas[0] * canvas[1] // 560**2
