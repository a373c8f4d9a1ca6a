"""Runtimes whose memory rules memfit follows, with the versions these were read in.

growth: how a cache gets room for more tokens (runtimes/growth.py). charges: which layers it keeps
one for. kv_bits, cache_dtype: what it is kept in when nothing else is asked; without a dtype, in
the activations' own. kv_step: tokens it is rounded up to. budget: the share of a memory that the
runtime gives itself. faults: what is known to be wrong in its own answers; memfit shows its
answer and the right one.
"""

from typing import Any

from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION

RUNTIMES: dict[str, Any] = {
    "mlx-lm": {
        "version": MLX_LM_VERSION,
        "mlx_version": MLX_VERSION,
        "prefill_step": 2048,  # mlx_lm/generate.py, generate_step
        "kv_step": 256,  # mlx_lm/models/cache.py, KVCache.step
        "kv_group_size": 64,  # mlx_lm/generate.py, generate_step
        "quantized_kv_start": 5000,  # mlx_lm/generate.py, DEFAULT_QUANTIZED_KV_START
        "rotating_keep": 4,  # mlx_lm/models/cache.py, make_prompt_cache
        "growth": "steps",
        "charges": "its own caches",
        "budget": {
            "share": 90,
            "of": "working_set",
        },  # mlx_lm/generate.py, wired_limit warns above it
        "keeps": "everything in unified memory",
        "allocates": "each layer's cache grows in steps of 256 tokens, a window's rotates",
        "source": "https://github.com/ml-explore/mlx-lm, mlx_lm/models/cache.py and generate.py",
    },
    "mlx-swift-lm": {
        "version": "017be476",
        "prefill_step": 512,  # Libraries/MLXLMCommon/Evaluate.swift, GenerateParameters
        "kv_step": 256,  # KVCache.swift, KVCacheSimple.step
        "kv_group_size": 64,  # GenerateParameters
        "quantized_kv_start": 0,  # GenerateParameters
        "growth": "steps",
        "charges": "its own caches",
        "budget": {
            "share": 100,
            "of": "working_set",
        },  # wired-memory.md: clamped to the recommended working set
        "keeps": "everything in unified memory",
        "allocates": "caches as mlx-lm's, of a prompt in chunks of 512 tokens",
        "source": "https://github.com/ml-explore/mlx-swift-lm, Libraries/MLXLMCommon, and its wired-memory.md",
        "faults": [
            "its guide takes 8-bit and 4-bit caches for 1 and 0.5 bytes an element, without their scales",
            "its guide takes recurrent states for 16-bit; they are float32",
            "its guide takes the scores of a chunk for L x L; they are L x all tokens before it",
        ],
    },
    "mlx-moe": {
        "version": "307be150",
        "prefill_step": 2048,  # it runs mlx_lm.stream_generate
        "kv_step": 256,
        "kv_group_size": 64,  # mlx_moe/server.py
        "quantized_kv_start": 0,  # mlx_moe/server.py
        "growth": "steps",
        "charges": "its own caches",
        "budget": {"share": 71, "of": "working_set"},  # lazy_experts, select_capacity
        "keeps": "experts that do not fit on disk, everything else in unified memory",
        "allocates": "caches as mlx-lm's; experts as many a layer as fit in 71 % of the working set",
        "source": "https://github.com/mu-hashmi/mlx-moe, mlx_moe/server.py and lazy_experts",
        "faults": [
            "its capacity divides decimal megabytes by 1024, so that experts count 2.4 % too small",
        ],
    },
    "agent-memory": {
        "version": "118e0b7d",
        "prefill_step": 2048,  # adapters/config/settings.py, chunked_prefill_max_chunk
        "least_prefill_step": 512,  # chunked_prefill_min_chunk
        "kv_step": 256,  # domain/entities.py, BLOCK_SIZE_TOKENS
        "kv_group_size": 64,  # settings.py
        "quantized_kv_start": 0,
        "kv_bits": 4,  # settings.py
        "growth": "paged",
        "charges": "attention layers",
        "budget": {"bytes": 8589934592, "of": "cache"},  # settings.py, cache_budget_mb 8192
        "keeps": "live caches in unified memory, the others 4-bit on disk",
        "allocates": "blocks of 256 tokens of one layer, 4-bit with scales and biases, from a pool of 8 GiB",
        "source": "https://github.com/yshk-mxim/agent-memory, src/agent_memory",
        "faults": [
            "it tells that 4 bits save 75 % of a cache; with scales and biases they save 71.9 %",
        ],
    },
    # The description of 2026-06-12; later versions charge the cache to attending layers only.
    "zinc": {
        "version": "2026-06-12",
        "prefill_step": 512,  # of no weight here: its buffers are those of one token
        "kv_step": 1,
        "kv_group_size": 64,
        "quantized_kv_start": 0,
        "cache_dtype": "F32",
        "growth": "contiguous",
        "charges": "every layer",
        "budget": {"share": 85, "of": "working_set"},  # auto_context_utilization
        "context_step": 512,  # auto_context_alignment_tokens
        "floor_tokens": 4096,  # auto_context_floor_tokens
        "keeps": "cache, states and buffers on the device, a page table and staging in host memory",
        "allocates": "the whole context before the first token, in float32",
        "source": "https://github.com/zolotukhin/zinc, src/gpu/memory_plan.zig",
        "faults": [
            "its automatic context is never below 4096 tokens, whether they fit or not",
            "it charges cache and recurrent state to every layer of a hybrid model",
        ],
    },
    "foundry": {
        "version": "as documented",
        "prefill_step": 32,  # METALLIC_PREFILL_CHUNK_SIZE, from 1 to 512
        "kv_step": 128,  # ContextConfig::align_capacity
        "kv_initial": 2048,  # GrowthStrategy::default
        "kv_group_size": 64,
        "quantized_kv_start": 0,
        "cache_dtype": "F16",
        "growth": "doubling",
        "charges": "attention layers",
        "budget": {"share": 50, "of": "working_set_for_cache"},  # MemoryBudget::Auto
        "keeps": "weights, cache and intermediates private to the GPU; inputs and outputs shared",
        "allocates": "2048 tokens at first, then twice as many, aligned up to 128; old and new live together",
        "source": "metallic, src/model/context.rs and docs of its memory management",
        "faults": [
            "it aligns the context up after dividing the budget, and so exceeds the budget",
        ],
    },
    # https://github.com/ggml-org/llama.cpp, commit 0c1e57098; its build b11549 allocates the same.
    "llama.cpp": {
        "version": "b11549",
        "prefill_step": 512,  # common/common.h, n_ubatch
        "batch": 2048,  # common/common.h, n_batch
        "kv_step": 256,  # src/llama-context.cpp, the padding of n_ctx; llama-kv-cache-iswa.cpp
        "kv_group_size": 32,  # ggml/src/ggml-common.h, QK8_0, QK5_0 and QK4_0
        "quantized_kv_start": 0,  # the types of the cache hold from its first token on
        "cache_dtype": "F16",
        "growth": "contiguous",
        "charges": "attention layers",
        "budget": {"share": 100, "of": "working_set"},
        "keeps": "everything where its layers are placed; here in one memory",
        "allocates": "the whole context before the first token, a window's with room for a micro-batch",
        "source": "https://github.com/ggml-org/llama.cpp, src/llama-context.cpp and llama-kv-cache.cpp",
    },
    "vllm": {
        "version": "002f10e0",
        "prefill_step": 2048,  # vllm/config/scheduler.py, DEFAULT_MAX_NUM_BATCHED_TOKENS
        "kv_step": 16,  # vllm/config/cache.py, DEFAULT_BLOCK_SIZE
        "kv_group_size": 64,
        "quantized_kv_start": 0,
        "growth": "paged",
        "charges": "attention layers",
        "budget": {"share": 92, "of": "memory"},  # vllm/config/cache.py, gpu_memory_utilization
        "shares_prefix": True,  # enable_prefix_caching
        "keeps": "everything on the GPU",
        "allocates": "pages of 16 tokens, from a pool that takes all the memory it may",
        "source": "https://github.com/vllm-project/vllm, vllm/config/cache.py and v1/kv_cache_interface.py",
    },
}
