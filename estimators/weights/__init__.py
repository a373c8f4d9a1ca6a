"""Bytes of the parameters: derived from shapes, or read from headers."""

from memfit.estimators.weights.derived import QuantizationPlan, WeightTotals, derive

__all__ = ["QuantizationPlan", "WeightTotals", "derive"]
