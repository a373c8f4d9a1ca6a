"""mlx_lm.server behind a guard, in a process of its own."""
