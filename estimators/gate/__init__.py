"""Whether a change of models still fits: a policy, a baseline and a verdict with its numbers."""

POLICY = "memfit.yaml"
"""The name of a policy; the baseline is beside it."""
