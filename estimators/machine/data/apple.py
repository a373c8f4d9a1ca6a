"""Macs with Apple chips, and how much of their memory macOS recommends to its GPU.

A "GB" of Apple's memory is a GiB: hw.memsize of a 64 GB Mac is 68719476736.
"""

from typing import Any

CHIPS: dict[str, Any] = {
    # architecture is MTLDevice.architecture.name: generation, then MLX's GPU class (mlx
    # backend/metal/device.cpp). The comments there call g "base, pro", but every Pro that was
    # reported is an s (github.com/ml-explore/mlx/issues/3885): M2 Pro, M3 Pro, M4 Pro, M5 Pro.
    # memory_gib: Apple's technical specifications of every Mac sold with the chip.
    # memory_bus: bits, and 10^6 transfers a second, of the widest bus sold. Bits / 8 x transfers is the
    # bandwidth in MB/s; Apple prints it rounded (M1 Max 409.6 as 400 GB/s, M4 Max 546.1 as 546). M3 Max,
    # M4 Max and M5 Max with fewer GPU cores have 3/4 of it. Source: the bandwidth in Apple's technical
    # specifications and newsroom of each chip, as a multiple of its LPDDR4X, LPDDR5 or LPDDR5X.
    # gpu_cores: the fewest and the most of a GPU sold with the chip; gpu_cores_by_gib: where Apple sells
    # a memory with one of them only. Source: Apple's technical specifications, and the table of
    # github.com/ggml-org/llama.cpp/discussions/4167.
    # gpu_mhz: the highest clock, which Apple does not publish. M1, M2:
    # github.com/philipturner/metal-benchmarks; M3: 28 TFLOPS of 80 cores in published tables; M4 Pro and
    # Max: 1578 in published powermetrics; M4: tables of its 4.26 TFLOPS at 1.47; M5: 70 TFLOPS of 40
    # cores with 1024 products a cycle (tzakharko.github.io/apple-neural-accelerators-benchmark) within 5 %.
    # A wrong clock of a whole generation is in the rates that were fitted to it (sizing/prefill_time.py).
    "m1": {
        "name": "M1",
        "architecture": "applegpu_g13g",
        "memory_gib": [8, 16],
        "memory_bus": (128, 4267),
        "gpu_cores": [7, 8],
        "gpu_mhz": 1278,
        "source": "Apple tech specs, MacBook Air (M1, 2020); published device_info, g13g",
    },
    "m1-pro": {
        "name": "M1 Pro",
        "architecture": "applegpu_g13s",
        "memory_gib": [16, 32],
        "memory_bus": (256, 6400),
        "gpu_cores": [14, 16],
        "gpu_mhz": 1296,
        "source": "support.apple.com/en-us/111902; G13S in Asahi Linux's table of GPUs",
    },
    "m1-max": {
        "name": "M1 Max",
        "architecture": "applegpu_g13s",
        "memory_gib": [32, 64],
        "memory_bus": (512, 6400),
        "gpu_cores": [24, 32],
        "gpu_mhz": 1296,
        "source": "support.apple.com/en-us/111901; published device_info, g13s",
    },
    "m1-ultra": {
        "name": "M1 Ultra",
        "architecture": "applegpu_g13d",
        "memory_gib": [64, 128],
        "memory_bus": (1024, 6400),
        "gpu_cores": [48, 64],
        "gpu_mhz": 1296,
        "source": "support.apple.com/en-us/111900; published device_info, g13d",
    },
    "m2": {
        "name": "M2",
        "architecture": "applegpu_g14g",
        "memory_gib": [8, 16, 24],
        "memory_bus": (128, 6400),
        "gpu_cores": [8, 10],
        "gpu_mhz": 1398,
        "source": "Apple tech specs, MacBook Air (M2, 2022); published device_info, g14g",
    },
    "m2-pro": {
        "name": "M2 Pro",
        "architecture": "applegpu_g14s",
        "memory_gib": [16, 32],
        "memory_bus": (256, 6400),
        "gpu_cores": [16, 19],
        "gpu_mhz": 1398,
        "source": "support.apple.com/en-us/111340; published device_info, g14s",
    },
    "m2-max": {
        "name": "M2 Max",
        "architecture": "applegpu_g14s",
        "memory_gib": [32, 64, 96],
        "memory_bus": (512, 6400),
        "gpu_cores": [30, 38],
        "gpu_cores_by_gib": {96: 38},
        "gpu_mhz": 1398,
        "source": "support.apple.com/en-us/111340; published device_info, g14s",
    },
    "m2-ultra": {
        "name": "M2 Ultra",
        "architecture": "applegpu_g14d",
        "memory_gib": [64, 128, 192],
        "memory_bus": (1024, 6400),
        "gpu_cores": [60, 76],
        "gpu_mhz": 1398,
        "source": "support.apple.com/en-us/111835; github.com/ml-explore/mlx/pull/1060, g14d",
    },
    "m3": {
        "name": "M3",
        "architecture": "applegpu_g15g",
        "memory_gib": [8, 16, 24],
        "memory_bus": (128, 6400),
        "gpu_cores": [8, 10],
        "gpu_mhz": 1380,
        "source": "Apple tech specs, MacBook Pro (14-inch, M3, Nov 2023); published device_info, g15g",
    },
    "m3-pro": {
        "name": "M3 Pro",
        "architecture": "applegpu_g15s",
        "memory_gib": [18, 36],
        "memory_bus": (192, 6400),
        "gpu_cores": [14, 18],
        "gpu_mhz": 1380,
        "source": "Apple tech specs, MacBook Pro (14-inch, M3 Pro, Nov 2023); published device_info, g15s",
    },
    "m3-max": {
        "name": "M3 Max",
        "architecture": "applegpu_g15s",
        "memory_gib": [36, 48, 64, 96, 128],
        "memory_bus": (512, 6400),
        "gpu_cores": [30, 40],
        "gpu_cores_by_gib": {36: 30, 96: 30, 48: 40, 64: 40, 128: 40},
        "gpu_mhz": 1380,
        "source": "Apple tech specs, MacBook Pro (16-inch, Nov 2023); published device_info, g15s",
    },
    "m3-ultra": {
        "name": "M3 Ultra",
        "architecture": "applegpu_g15d",
        "memory_gib": [96, 256, 512],
        "memory_bus": (1024, 6400),
        "gpu_cores": [60, 80],
        "gpu_cores_by_gib": {512: 80},
        "gpu_mhz": 1380,
        "source": "support.apple.com/en-us/122211; published device_info, g15d",
    },
    "m4": {
        "name": "M4",
        "architecture": "applegpu_g16g",
        "memory_gib": [16, 24, 32],
        "memory_bus": (128, 7500),
        "gpu_cores": [8, 10],
        "gpu_mhz": 1470,
        "source": "Apple tech specs, MacBook Pro (14-inch, M4, 2024); github.com/ml-explore/mlx/issues/3885, g16g",
    },
    "m4-pro": {
        "name": "M4 Pro",
        "architecture": "applegpu_g16s",
        "memory_gib": [24, 48, 64],
        "memory_bus": (256, 8533),
        "gpu_cores": [16, 20],
        "gpu_mhz": 1578,
        "source": "Apple tech specs, Mac mini (2024); published device_info of an M4 Pro 48 GB, g16s",
    },
    "m4-max": {
        "name": "M4 Max",
        "architecture": "applegpu_g16s",
        "memory_gib": [36, 48, 64, 128],
        "memory_bus": (512, 8533),
        "gpu_cores": [32, 40],
        "gpu_cores_by_gib": {36: 32, 48: 40, 64: 40, 128: 40},
        "gpu_mhz": 1578,
        "source": "support.apple.com/en-us/122211; github.com/ml-explore/mlx/issues/3885, g16s",
    },
    "m5": {
        "name": "M5",
        "architecture": "applegpu_g17g",
        "memory_gib": [16, 24, 32],
        "memory_bus": (128, 9600),
        "gpu_cores": [8, 10],
        "gpu_mhz": 1620,
        "needs_macos_26": True,
        "source": "Apple tech specs, MacBook Pro (14-inch, M5); published device_info, g17g",
    },
    "m5-pro": {
        "name": "M5 Pro",
        "architecture": "applegpu_g17s",
        "memory_gib": [24, 48, 64],
        "memory_bus": (256, 9600),
        "gpu_cores": [16, 20],
        "gpu_mhz": 1620,
        "needs_macos_26": True,
        "source": "Apple newsroom, 3 March 2026; published device_info, g17s",
    },
    "m5-max": {
        "name": "M5 Max",
        "architecture": "applegpu_g17s",
        "memory_gib": [36, 48, 64, 128],
        "memory_bus": (512, 9600),
        "gpu_cores": [32, 40],
        "gpu_cores_by_gib": {36: 32, 48: 40, 64: 40, 128: 40},
        "gpu_mhz": 1620,
        "needs_macos_26": True,
        "source": "Apple newsroom, 3 March 2026; published device_info of an M5 Max 128 GB, g17s",
    },
}

