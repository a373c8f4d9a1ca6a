"""A change of a recipe: some settings that lower what it takes."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization, converted
from memfit.estimators.base.workload import Recipe
from memfit.estimators.results.terms import Cost
from memfit.estimators.results.train import KnobName


class Change(NamedTuple):
    """Settings to change, and the recipe with them."""

    settings: Mapping[KnobName, int | bool]
    recipe: Recipe
    quantize: Quantization | None

    @property
    def cost(self) -> Cost:
        """What the settings cost: only these two leave the result as it is."""
        is_same = self.settings.keys() <= {"grad_checkpoint", "batch_size"}
        return "speed" if is_same else "quality"

    def with_setting(self, name: KnobName, value: int | bool) -> "Change":
        """Return it with one more setting; smaller batches are accumulated."""
        changed = self._replace(settings={**self.settings, name: value})
        if name == "weight_bits":
            return changed._replace(quantize=converted(value))
        if name == "batch_size":
            return changed._replace(recipe=self.recipe.in_batches(value))
        return changed._replace(recipe=replace(self.recipe, **{name: value}))

    def without(self, name: KnobName, start: "Change") -> "Change":
        """Return it with one setting as it was at the start."""
        settings = {key: value for key, value in self.settings.items() if key != name}
        changed = self._replace(settings=settings)
        if name == "weight_bits":
            return changed._replace(quantize=start.quantize)
        fields: dict[str, int | bool] = {name: getattr(start.recipe, name)}
        if name == "batch_size":
            fields["grad_accumulation_steps"] = start.recipe.grad_accumulation_steps
        return changed._replace(recipe=replace(self.recipe, **fields))
