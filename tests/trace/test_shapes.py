"""Traced bytes compared with mlx-lm's classes, run through its loop chunk by chunk."""

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memfit.estimators.trace.traced_model import TracedModel, TracedShapes  # noqa: E402
from tests.mlx_memory import settled_bytes  # noqa: E402
from tests.oracle import Oracle, cache_bytes  # noqa: E402
from tests.selection import FEW_CONFIGS, share  # noqa: E402
from tests.trace.tracing import trace_shapes  # noqa: E402

HERE = Path(__file__).parent
DESCRIBED = [
    json.loads(path.read_text()) for path in sorted((HERE.parent / "arch/cases").glob("*.json"))
]
# Small sizes, as in mlx-lm's tests/test_models.py; also of classes without a test there.
UNDESCRIBED = json.loads((HERE / "cases.json").read_text())
CASES = {f"{i}-{case['model_type']}": case for i, case in enumerate(DESCRIBED + UNDESCRIBED)}
QUICK_CASES = {name for name in CASES if name.partition("-")[2] in FEW_CONFIGS}
# A class that needs a package which is not installed.
NOT_BUILT = ("olmo",)
# mlx-lm cannot run these here: the others have a Metal kernel, which a trace does not run.
NOT_HERE = ("bitnet", "muse_spark", *NOT_BUILT)
# mlx-lm cannot run these in its batch generator: they take one position for all sequences.
NOT_IN_BATCHES = ("gpt_bigcode",)

WORKLOADS = {
    "one token": Workload(prompt_tokens=1),
    "chunks, batch": Workload(prompt_tokens=150, max_tokens=3, prefill_step=64, batch=2),
    "max_kv_size": Workload(prompt_tokens=150, max_tokens=3, prefill_step=40, max_kv_size=32),
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}


def figures(shapes: TracedShapes) -> tuple[int, int, int]:
    return shapes.weight_bytes, shapes.kv_bytes, shapes.ssm_bytes


@lru_cache(maxsize=1)
def built(name: str) -> tuple[TracedModel, Oracle, int]:
    """Return a case as built by memfit and by mlx-lm, once for all workloads, and its weights."""
    oracle = Oracle(CASES[name])
    # A call may add arrays to the modules (gemma3n), which are not weights.
    return TracedModel(CASES[name], "metal"), oracle, oracle.weight_bytes()


def walked(config: dict[str, Any], workload: Workload) -> tuple[int, int, int]:
    oracle = Oracle(config)
    weights = oracle.weight_bytes()
    return (weights, *cache_bytes(oracle.run(workload)))


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        pytest.param(
            name,
            workload,
            id=f"{name}-{kind}",
            marks=() if name in QUICK_CASES else pytest.mark.exhaustive,
        )
        for part, (kind, workload) in enumerate(WORKLOADS.items())
        for name in share(CASES, part, len(WORKLOADS))
    ],
)
def test_a_jump_gives_the_same_caches_as_walking_every_chunk(name: str, workload: Workload) -> None:
    if CASES[name]["model_type"] in NOT_HERE:
        pytest.skip("mlx-lm cannot run it on this machine")
    before = settled_bytes()
    model, oracle, weights = built(name)
    if workload.batch > 1 and CASES[name]["model_type"] in NOT_IN_BATCHES:
        with pytest.raises(UnsupportedError, match="GPTBigCodeModel: it takes one position"):
            model.shapes(workload)
        return
    traced = figures(model.shapes(workload))
    assert mx.get_peak_memory() - before < 1_000_000
    assert traced == (weights, *cache_bytes(oracle.run(workload)))


@pytest.mark.parametrize(
    "workload",
    [
        Workload(prompt_tokens=700, max_tokens=2, prefill_step=100),
        Workload(prompt_tokens=700, max_tokens=300, prefill_step=512, batch=3),
        Workload(prompt_tokens=513, max_tokens=0, prefill_step=256),
        Workload(prompt_tokens=300, max_tokens=9, kv_bits=8, quantized_kv_start=0),
        Workload(prompt_tokens=300, max_tokens=9, kv_bits=4, quantized_kv_start=305),
        Workload(prompt_tokens=300, max_tokens=9, kv_bits=4, quantized_kv_start=310),
        Workload(prompt_tokens=300, max_tokens=99, prefill_step=90, max_kv_size=310),
    ],
)
def test_every_kind_of_growth_equals_walking_every_chunk(workload: Workload) -> None:
    config = {**LLAMA, "head_dim": 64}
    assert figures(trace_shapes(config, workload)) == walked(config, workload)


