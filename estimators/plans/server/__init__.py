"""What mlx_lm.server takes, for its flags and the requests it gets."""
