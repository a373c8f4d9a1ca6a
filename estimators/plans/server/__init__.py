"""What mlx_lm.server takes at its worst moment, for its flags and the requests it gets."""
