"""Where a measurement of MLX's memory starts, in a process that ran other tests."""

import gc


def settled_bytes() -> int:
    """Free what no test uses any more, reset MLX's peak, and return the bytes still in use.

    Modules of mlx-vlm and mlx-lm refer to each other in cycles: freed later, during a
    measurement, an earlier test's model would hide as many bytes of the peak.
    """
    import mlx.core as mx

    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return int(mx.get_active_memory())
