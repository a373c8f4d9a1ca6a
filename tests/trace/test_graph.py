"""Recorded graphs compared with MLX's own: what is evaluated, fused, kept and counted."""

import importlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.trace.graph_format import Call, Trace, from_json, to_json

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memfit.estimators.trace import recording  # noqa: E402
from memfit.estimators.trace.isolation import tracing  # noqa: E402
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for, recorded  # noqa: E402
from memfit.estimators.trace.recording import GraphError, record_call  # noqa: E402
from tests.oracle import Oracle  # noqa: E402
from tests.trace.tracing import record  # noqa: E402

HERE = Path(__file__).parent
ARCH_CASES = HERE.parent / "arch/cases"
CPU, METAL, CUDA = (
    TraceTarget(backend="cpu"),
    TraceTarget(backend="metal"),
    TraceTarget(backend="cuda"),
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}


def case(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ARCH_CASES / f"{name}.json").read_text())
    return config


def counts(call: Call) -> Counter[str]:
    return Counter(node.name for node in call.nodes)


def the(trace: Trace, phase: Any) -> Call:
    call = trace.call(phase)
    assert call is not None
    return call


def test_calls_are_recorded_in_the_order_of_mlx_lm() -> None:
    trace = record(LLAMA, Workload(prompt_tokens=600, max_tokens=5, prefill_step=256), target=METAL)
    described = [(call.phase, call.tokens, call.position) for call in trace.calls]
    assert described == [
        ("first_chunk", 256, 0),
        ("full_chunk", 256, 256),
        ("last_chunk", 87, 512),
        ("last_token", 1, 599),
        ("decode", 1, 604),
    ]


def test_a_decode_step_that_allocates_a_longer_buffer_is_a_separate_call() -> None:
    trace = record(LLAMA, Workload(prompt_tokens=700, max_tokens=100), target=METAL)
    growing = the(trace, "growing")
    assert growing.position == 768
    assert counts(growing)["Concatenate"] == 2 * 3  # keys and values of three layers
    assert counts(the(trace, "decode"))["Concatenate"] == 0


def test_the_call_that_quantises_all_caches_is_recorded() -> None:
    workload = Workload(
        prompt_tokens=900, max_tokens=1, prefill_step=128, kv_bits=8, quantized_kv_start=300
    )
    trace = record(LLAMA, workload, target=METAL)
    converting = the(trace, "converting")
    assert (converting.tokens, converting.position) == (128, 256)
    assert counts(converting)["Quantize"] == 2 * 3
    assert counts(the(trace, "first_chunk"))["Quantize"] == 0
    held = [converting.arrays[position].dtype for position in converting.held]
    assert Counter(held) == {"U32": 6, "BF16": 12}


@pytest.mark.parametrize("workload", [(700, 2, 256), (900, 30, 128)])
@pytest.mark.parametrize("name", ["llama_sliding", "gemma3n", "llama4_text", "qwen3_next", "mimo"])
def test_a_jump_starts_a_call_with_the_caches_that_walking_gives(
    name: str, workload: tuple[int, int, int]
) -> None:
    prompt, generated, step = workload
    trace = record(
        case(name),
        Workload(prompt_tokens=prompt, max_tokens=generated, prefill_step=step),
        target=METAL,
    )
    for call in trace.calls[1:]:
        # The loop's progress when the call begins, as a separate workload.
        beyond = max(0, call.position - prompt)
        walked = Workload(
            prompt_tokens=min(call.position, prompt) + (call.position < prompt),
            max_tokens=beyond,
            prefill_step=step,
        )
        assert cache_shapes(call) == walked_shapes(case(name), walked, call.position >= prompt)


def cache_shapes(call: Call) -> Counter[tuple[int, ...]]:
    return Counter(call.arrays[position].shape for position in call.of_role("cache"))


