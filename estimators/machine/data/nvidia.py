"""NVIDIA GPUs by memory.

memory_mib is memory.total as nvidia-smi prints it for that card, which is below the published size
where ECC or the driver takes its part. CUDA itself reports a little less again: prefer the detected
host. compute_capability: developer.nvidia.com/cuda-gpus, major and minor as one number. MLX's CUDA
back end needs 75 (mlx docs/src/install.rst); its cuDNN attention needs 80 (mlx
backend/cuda/scaled_dot_product_attention.cpp).

Source: published nvidia-smi outputs of each card; sizes agree with the product pages on nvidia.com.
"""

from typing import Any

GPUS: dict[str, Any] = {
    "rtx-3060": {"name": "RTX 3060", "memory_mib": 12288, "compute_capability": 86},
    "rtx-3070": {"name": "RTX 3070", "memory_mib": 8192, "compute_capability": 86},
    "rtx-3080": {"name": "RTX 3080", "memory_mib": 10240, "compute_capability": 86},
    "rtx-3090": {"name": "RTX 3090", "memory_mib": 24576, "compute_capability": 86},
    "rtx-3090-ti": {"name": "RTX 3090 Ti", "memory_mib": 24564, "compute_capability": 86},
    "rtx-4060": {"name": "RTX 4060", "memory_mib": 8188, "compute_capability": 89},
    "rtx-4060-ti-16": {"name": "RTX 4060 Ti", "memory_mib": 16380, "compute_capability": 89},
    "rtx-4070": {"name": "RTX 4070", "memory_mib": 12282, "compute_capability": 89},
    "rtx-4070-ti": {"name": "RTX 4070 Ti", "memory_mib": 12282, "compute_capability": 89},
    "rtx-4070-ti-super": {
        "name": "RTX 4070 Ti SUPER",
        "memory_mib": 16376,
        "compute_capability": 89,
    },
    "rtx-4080": {"name": "RTX 4080", "memory_mib": 16376, "compute_capability": 89},
    "rtx-4090": {"name": "RTX 4090", "memory_mib": 24564, "compute_capability": 89},
    "rtx-5060-ti-16": {"name": "RTX 5060 Ti", "memory_mib": 16311, "compute_capability": 120},
    "rtx-5070": {"name": "RTX 5070", "memory_mib": 12227, "compute_capability": 120},
    "rtx-5070-ti": {"name": "RTX 5070 Ti", "memory_mib": 16303, "compute_capability": 120},
    "rtx-5080": {"name": "RTX 5080", "memory_mib": 16303, "compute_capability": 120},
    "rtx-5090": {"name": "RTX 5090", "memory_mib": 32607, "compute_capability": 120},
    "rtx-a4000": {"name": "RTX A4000", "memory_mib": 16376, "compute_capability": 86},
    "rtx-a6000": {"name": "RTX A6000", "memory_mib": 49140, "compute_capability": 86},
    "rtx-6000-ada": {"name": "RTX 6000 Ada", "memory_mib": 49140, "compute_capability": 89},
    "rtx-pro-6000": {"name": "RTX PRO 6000", "memory_mib": 97887, "compute_capability": 120},
    "v100-16": {"name": "V100", "memory_mib": 16384, "compute_capability": 70},
    "v100-32": {"name": "V100", "memory_mib": 32768, "compute_capability": 70},
    "t4": {"name": "T4", "memory_mib": 15360, "compute_capability": 75},
    "a10g": {"name": "A10G", "memory_mib": 23028, "compute_capability": 86},
    "a40": {"name": "A40", "memory_mib": 46068, "compute_capability": 86},
    "a100-40": {"name": "A100", "memory_mib": 40960, "compute_capability": 80},
    "a100-80": {"name": "A100", "memory_mib": 81920, "compute_capability": 80},
    "l4": {"name": "L4", "memory_mib": 23034, "compute_capability": 89},
    "l40s": {"name": "L40S", "memory_mib": 46068, "compute_capability": 89},
    "h100-80": {"name": "H100", "memory_mib": 81559, "compute_capability": 90},
    "h100-nvl": {"name": "H100 NVL", "memory_mib": 95830, "compute_capability": 90},
    "h200": {"name": "H200", "memory_mib": 143771, "compute_capability": 90},
    "b200": {"name": "B200", "memory_mib": 183359, "compute_capability": 100},
    # One memory for CPU and GPU; nvidia-smi prints [N/A]. Published size in decimal GB.
    "dgx-spark": {"name": "GB10", "memory_gb": 128, "compute_capability": 121},
    "jetson-orin-32": {"name": "Orin", "memory_gb": 32, "compute_capability": 87},
    "jetson-orin-64": {"name": "Orin", "memory_gb": 64, "compute_capability": 87},
}
