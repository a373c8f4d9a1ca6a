"""How many kernels and views MLX makes of each operation that the formula follows.

A kernel is work for the device. A view is a primitive that only looks at a buffer in another way
(reshape, transpose, broadcast, slice): it costs a GPU nothing, but the CPU backend dispatches an
empty task for it. Kernels are those of a GPU; the CPU's fallbacks of mx.fast have rows of their
own. tests/mlx/test_operation_counts.py compares the rows with recorded graphs: kernels are exact,
views of the longer fallbacks are within a third.

Read at mlx 0.32.1 and mlx-lm 0.31.
"""

from typing import NamedTuple


class OperationCount(NamedTuple):
    """One row of the table."""

    kernels: int
    views: int
    source: str


ELEMENTWISE = OperationCount(1, 0, "mlx/ops.cpp: one primitive; mx.compile fuses to one as well")
MATMUL = OperationCount(
    1, 3, "mlx/ops.cpp, matmul: input flattened, output unflattened; nn.Linear transposes weights"
)
QUANTIZED_MATMUL = OperationCount(1, 0, "mlx/ops.cpp, quantized_matmul: transposed by a flag")
STATE_PROJECTION = OperationCount(1, 1, "mlx-lm models/ssm.py and others: plain or packed")
PART_COPY = OperationCount(1, 1, "mlx/ops.cpp, split or slice; the part is strided and copied")
NO_KERNEL = OperationCount(0, 0, "written by the kernel before it, as a second output")

# Attention that is not one fused kernel: mlx/fast.cpp, scaled_dot_product_attention, fallback.
SCALED_QUERIES = OperationCount(1, 3, "mlx/fast.cpp: heads transposed, groups unflattened, scaled")
TWO_PASS_ATTENTION = OperationCount(
    2, 0, "mlx/backend/metal/scaled_dot_product_attention.cpp, sdpa_vector_2pass: two dispatches"
)
SCORES = OperationCount(1, 2, "mlx/fast.cpp: keys expanded and transposed")
CAUSAL_MASK = OperationCount(3, 2, "mlx/fast.cpp: two ranges, expanded and compared")
MASKED_SCORES = OperationCount(1, 2, "mlx/fast.cpp: where(), mask and lowest number broadcast")
FILLED_MASK = OperationCount(1, 1, "mlx/fast.cpp: full_like() of a boolean mask, for CUDA")
SCORES_WITH_SINKS = OperationCount(2, 3, "mlx/fast.cpp: sinks expanded, broadcast, concatenated")
WEIGHTED_VALUES = OperationCount(1, 1, "mlx/fast.cpp: values expanded")
JOINED_HEADS = OperationCount(
    1, 3, "mlx-lm models/llama.py: groups flattened, heads transposed and reshaped, which copies"
)
CACHE_WRITE = OperationCount(1, 1, "mlx-lm models/cache.py: slice update in place, slice returned")

# Norms and rotary embedding on the CPU: mlx/fast.cpp, rms_norm and rope, fallbacks.
NORM_MEAN = OperationCount(2, 2, "mlx/fast.cpp, rms_norm: sum of squares over their number")
NORM_SCALAR = OperationCount(1, 1, "mlx/fast.cpp, rms_norm: epsilon, root, broadcast")
NORM_WEIGHT = OperationCount(1, 1, "mlx/fast.cpp, rms_norm: weight broadcast")
ROPE_POSITIONS = OperationCount(5, 5, "mlx/fast.cpp, rope: a range and the offset")
ROPE_ANGLES = OperationCount(5, 6, "mlx/fast.cpp, rope: frequencies, times positions")
ROPE_FIRST_PRODUCT = OperationCount(1, 3, "mlx/fast.cpp, rope: half of a head, table broadcast")
ROPE_SECOND_PRODUCT = OperationCount(1, 2, "mlx/fast.cpp, rope: the other half")
ROPE_JOINED = OperationCount(2, 2, "mlx/fast.cpp, rope: halves concatenated")

