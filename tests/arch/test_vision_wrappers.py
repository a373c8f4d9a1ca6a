"""Models that mlx-vlm alone has a class for, compared with that class."""

from importlib.util import find_spec
from typing import NamedTuple

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.machine.device import ANY_MAC
from memfit.estimators.mlx.kv_cache import kv_cache
from memfit.estimators.runtimes.facets import loaded_weights
from memfit.estimators.runtimes.mlx_vlm_trace import VisionTrace
from memfit.estimators.runtimes.registry import get_runtime, native_runtime
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import with_runtime
from memfit.estimators.weights.derived import derive
from tests.trace.vision_cases import WIDE, Case

CASES = {case.config["model_type"]: case for case in WIDE}
ONLY_MLX_VLM = [kind for kind, file in FAMILIES.items() if file == "vision_wrappers"]
# Of the Hub, for those that the class renames.
PUBLISHED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.visual."),
)


class Built(NamedTuple):
    case: Case
    model: Model
    trace: VisionTrace


@pytest.fixture(scope="module", params=ONLY_MLX_VLM)
def built(request: pytest.FixtureRequest) -> Built:
    if find_spec("mlx_vlm") is None:  # its import takes seconds
        pytest.skip("mlx-vlm is not installed")
    case = CASES[request.param]
    checkpoint = Checkpoint("model", "local", case.config, "config.json")
    model = build_model(case.config, "config.json")
    return Built(case, model, VisionTrace(checkpoint, None, "BF16"))


def test_parameters_are_those_of_the_class(built: Built) -> None:
    weights = built.trace.weights(None)
    derived = derive(built.model, None)
    assert derived.nbytes == sum(weights.values())
    paths = {name.removesuffix(".weight").removesuffix(".bias") for name in weights}
    assert {path for path, _ in built.model.all_modules()} == paths


def test_caches_are_those_of_the_class(built: Built) -> None:
    traced = built.trace.description(ANY_MAC)
    for tokens in (1, 300):
        workload = Workload(prompt_tokens=tokens, max_tokens=2)
        assert kv_cache(built.model, workload) == kv_cache(traced, workload)


def test_files_with_the_names_of_the_hub_are_loaded_whole(built: Built) -> None:
    weights = built.trace.weights(None)
    renames = PUBLISHED if built.case.config["model_type"].startswith("glm") else ()
    tensors = []
    for name, nbytes in weights.items():
        for new, old in renames:
            name = old + name.removeprefix(new) if name.startswith(new) else name
        tensors.append(Tensor(name, "BF16", (nbytes // 2,), nbytes))
    checkpoint = Checkpoint(
        "model", "local", built.case.config, "config.json", tensors=tuple(tensors)
    )
    sized = size(checkpoint, device=None, method="formula")
    assert loaded_weights(sized.runtime_model).loaded_bytes == sum(weights.values())


@pytest.mark.parametrize("kind", ONLY_MLX_VLM)
def test_mlx_lm_does_not_load_it(kind: str) -> None:
    checkpoint = Checkpoint("model", "local", CASES[kind].config, "config.json")
    assert native_runtime(checkpoint).name == "mlx-vlm"
    with pytest.raises(UnsupportedError, match=f"mlx-lm has no class for model_type {kind}"):
        with_runtime(size(checkpoint, device=None), get_runtime("mlx-lm"))


def test_layers_that_the_class_cannot_load_are_refused() -> None:
    config = {**CASES["internvl_chat"].config}
    config["llm_config"] = {**config.pop("text_config"), "model_type": "internlm2"}
    with pytest.raises(ConfigError, match=r"llm_config\.model_type: .*layers of Qwen"):
        build_model(config, "config.json")


@pytest.mark.parametrize("ratio", [1e-320, 3])
def test_a_ratio_that_leaves_no_patch_is_refused(ratio: float) -> None:
    config = {**CASES["internvl_chat"].config, "downsample_ratio": ratio}
    with pytest.raises(ConfigError, match=r"downsample_ratio: expected 1/14 to 1, got"):
        build_model(config, "config.json")
