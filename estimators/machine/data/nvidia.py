"""NVIDIA GPUs: name, memory, compute capability, and memory bandwidth in MB/s.

Memory in MiB is memory.total as nvidia-smi prints it for that card, which is below the published
size where ECC or the driver takes its part. CUDA itself reports a little less again: prefer the
detected host. Compute capability: developer.nvidia.com/cuda-gpus, major and minor as one number.
MLX's CUDA back end needs 75 (mlx docs/src/install.rst); its cuDNN attention needs 80 (mlx
backend/cuda/scaled_dot_product_attention.cpp). Bandwidth: NVIDIA's data sheet of the card; where it
was sold with several, the fastest (V100S, H100 SXM).

Source: published nvidia-smi outputs of each card; sizes agree with the product pages on nvidia.com.
"""

Row = tuple[str, int, int, int]

GPUS: dict[str, Row] = {
    "rtx-3060": ("RTX 3060", 12288, 86, 360000),
    "rtx-3070": ("RTX 3070", 8192, 86, 448000),
    "rtx-3080": ("RTX 3080", 10240, 86, 760300),
    "rtx-3090": ("RTX 3090", 24576, 86, 936200),
    "rtx-3090-ti": ("RTX 3090 Ti", 24564, 86, 1008000),
    "rtx-4060": ("RTX 4060", 8188, 89, 272000),
    "rtx-4060-ti-16": ("RTX 4060 Ti", 16380, 89, 288000),
    "rtx-4070": ("RTX 4070", 12282, 89, 504200),
    "rtx-4070-ti": ("RTX 4070 Ti", 12282, 89, 504200),
    "rtx-4070-ti-super": ("RTX 4070 Ti SUPER", 16376, 89, 672300),
    "rtx-4080": ("RTX 4080", 16376, 89, 716800),
    "rtx-4090": ("RTX 4090", 24564, 89, 1008000),
    "rtx-5060-ti-16": ("RTX 5060 Ti", 16311, 120, 448000),
    "rtx-5070": ("RTX 5070", 12227, 120, 672000),
    "rtx-5070-ti": ("RTX 5070 Ti", 16303, 120, 896000),
    "rtx-5080": ("RTX 5080", 16303, 120, 960000),
    "rtx-5090": ("RTX 5090", 32607, 120, 1792000),
    "rtx-a4000": ("RTX A4000", 16376, 86, 448000),
    "rtx-a6000": ("RTX A6000", 49140, 86, 768000),
    "rtx-6000-ada": ("RTX 6000 Ada", 49140, 89, 960000),
    "rtx-pro-6000": ("RTX PRO 6000", 97887, 120, 1792000),
    "v100-16": ("V100", 16384, 70, 900000),
    "v100-32": ("V100", 32768, 70, 1134000),
    "t4": ("T4", 15360, 75, 320000),
    "a10g": ("A10G", 23028, 86, 600200),
    "a40": ("A40", 46068, 86, 696000),
    "a100-40": ("A100", 40960, 80, 1555200),
    "a100-80": ("A100", 81920, 80, 2039000),
    "l4": ("L4", 23034, 89, 300100),
    "l40s": ("L40S", 46068, 89, 864000),
    "h100-80": ("H100", 81559, 90, 3352300),
    "h100-nvl": ("H100 NVL", 95830, 90, 3938300),
    "h200": ("H200", 143771, 90, 4917500),
    "b200": ("B200", 183359, 100, 8000000),
}

# One memory for CPU and GPU; nvidia-smi prints [N/A]. Published sizes in decimal GB.
UNIFIED_GPUS: dict[str, Row] = {
    "dgx-spark": ("GB10", 128, 121, 273100),
    "jetson-orin-32": ("Orin", 32, 87, 204800),
    "jetson-orin-64": ("Orin", 64, 87, 204800),
}
