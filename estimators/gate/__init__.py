"""Whether a change of models still fits: a policy, a baseline and a verdict with its numbers."""
