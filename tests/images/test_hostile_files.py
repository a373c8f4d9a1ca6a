"""Any processor's file gives a plan or one line that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.estimators.base.errors import ConfigError, InputError, MemfitError, UnsupportedError
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from memfit.estimators.checkpoint.checkpoint_files import Directory
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import FAMILIES, image_plan
from memfit.estimators.images.settings import IMAGE_FILE, PROCESSOR_FILE, TOKENIZER_FILE
from tests.selection import examples

KEYS = (
    *("size", "patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"),
    *("crop_size", "max_image_size", "image_grid_pinpoints", "tile_size", "max_image_tiles"),
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate"),
    *("max_soft_tokens", "pooling_kernel_size", "downsample_factor", "encoder_patch_size"),
    *("image_seq_len", "image_seq_length", "spatial_merge_size", "do_image_splitting"),
    *("vision_feature_select_strategy", "num_additional_image_tokens", "num_crops"),
    *("image_processor", "added_tokens_decoder", "additional_special_tokens", "num_img_tokens"),
    *("image_size", "force_image_size", "downsample_ratio", "num_image_token", "use_thumbnail"),
    *("min_dynamic_patch", "max_dynamic_patch", "num_image_tokens", "vision_aspect_ratio"),
    *("candidate_resolutions", "max_patches", "base_image_input_size", "image_patch_size"),
    *("max_crops", "image_token_length_h", "image_token_length_w"),
)
IMAGE = Images((ImageSize(64, 64),))
numbers = st.sampled_from([0, 1, 2, 3, 14, 16, 224, 2**16, 2**31, 2**70, -1, 0.5, 1e300])
values = st.recursive(
    numbers | st.none() | st.booleans() | st.sampled_from(["", "default", "<image>"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["height", "width", "longest_edge", "shortest_edge", "content", *KEYS]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)
files = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)


class Texts(Directory):
    """Files by name, with their content."""

    def __init__(self, contents: dict[str, Any]) -> None:
        super().__init__(Path("model"))
        self.contents = contents

    def exists(self, name: str) -> bool:
        return name in self.contents

    def read(self, name: str, *, limit: int) -> bytes:
        return json.dumps(self.contents[name]).encode()


def checkpoint(kind: str, **contents: Any) -> Checkpoint:
    config: dict[str, Any] = {**contents.pop("config", {}), "model_type": kind}
    return Checkpoint("m", "local", config, "model/config.json", others=Texts(contents))


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(FAMILIES)),
    image=files,
    processor=files,
    tokenizer=files,
    sides=st.tuples(st.integers(1, 65536), st.integers(1, 65536)),
)
def test_any_file_gives_a_plan_or_one_line(
    kind: str, image: Any, processor: Any, tokenizer: Any, sides: tuple[int, int]
) -> None:
    contents = {IMAGE_FILE: image, PROCESSOR_FILE: processor, TOKENIZER_FILE: tokenizer}
    found = checkpoint(kind, config={**processor, "vision_config": image}, **contents)
    for asked in (
        Images((ImageSize(*sides), ImageSize(640, 480, 2))),
        Images(videos=(VideoSize(3, *sides),)),
    ):
        try:
            plan = image_plan(found, asked)
        except MemfitError as error:
            lines = str(error).splitlines()
        else:
            lines = []
            assert plan.token_count > 0
            assert all(side > 0 for array in plan.arrays for side in array.shape)
        assert len(lines) <= 1


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ({IMAGE_FILE: {"patch_size": "16"}}, "patch_size: expected an integer, got '16'"),
        ({IMAGE_FILE: {"size": []}}, "size: expected an object"),
        ({PROCESSOR_FILE: {"image_processor": 3}}, "image_processor: expected an object, got 3"),
    ],
)
def test_a_wrong_setting_is_named(contents: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        image_plan(checkpoint("qwen3_vl", **contents), IMAGE)
    assert str(raised.value).startswith("model/")


def test_a_processor_that_is_not_described_is_named() -> None:
    with pytest.raises(UnsupportedError, match="how a model of type florence2 takes images is not"):
        image_plan(checkpoint("florence2", config={"vision_config": {"a": 1}}), IMAGE)


def test_a_side_that_is_resized_to_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="to nothing"):
        image_plan(checkpoint("pixtral"), Images((ImageSize(60000, 2),)))