def walked_shapes(
    config: dict[str, Any], workload: Workload, last_token: bool
) -> Counter[tuple[int, ...]]:
    from mlx_lm.models.cache import make_prompt_cache

    from memfit.estimators.trace.leaves import caches_of

    model = Oracle(config).model
    caches = make_prompt_cache(model)
    steps = [*workload.prefill_chunks(), *[1] * (last_token + workload.max_tokens)]
    for tokens in steps:
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
    return Counter(tuple(leaf.array.shape) for leaf in caches_of(caches))


def test_a_chunk_evaluates_its_caches_and_a_step_its_token() -> None:
    trace = record(LLAMA, Workload(prompt_tokens=300, prefill_step=256, max_tokens=1), target=METAL)
    chunk, step = the(trace, "first_chunk"), the(trace, "last_token")
    assert [chunk.arrays[i].shape for i in chunk.evaluated] == [(1, 2, 256, 64)] * 6
    assert chunk.held == chunk.evaluated
    token, logprobs = (step.arrays[i] for i in step.evaluated)
    assert (token.shape, logprobs.shape) == ((1,), (320,))
    assert len(step.held) == 2 + 6


def test_a_chunk_computes_only_what_its_caches_need() -> None:
    trace = record(LLAMA, Workload(prompt_tokens=300), target=METAL)
    used = {
        call.phase: {call.arrays[i].name for node in call.nodes for i in node.inputs}
        for call in trace.calls
    }
    assert "lm_head.weight" not in used["first_chunk"]
    assert "lm_head.weight" in used["last_token"]
    assert "model.layers.2.self_attn.o_proj.weight" not in used["first_chunk"]


def test_nodes_come_after_their_inputs() -> None:
    for call in record(case("qwen3_moe"), Workload(prompt_tokens=70), target=METAL).calls:
        known = {i for i, array in enumerate(call.arrays) if array.role != "computed"}
        for node in call.nodes:
            assert known.issuperset(node.inputs)
            known.update(node.outputs)
        assert known.issuperset(call.held)


def test_every_layer_s_first_buffer_is_a_separate_node() -> None:
    trace = record(LLAMA, Workload(prompt_tokens=100), target=METAL)
    first = the(trace, "first_chunk")
    assert counts(first)["Full"] == 2 * 3


FUSED = ("RMSNorm", "RoPE", "ScaledDotProductAttention")


@pytest.mark.parametrize(("target", "found"), [(CPU, False), (METAL, True), (CUDA, True)])
def test_fused_kernels_are_one_node_on_the_backends_that_have_them(
    target: TraceTarget, found: bool
) -> None:
    call = the(record(LLAMA, Workload(prompt_tokens=100), target=target), "last_token")
    # Two norms and one attention per layer, the last norm; rotated keys and queries.
    wanted = {"RMSNorm": 7, "RoPE": 6, "ScaledDotProductAttention": 3} if found else {}
    assert {name: n for name, n in counts(call).items() if name in FUSED} == wanted


@pytest.mark.parametrize(("target", "unpacked_by"), [(CPU, "BitwiseBinary"), (METAL, "Quantize")])
def test_a_packed_embedding_is_one_kernel_on_backends_that_have_it(
    target: TraceTarget, unpacked_by: str
) -> None:
    trace = record(LLAMA, Workload(prompt_tokens=100), target=target, quantize=Quantization(4, 64))
    found = counts(the(trace, "last_token"))
    assert {name for name in ("BitwiseBinary", "Quantize") if found[name]} == {unpacked_by}


def test_attention_without_a_metal_kernel_is_several_nodes() -> None:
    wide = {**LLAMA, "head_dim": 256}
    trace = record(wide, Workload(prompt_tokens=100), target=METAL)
    assert counts(the(trace, "first_chunk"))["ScaledDotProductAttention"] == 0
    assert counts(the(trace, "first_chunk"))["Softmax"] == 2  # the last layer's is not needed
    assert counts(the(trace, "last_token"))["ScaledDotProductAttention"] == 3