def test_a_million_tokens_are_as_quick_as_a_thousand() -> None:
    workload = Workload(prompt_tokens=1_000_001, max_tokens=1)
    shapes = trace_shapes({**LLAMA, "head_dim": 32}, workload)
    assert shapes.allocated_tokens == 1_000_192  # the next multiple of 256
    assert shapes.held_tokens == 1_000_002
    assert shapes.kv_bytes == 1_000_192 * 3 * 2 * 2 * 32 * 2


def test_a_class_with_a_kernel_for_other_machines_is_sized() -> None:
    config = next(case for case in UNDESCRIBED if case["model_type"] == "muse_spark")
    shapes = trace_shapes(config, Workload(prompt_tokens=64))
    assert shapes.weight_bytes == Oracle(config).weight_bytes()
    # Three windows of 64 tokens and a full layer of 256, keys and values, 2 heads of 32, 2 bytes.
    assert shapes.kv_bytes == (3 * 64 + 256) * 2 * 2 * 32 * 2


def test_bitnet_is_sized_where_its_kernel_cannot_run() -> None:
    config = next(case for case in UNDESCRIBED if case["model_type"] == "bitnet")
    shapes = trace_shapes(config, Workload(prompt_tokens=64))
    assert shapes.weight_bytes == Oracle(config).weight_bytes()
    heads, width = config["num_key_value_heads"], config["hidden_size"]
    width //= config["num_attention_heads"]
    assert shapes.kv_bytes == 256 * 2 * heads * width * 2 * config["num_hidden_layers"]


@pytest.mark.parametrize(
    "quantize",
    [Quantization(4, 64), Quantization(6, 32), Quantization(4, 32, "mxfp4")],
    ids=lambda q: f"{q.mode}-{q.bits}-{q.group_size}",
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_conversion_gives_the_same_tensors_as_mlx_lm(name: str, quantize: Quantization) -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == name)
    oracle = Oracle(config).quantize(quantize.bits, quantize.group_size, quantize.mode)
    shapes = trace_shapes(config, Workload(prompt_tokens=9), quantize=quantize)
    assert dict(shapes.weights) == {path: t.nbytes for path, t in oracle.tensors().items()}


def headers(tensors: dict[str, Any]) -> list[Tensor]:
    names = {"bfloat16": "BF16", "float32": "F32", "uint32": "U32", "uint8": "U8"}
    return [
        Tensor(path, names[str(t.dtype).rpartition(".")[2]], tuple(t.shape), t.nbytes)
        for path, t in tensors.items()
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "mixtral"])
def test_headers_decide_which_tensors_are_quantised_and_how(name: str) -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == name)
    saved = Oracle(config).quantize(4, 32).tensors()
    declared = {**config, "quantization": {"group_size": 32, "bits": 4}}
    shapes = trace_shapes(declared, Workload(prompt_tokens=9), tensors=headers(saved))
    assert dict(shapes.weights) == {path: t.nbytes for path, t in saved.items()}


def test_experts_in_their_first_layout_are_stacked_by_the_class() -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == "mixtral")
    wanted = {path: t.nbytes for path, t in Oracle(config).tensors().items()}
    shapes = trace_shapes(config, Workload(prompt_tokens=9), tensors=list(_one_by_one(config)))
    assert dict(shapes.weights) == wanted