# Experts: mlx-lm models/switch_layers.py, SwitchGLU; the router as in models/qwen3_moe.py.
ROUTER_SCORES = OperationCount(1, 1, "mlx-lm models/qwen3_moe.py: gate")
TOP_EXPERTS = OperationCount(1, 2, "mlx-lm models/qwen3_moe.py: argpartition, slice")
NORMALISED_SCORES = OperationCount(1, 1, "mlx-lm models/qwen3_moe.py: norm_topk_prob")
FLAT_INDICES = OperationCount(1, 1, "mlx-lm models/switch_layers.py, _gather_sort: flatten")
EXPERT_GATHER = OperationCount(1, 2, "mlx-lm models/switch_layers.py: flatten, gather, unflatten")
EXPERT_MATMUL = OperationCount(1, 1, "mlx/ops.cpp, gather_mm and gather_qmm: weights transposed")
EXPERT_MATMUL_DOWN = OperationCount(1, 0, "mlx/ops.cpp, gather_qmm: indices as they are")
WEIGHTED_EXPERTS = OperationCount(1, 2, "mlx-lm models/qwen3_moe.py: scores expanded, broadcast")

# Latent attention: mlx-lm models/deepseek_v3.py; keys of every head as in deepseek_v2.py.
ROPE_SCORES = OperationCount(1, 2, "mlx-lm models/deepseek_v3.py: rope keys transposed")
ABSORBED_QUERIES = OperationCount(1, 1, "mlx-lm models/deepseek_v3.py, embed_q")
UNEMBEDDED_VALUES = OperationCount(1, 2, "mlx-lm models/deepseek_v3.py, unembed_out")
LATENT_QUERIES = OperationCount(1, 2, "mlx/fast.cpp: heads transposed, scaled")
LATENT_SCORES = OperationCount(1, 1, "mlx/fast.cpp: keys transposed")
LATENT_JOINED_HEADS = OperationCount(1, 2, "mlx-lm models/deepseek_v3.py: transposed, reshaped")
EXPANDED_KEYS = OperationCount(2, 3, "mlx-lm models/deepseek_v2.py: split, broadcast, concatenate")
JOINED_QUERIES = OperationCount(2, 2, "mlx-lm models/deepseek_v2.py: split, concatenate")
INDEXER_SCORES = OperationCount(1, 1, "mlx-lm models/deepseek_v32.py, Indexer")
INDEXER_MASK = OperationCount(1, 1, "mlx-lm models/deepseek_v32.py, Indexer: put_along_axis")

# Recurrences.
CONVOLUTION_INPUT = OperationCount(3, 4, "mlx-lm models/qwen3_next.py: parts joined")
PADDED_INPUT = OperationCount(2, 2, "mlx-lm models/ssm.py: state and input concatenated, slice")
CPU_CONVOLUTION = OperationCount(6, 0, "mlx/backend/cpu/conv.cpp, explicit_gemm_conv_1D_cpu")
REPEATED_HEADS = OperationCount(1, 3, "mlx-lm models/gated_delta.py: mx.repeat")
TOKEN_PRODUCT = OperationCount(2, 12, "mlx-lm models/gated_delta.py, loop: keys cast, slices")
TOKEN_SUM = OperationCount(2, 2, "mlx-lm models/gated_delta.py, loop: sum, cast")
TOKEN_TIME_STEP = OperationCount(4, 8, "mlx-lm models/mamba.py, loop: x_proj, dt_proj, softplus")
DECAYED_STATE = OperationCount(3, 3, "mlx-lm models/mamba.py, loop: dt * A, exp, times the state")
TOKEN_STATE = OperationCount(2, 4, "mlx-lm models/mamba.py, loop: dt * x times B, sum")
TOKEN_OUTPUT = OperationCount(3, 4, "mlx-lm models/mamba.py, loop: product with C, D times x, sum")
KEYS_NORMED = OperationCount(2, 3, "mlx-lm models/rwkv7.py, l2_norm: sums of squares, quotient")
BONUS = OperationCount(2, 3, "mlx-lm models/rwkv7.py: sum of each head, times its values")
HEAD_PRODUCTS = OperationCount(1, 5, "mlx-lm models/recurrent_gemma.py: a matrix of each head")
DECAYED_TOKEN = OperationCount(2, 6, "mlx-lm models/recurrent_gemma.py, rnn_scan: product, sum")
FIRST_STATES = OperationCount(2, 4, "mlx-lm models/jamba.py: inputs times their widths")
STATE_DECAYS = OperationCount(2, 2, "mlx-lm models/jamba.py: exponentials of all tokens")
STEP_STATE = OperationCount(1, 4, "mlx-lm models/jamba.py, loop: two slices multiplied")
STATES_WRITTEN = OperationCount(2, 2, "mlx-lm models/jamba.py, loop: added, slice update")
STATES_OUTPUT = OperationCount(1, 3, "mlx-lm models/jamba.py: states times C")
TIME_STEPS = OperationCount(6, 6, "mlx-lm models/ssm.py, ssm_attn: dt, A, their product, dt * x")
CHUNK_DECAYS = OperationCount(4, 10, "mlx-lm models/ssm.py, segsum: repeat, lower triangle")
CHUNK_DECAY_STEP = OperationCount(1, 0, "mlx-lm models/ssm.py, segsum: sum, exponential")
CHUNK_PRODUCTS = OperationCount(1, 4, "mlx-lm models/ssm.py, ssm_attn: C times B")
CHUNK_REPEATED = OperationCount(1, 2, "mlx-lm models/ssm.py, ssm_attn: repeated for each head")
CHUNK_WEIGHTS = OperationCount(4, 9, "mlx-lm models/ssm.py, ssm_attn: lower triangle")
CHUNK_OUTPUT = OperationCount(1, 3, "mlx-lm models/ssm.py, ssm_attn: weights times inputs")
OLD_OUTPUT = OperationCount(3, 8, "mlx-lm models/ssm.py, ssm_attn: state times C, decays of dt * A")
CHUNKS_OUTPUT = OperationCount(2, 4, "mlx-lm models/ssm.py, ssm_attn: D times x, chunks joined")
REPEATED_INPUT = OperationCount(1, 4, "mlx-lm models/ssm.py, next_state: B repeated")
DECAYED_INPUT = OperationCount(1, 4, "mlx-lm models/ssm.py, next_state: dt and last decays")

