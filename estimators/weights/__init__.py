"""Bytes of the parameters: derived from shapes, or read from headers."""

from memfit.estimators.weights.derived import Plan, WeightTotals, derive

__all__ = ["Plan", "WeightTotals", "derive"]