def test_recurrent_layers_are_one_kernel_on_metal_and_a_loop_elsewhere() -> None:
    workload = Workload(prompt_tokens=41)
    metal = the(record(case("rwkv7"), workload, target=METAL), "first_chunk")
    cpu = the(record(case("rwkv7"), workload, target=CPU), "first_chunk")
    assert any(name.startswith("wkv7") for name in counts(metal))
    assert len(cpu.nodes) > 5 * len(metal.nodes)


def test_no_boundary_of_a_compiled_function_remains() -> None:
    for name in ("deepseek_v3", "gemma3n", "gpt_oss", "nemotron_h"):
        for call in record(case(name), Workload(prompt_tokens=30), target=METAL).calls:
            assert not [node for node in call.nodes if node.name.startswith("memfit")]


def test_a_recorded_trace_survives_json() -> None:
    trace = record(case("gpt_oss"), Workload(prompt_tokens=30, max_tokens=1), target=METAL)
    assert from_json(to_json(trace).encode(), HERE) == trace


def _rows(*shape: int, dtype: Any = None) -> Any:
    return mx.zeros(shape, dtype or mx.bfloat16)


# Functions that mlx-lm compiles, and their arguments.
COMPILED: dict[str, tuple[str, str, Callable[[], list[Any]]]] = {
    "swiglu": ("activations", "swiglu", lambda: [_rows(4, 8), _rows(4, 8)]),
    "xielu": ("activations", "xielu", lambda: [_rows(4, 8), *[_rows(1) for _ in range(4)]]),
    "gate": (
        "deepseek_v3",
        "group_expert_select",
        lambda: [_rows(1, 5, 8), _rows(8, dtype=mx.float32), 2, 4, 2, 1.5, True],
    ),
    "decay": ("gated_delta", "compute_g", lambda: [_rows(4), _rows(1, 5, 4), _rows(4)]),
    "dt": ("ssm", "compute_dt", lambda: [_rows(1, 5, 4), _rows(4), (0.0, 1.0)]),
    "soft cap": ("gemma3n", "logit_softcap", lambda: [30.0, _rows(1, 5, 9)]),
    "top-k": ("gemma3n", "gelu_topk", lambda: [_rows(1, 5, 64), _rows(1, dtype=mx.float32)]),
    "clip": ("gemma3_text", "clip_residual", lambda: [_rows(4, 8), _rows(4, 8)]),
    "relu2": ("nemotron", "relu_squared", lambda: [_rows(4, 8)]),
}


@pytest.mark.parametrize("name", COMPILED)
def test_functions_are_fused_as_mlx_compiles_them(name: str) -> None:
    module, function, arguments = COMPILED[name]
    compiled = getattr(importlib.import_module(f"mlx_lm.models.{module}"), function)
    drawn = io.StringIO()
    given = arguments()
    mx.eval(*[value for value in given if isinstance(value, mx.array)])
    mx.export_to_dot(drawn, compiled(*given))
    wanted = _operations(re.findall(r'label ="(\w+)', drawn.getvalue()))
    assert wanted.total() > 0
    assert _recorded(module, function, arguments) == wanted


def test_a_scalar_that_a_compiled_function_uses_too_stays_outside_of_it() -> None:
    with tracing():
        nn = library_for("cpu").load("mlx.nn")
    found = _recorded_call(lambda rows: nn.gelu(mx.power(rows, 2)), [_rows(4, 8)])
    assert found["Power"] == found["Broadcast"] == 1


def _operations(labels: list[str]) -> Counter[str]:
    """Count nodes by what they compute, spelled as MLX exports it.

    For any shape MLX computes the number of elements; a mean of known shape has a constant.
    """
    spelled = [label.removeprefix("Compiled").removesuffix("NumberOfElements") for label in labels]
    spelled = [re.sub("Rsqrt", "Sqrt", re.sub("^(Sum|Max)$", "Reduce", name)) for name in spelled]
    return Counter(filter(None, spelled))