# Adapters: mlx-lm tuner/lora.py and dora.py, which dequantises a packed matrix.
LOW_RANK_PRODUCT = OperationCount(1, 2, "mlx/ops.cpp, matmul: input flattened, output unflattened")
SCALED_UPDATE = OperationCount(1, 1, "mlx-lm tuner/lora.py: the scale broadcast")
SCALED_FACTOR = OperationCount(1, 2, "mlx-lm tuner/dora.py: lora_b transposed, scale broadcast")
MATRIX_PRODUCT = OperationCount(1, 1, "mlx-lm tuner/dora.py: two matrices, lora_a transposed")
ROW_SUMS = OperationCount(1, 1, "mlx/linalg.cpp, norm: squares summed, their axis removed")
BROADCAST_PRODUCT = OperationCount(1, 1, "mlx-lm tuner/dora.py: magnitudes broadcast")
SHIFTED_LEFT = OperationCount(1, 1, "mlx/ops.cpp, affine_dequantize: bits broadcast")
SHIFTED_RIGHT = OperationCount(1, 2, "mlx/ops.cpp, affine_dequantize: bits broadcast, expanded")
CAST_VALUES = OperationCount(1, 1, "mlx/ops.cpp, affine_dequantize: reshaped, cast")
SCALED_VALUES = OperationCount(1, 2, "mlx/ops.cpp, affine_dequantize: scales expanded, broadcast")
BIASED_VALUES = OperationCount(
    1, 3, "mlx/ops.cpp, affine_dequantize: biases expanded, broadcast; reshaped"
)

# Alternating updates: mlx-lm models/gemma3n.py, Gemma3nAltUp.
STREAMS_MIXED = OperationCount(1, 3, "mlx-lm models/gemma3n.py: coefficients, transposes")
STREAM_COEFFICIENTS = OperationCount(
    7, 8, "mlx-lm models/gemma3n.py: two products, tanh, casts and clips of the second's matrix"
)
OTHER_STREAMS = OperationCount(1, 2, "mlx-lm models/gemma3n.py: all streams but the first")
STREAMS_WRITTEN = OperationCount(2, 1, "mlx-lm models/gemma3n.py: slice update of a copy")


def repeated(count: int) -> OperationCount:
    """Return an operation of as many kernels, without views: concatenations, sums over heads."""
    return OperationCount(count, 0, "mlx/backend/common/ops: one kernel for each input")
