"""The versions of MLX and mlx-lm that the rules of memfit were read in."""

MLX_VERSION = (0, 32, 4)
MLX_LM_VERSION = "0.32.2"