def _recorded(module: str, function: str, arguments: Callable[[], list[Any]]) -> Counter[str]:
    with tracing():
        called = getattr(library_for("cpu").load(f"mlx_lm.models.{module}"), function)
    return _recorded_call(called, arguments())


def _recorded_call(called: Callable[..., Any], given: list[Any]) -> Counter[str]:
    from memfit.estimators.trace.leaves import Leaf

    leaves = [
        Leaf(value, "weight", str(index), given, index)
        for index, value in enumerate(given)
        if isinstance(value, mx.array)
    ]
    with tracing():

        def run() -> list[Any]:
            with recorded(CPU):
                result = called(*given)
            return list(result) if isinstance(result, (tuple, list)) else [result]

        graph = record_call(run, leaves)
    return _operations(
        [str(node.arguments[0]) if node.name == "Compiled" else node.name for node in graph.nodes]
    )


@pytest.mark.parametrize(("mode", "words", "groups"), [("nvfp4", 32, 16), ("mxfp8", 64, 8)])
def test_fp8_on_the_cpu_is_unpacked_by_the_operations_of_mlx(
    mode: str, words: int, groups: int
) -> None:
    packed = [_rows(7, words, dtype=mx.uint32), _rows(7, groups, dtype=mx.uint8)]
    mx.eval(packed)
    drawn = io.StringIO()
    mx.export_to_dot(drawn, mx.dequantize(*packed, mode=mode))
    wanted = _operations(re.findall(r'label ="(\w+)', drawn.getvalue()))
    wanted["BitwiseBinary"] = wanted.pop("BitwiseAnd", 0) + wanted.pop("RightShift", 0)

    def unpack(*arrays: Any) -> Any:
        return library_for("cpu").core.dequantize(*arrays, mode=mode)

    found = _recorded_call(unpack, packed)
    views = ("Broadcast", "Reshape", "Squeeze", "View")
    assert {**found, **dict.fromkeys(views)} == {**+wanted, **dict.fromkeys(views)}
    assert found["FromFP8"] == 1


def test_an_operation_that_mlx_does_not_export_is_named() -> None:
    with pytest.raises(GraphError, match=r"^MLX does not export its operation BitwiseInvert$"):
        _recorded_call(mx.bitwise_invert, [_rows(4, dtype=mx.int32)])


def test_the_size_of_a_token_loop_is_checked_before_recording() -> None:
    config = {**case("mamba"), "num_hidden_layers": 64}
    with pytest.raises(UnsupportedError, match=r"^a\.json: mamba: .* about \d+ op") as raised:
        record(config, Workload(prompt_tokens=2049), target=METAL, name="a.json")
    assert "\n" not in str(raised.value)


def test_a_graph_beyond_the_limit_stops_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_NODES", 50)
    with pytest.raises(UnsupportedError, match="more operations than the 50"):
        record(LLAMA, Workload(prompt_tokens=30), target=METAL)


def test_a_deep_graph_does_not_crash_the_process() -> None:
    # Every token needs the previous one: MLX walks the graph by recursion, without a check.
    trace = record(case("mamba"), Workload(prompt_tokens=700, prefill_step=600), target=CPU)
    assert len(the(trace, "first_chunk").nodes) > 20_000


# The kernel's own peak: getrusage's starts with that of the parent process.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a peak")
@pytest.mark.parametrize("name", ["qwen3-4b-4bit", "deepseek-v3-4bit"])
def test_a_trace_needs_little_process_memory(name: str) -> None:
    code = (
        "import sys\n"
        "from memfit.estimators.checkpoint.opening import open_checkpoint\n"
        "from memfit.estimators.trace.traced_model import TracedModel\n"
        "from memfit.estimators.base.workload import Workload\n"
        "config = open_checkpoint(sys.argv[1]).config\n"
        "TracedModel(config, 'metal').shapes(Workload(prompt_tokens=5000, max_tokens=9))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))"
    )
    sample = HERE.parent.parent / "sample_configs" / f"{name}.yaml"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(sample)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(ran.stdout) * 1024 < 300_000_000