def _one_by_one(config: dict[str, Any]) -> Any:
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for tensor in headers(Oracle(config).tensors()):
        parent, found, rest = tensor.name.partition(".switch_mlp.")
        if not found:
            yield tensor
            continue
        matrix = names[rest.split(".")[0]]
        for expert in range(tensor.shape[0]):
            name = f"{parent}.experts.{expert}.{matrix}.weight"
            yield Tensor(name, tensor.dtype, tensor.shape[1:], tensor.nbytes // tensor.shape[0])


def test_mxfp4_experts_as_openai_ships_them_stay_packed() -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == "gpt_oss")
    shipped = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    wanted = {path: t.nbytes for path, t in Oracle(config).tensors().items()}
    for path in list(wanted):
        if ".mlp.experts." in path and path.endswith(".weight"):
            values = wanted.pop(path) // 2
            wanted[path], wanted[path.replace(".weight", ".scales")] = values // 2, values // 32
    shapes = trace_shapes(shipped, Workload(prompt_tokens=9), tensors=list(_packed(config)))
    assert dict(shapes.weights) == wanted
    assert shapes.unread_format is None


def _packed(config: dict[str, Any]) -> Any:
    tensors = {tensor.name: tensor for tensor in headers(Oracle(config).tensors())}
    for name, tensor in tensors.items():
        parent, found, leaf = name.partition(".mlp.experts.")
        if not found:
            yield tensor
        elif not leaf.startswith("up_proj"):
            yield from _one_pack(f"{parent}.mlp.experts.", leaf, tensor)


def _one_pack(parent: str, leaf: str, tensor: Tensor) -> Any:
    matrix, _, kind = leaf.partition(".")
    experts, rows, *rest = tensor.shape
    if matrix == "gate_proj":  # gate and up are rows of one matrix, in turn
        matrix, rows = "gate_up_proj", 2 * rows
    if kind == "bias":
        yield Tensor(f"{parent}{matrix}_bias", "BF16", (experts, rows), 2 * experts * rows)
        return
    groups = rest[0] // 32
    shape = (experts, rows, groups)
    size = experts * rows * groups
    yield Tensor(f"{parent}{matrix}_blocks", "U8", (*shape, 16), 16 * size)
    yield Tensor(f"{parent}{matrix}_scales", "U8", shape, size)


def test_a_format_that_is_not_packed_as_declared_is_reported() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    shapes = trace_shapes(config, Workload(prompt_tokens=9))
    assert shapes.unread_format == "gptq"
    assert shapes.weight_bytes == Oracle(LLAMA).weight_bytes()


def loaded_by_mlx_lm(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = load_model(folder)
    return {path: array.nbytes for path, array in tree_flatten(model.parameters())}


def test_openais_config_alone_gives_the_tensors_mlx_lm_loads(tmp_path: Path) -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == "gpt_oss")
    shipped = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    dtypes = {"BF16": mx.bfloat16, "U8": mx.uint8, "F32": mx.float32}
    tensors = {t.name: mx.zeros(t.shape, dtypes[t.dtype]) for t in _packed(config)}
    shapes = trace_shapes(shipped, Workload(prompt_tokens=9))
    assert dict(shapes.weights) == loaded_by_mlx_lm(tmp_path, shipped, tensors)
    assert shapes.unread_format is None