# MTLDevice.recommendedMaxWorkingSetSize, stock (iogpu.wired_limit_mb = 0).
# The rule under every row: ratio x memory, rounded up to a page of 16384 bytes, where the ratio
# is a 32-bit float. `ratio` is that float times 2^24, an integer. It gives every size in `measured_gib`
# to the byte (tests/machine/test_working_set.py):
# 2/3 as a float lies above 2/3, hence the odd page at 18 and 24 GB; 0.84 below, hence 192 GB.
# `from_gib` is the smallest memory the ratio was seen at; a size in between takes the lower ratio.
WORKING_SETS: dict[str, Any] = {
    "macos-15": {
        "name": "macOS 13-15",
        "source": (
            "llama.cpp and PyTorch logs: github.com/abetlen/llama-cpp-python/issues/687 (16 GB, "
            "10922.67 MiB), github.com/ollama/ollama/issues/434 (32 GB, 21845.34 MiB), "
            "github.com/ggml-org/llama.cpp/issues/3213 (96 GB, 73728 MiB); torch.mps "
            "recommended_max_memory on macOS 15.7 (18 GB, 12884918272 bytes); ggml logs (24 GB, "
            "17179.89 MB); github.com/gfx-rs/wgpu/pull/2502 (64 GB, from maxBufferLength 36864 MiB); "
            "github.com/ml-explore/mlx/pull/1060 (192 GB, from max_buffer_length 115964116992)."
        ),
        "rules": [
            {"from_gib": 8, "ratio": 11184811},  # 2/3
            {"from_gib": 36, "ratio": 12582912},  # 3/4
        ],
        "measured_gib": (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192),
    },
    "macos-26": {
        "name": "macOS 26",
        "source": (
            "mx.device_info and Metal logs: github.com/AlexsJones/llmfit/pull/754 (16 GB, 11.84 GiB), "
            "github.com/GPGPUCourse/GPGPUTasks2026/pull/11 (32 GB, 25559 MiB) and /pull/26 (48 GB, "
            "38338 MiB), github.com/antirez/ds4/pull/893 (128 GB, 107.52 GiB), "
            "github.com/janhq/jan/issues/6961 (512 GB, 498216.21 MB); the observability guide of "
            "heylookitsanllm, April 2026 (192 GB, 173173080064 bytes); published device_info of an "
            "M3 Ultra 256 GB (223338299392 bytes)."
        ),
        "rules": [
            {"from_gib": 8, "ratio": 11184811},  # 2/3
            {"from_gib": 16, "ratio": 12415140},  # 0.74
            {"from_gib": 32, "ratio": 13086228},  # 0.78
            {"from_gib": 64, "ratio": 13589545},  # 0.81
            {"from_gib": 128, "ratio": 14092861},  # 0.84
            {"from_gib": 256, "reserve_gib": 48},
        ],
        "measured_gib": (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512),
    },
}
