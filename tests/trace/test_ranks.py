"""A rank's weights and caches by the table of rules and by mlx-lm's own shard and pipeline."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.arch.registry import FAMILIES, class_row
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.devices import working_set_device
from memfit.estimators.runtimes.facets import Sharding, load_bytes
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel, for_rank

pytest.importorskip("mlx_lm")

from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import library_for
from tests.selection import FEW_CONFIGS
from tests.trace.test_shapes import UNDESCRIBED

CASES = sorted((Path(__file__).parents[1] / "arch" / "cases").glob("*.json"))
WORKLOAD = Workload(prompt_tokens=300, max_tokens=3, prefill_step=128)
SIZE = 2
PARALLEL: tuple[Parallel, ...] = ("tensor", "pipeline")
ROWS = {model_type: class_row(model_type) for model_type in FAMILIES}
TENSOR = {each for each, row in ROWS.items() if row and row.tensor is not None}
PIPELINE = {each for each, row in ROWS.items() if row and row.pipeline}
# In cases/ these have heads that do not divide, which would leave their rules untested.
DIVIDING: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {"num_attention_heads": 4}},
    "step3p5": {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}},
}
# Of the undescribed classes with either method; the others are in CASES.
BY_CLASS = (
    *("bailing_hybrid", "deepseek_v41", "exaone_moe", "glm4_moe_lite", "iquestloopcoder"),
    *("kimi_k3", "longcat_flash", "longcat_flash_ngram", "minimax_m3_vl", "mistral4"),
)


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    for key, changes in DIVIDING.get(path.stem, {}).items():
        config[key] |= changes
    return config


def figures(
    config: dict[str, Any], method: MethodSetting, rank: Rank
) -> tuple[int, int, int] | str:
    """Weights, keys and values, and states of a rank; why there are none where it has none."""
    name = config["model_type"]
    checkpoint = Checkpoint(id=name, source="config", config=config, config_name=name)
    try:
        whole = size(checkpoint, device=working_set_device(2**40), method=method)
        return _figures(for_rank(whole, rank))
    except UnsupportedError:
        return "refused"


def _figures(sized: SizedModel) -> tuple[int, int, int]:
    found = sized.figures_for(WORKLOAD)
    return sized.footprint.loaded_bytes, found.kv.nbytes, found.ssm_bytes


def described(path: Path) -> bool:
    return json.loads(path.read_text())["model_type"] in {*TENSOR, *PIPELINE}


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem in FEW_CONFIGS else pytest.param(path, marks=pytest.mark.exhaustive)
        for path in CASES
        if described(path)
    ],
    ids=lambda path: path.stem,
)
def test_rules_and_class_agree(path: Path) -> None:
    config, model_type = config_of(path), json.loads(path.read_text())["model_type"]
    for parallel, index in product(PARALLEL, range(SIZE)):
        if model_type in (TENSOR if parallel == "tensor" else PIPELINE):
            rank = Rank(index, SIZE, parallel)
            assert figures(config, "formula", rank) == figures(config, "trace", rank), rank


def test_formulas_keep_the_traced_load_of_a_rank() -> None:
    config = config_of(next(path for path in CASES if path.stem == "llama"))
    checkpoint = Checkpoint(id="llama", source="config", config=config, config_name="llama")
    part = for_rank(size(checkpoint, device=None, method="trace"), Rank(0, SIZE, "tensor"))
    by_formula = part.formula_view().runtime_model
    assert load_bytes(by_formula) == load_bytes(part.runtime_model) > part.resident_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", [path for path in CASES if described(path)], ids=lambda p: p.stem)
def test_packed_matrices_divide_where_the_class_divides_them(path: Path) -> None:
    config = config_of(path)
    config["quantization"] = {"bits": 4, "group_size": 32}
    for index in range(SIZE):
        if config["model_type"] in TENSOR:
            rank = Rank(index, SIZE, "tensor")
            assert figures(config, "formula", rank) == figures(config, "trace", rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BY_CLASS)
def test_a_class_without_a_formula_is_described_for_each_rank(name: str) -> None:
    config = next(case for case in UNDESCRIBED if case["model_type"] == name)
    checkpoint = Checkpoint(id=name, source="config", config=config, config_name=name)
    if name == "bailing_hybrid":  # its ranks have whole groups of layers
        config = {**config, "num_hidden_layers": 2 * config["num_hidden_layers"]}
        checkpoint = replace(checkpoint, config=config)
    whole = size(checkpoint, device=working_set_device(2**40))
    sharding = whole.runtime_model.facet(Sharding)
    assert sharding
    parallel = sharding.parallel(None)
    for index in range(SIZE):
        part = for_rank(whole, Rank(index, SIZE, parallel))
        by_formula = part.formula_view()
        assert _figures(part) == _figures(by_formula)
        assert part.footprint.loaded_bytes < whole.footprint.loaded_bytes


def test_the_rows_name_the_classes_with_each_method() -> None:
    with tracing():
        library = library_for("cpu")
        utils = library.load("mlx_lm.utils")
        found: dict[str, set[str]] = {"shard": set(), "pipeline": set()}
        for path in CASES:
            config = json.loads(path.read_text())
            model_class, arguments = utils._get_classes(config)
            model = model_class(arguments.from_dict(config))
            if hasattr(model, "shard"):
                found["shard"].add(config["model_type"])
            if hasattr(getattr(model, "model", None), "pipeline"):
                found["pipeline"].add(config["model_type"])
    assert found == {"shard": TENSOR, "pipeline": PIPELINE}