def test_an_awq_config_alone_gives_the_tensors_mlx_lm_loads(tmp_path: Path) -> None:
    block = {"quant_method": "awq", "bits": 4, "group_size": 64}
    config = {**LLAMA, "quantization_config": block}
    tensors: dict[str, Any] = {}
    for path, array in Oracle(LLAMA).tensors().items():
        if "_proj.weight" not in path:
            tensors[path] = array
            continue
        base, (rows, columns) = path.removesuffix("weight"), array.shape
        tensors[f"{base}qweight"] = mx.zeros((columns, rows // 8), mx.uint32)
        tensors[f"{base}qzeros"] = mx.zeros((columns // 64, rows // 8), mx.uint32)
        tensors[f"{base}scales"] = mx.zeros((columns // 64, rows), mx.float16)
    shapes = trace_shapes(config, Workload(prompt_tokens=9))
    assert dict(shapes.weights) == loaded_by_mlx_lm(tmp_path, config, tensors)


def test_fp8_in_blocks_is_dequantised_at_load() -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == "minimax")
    plain = headers(Oracle(config).tensors())
    packed = [new for tensor in plain for new in _fp8(tensor)]
    shapes = trace_shapes(config, Workload(prompt_tokens=9), tensors=packed)
    assert dict(shapes.weights) == {tensor.name: tensor.nbytes for tensor in plain}


def _fp8(tensor: Tensor) -> Any:
    if len(tensor.shape) != 2 or "proj" not in tensor.name:
        yield tensor
        return
    yield tensor._replace(dtype="F8_E4M3", nbytes=tensor.nbytes // 2)
    blocks = tuple(-(-length // 128) for length in tensor.shape)
    yield Tensor(f"{tensor.name}_scale_inv", "F32", blocks, 4 * blocks[0] * blocks[1])


def test_a_tensor_without_a_parameter_is_rejected_with_mlx_lm_s_message() -> None:
    tensors = [*headers(Oracle(LLAMA).tensors()), Tensor("model.extra", "BF16", (2,), 4)]
    with pytest.raises(UnsupportedError, match=r"parameters not in model: *model\.extra"):
        trace_shapes(LLAMA, Workload(prompt_tokens=9), tensors=tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such"}, "Model type no_such not supported"),
        ({"vocab_size": None}, "cfg.json: mlx_lm.models.llama"),
        ({"hidden_size": 10**30}, "cfg.json: mlx_lm.models.llama"),
        ({"num_attention_heads": "many"}, "cfg.json: mlx_lm.models.llama"),
        ({"num_hidden_layers": 15_000}, "^cfg.json: num_hidden_layers .* more than 20000 modules"),
        ({"num_hidden_layers": 10**9}, "^cfg.json: num_hidden_layers .* more than 20000 modules"),
        ({"num_hidden_layers": 10**12}, "^cfg.json: num_hidden_layers .* more than 20000 modules"),
        ({"model_type": "cache"}, "cfg.json: .* mlx-lm has no such class"),
        ({"model_file": "modelling.py"}, "never runs"),
    ],
)
def test_a_failing_class_gives_a_one_line_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as raised:
        trace_shapes({**LLAMA, **change}, Workload(prompt_tokens=9), name="cfg.json")
    assert "\n" not in str(raised.value)


def test_a_missing_key_is_reported_with_mlx_lms_name() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    with pytest.raises(UnsupportedError, match=r"llama\.ModelArgs: needs 'rms_norm_eps'"):
        trace_shapes(config, Workload(prompt_tokens=9))


def test_a_repository_s_own_code_is_not_run_and_auto_map_is_not_read() -> None:
    config = {**LLAMA, "auto_map": {"AutoModel": "modelling.Evil"}}
    assert trace_shapes(config, Workload(prompt_tokens=9)).weight_bytes > 0


def test_a_rotating_cache_that_mlx_lm_does_not_quantise_names_the_option() -> None:
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    sliding = {"layer_types": layers, "sliding_window": 32}
    workload = Workload(prompt_tokens=99, kv_bits=4, quantized_kv_start=0)
    with pytest.raises(UnsupportedError, match="--kv-bits: RotatingKVCache Quantization NYI"):
        trace_shapes({**LLAMA, **sliding, "head_dim": 64}, workload)


def test_tagged_floats_are_read_as_in_mlx_lm() -> None:
    config = next(case for case in DESCRIBED if case["model_type"] == "nemotron_h")
    tagged = {**config, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    plain = {**config, "time_step_limit": [0.0, float("inf")]}
    workload = Workload(prompt_tokens=9)
    assert trace_shapes(tagged, workload) == trace_shapes(plain, workload)


def test_imports_of_mlx_by_other_code_are_not_changed() -> None:
    import mlx.nn as nn
    from mlx_lm.models import llama

    before = (mx.compile, mx.eval, mx.array.item, mx.metal.is_available, nn.Module.__init__)
    trace_shapes(LLAMA, Workload(prompt_tokens=9))
    after = (mx.compile, mx.eval, mx.array.item, mx.metal.is_available, nn.Module.__init__)
    assert before == after
    assert sys.modules["mlx.nn"] is nn
    assert sys.modules["mlx_lm.models.llama"] is llama
    assert mx.array(3).item() == 3


def test_transformers_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from memfit.estimators.trace.traced_model import TracedModel\n"
        "from memfit.estimators.base.workload import Workload\n"
        f"TracedModel({LLAMA!r}, 'metal').shapes(Workload(prompt_tokens=9))\n"
        "heavy = {'transformers', 'huggingface_hub', 'numpy', 'mlx_lm'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "[]\n"
