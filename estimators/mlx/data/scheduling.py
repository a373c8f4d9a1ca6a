"""How MLX batches work before it waits; read at v0.32.1 and 846d176, the same since v0.31.0.

Metal's and the CPU's rows also at 85a8824, which is 0.29.2 before its release.
"""

from typing import Any

SCHEDULING: dict[str, Any] = {
    "max_active_tasks": 10,  # mlx/transforms.cpp: eval waits while more than MAX_ACTIVE_TASKS are open
    "cpu_dispatches_per_task": 10,  # mlx/backend/cpu/encoder.h, DISPATCHES_PER_TASK
    # mlx/backend/metal/device.cpp, Device::Device; a command buffer is closed when its dispatches
    # are MORE than max_ops or the elements (data_size, not bytes) of the distinct buffers it touches,
    # shifted right by 20, are MORE than max_mebi_elements (CommandEncoder::needs_commit).
    "command_buffers": {
        "p": {"max_ops": 20, "max_mebi_elements": 40},
        "g": {"max_ops": 40, "max_mebi_elements": 40},
        "s": {"max_ops": 50, "max_mebi_elements": 50},
        "d": {"max_ops": 50, "max_mebi_elements": 50},
        "default": {"max_ops": 40, "max_mebi_elements": 40},
    },
    # mlx/backend/cuda/device.cpp, get_graph_limits, by compute capability: a graph is launched when
    # its kernels or the elements of the inputs it reads, counted at each use, are MORE.
    "cuda_graphs": {
        80: {"max_ops": 20, "max_mebi_elements": 400},
        90: {"max_ops": 100, "max_mebi_elements": 1000},
        100: {"max_ops": 100, "max_mebi_elements": 1000},
        120: {"max_ops": 100, "max_mebi_elements": 1000},
        121: {"max_ops": 20, "max_mebi_elements": 25},
        "default": {"max_ops": 20, "max_mebi_elements": 100},
    },
}
