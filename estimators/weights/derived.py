"""Bytes of the parameters, derived from the architecture's shapes."""

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from memfit.estimators.arch.model import Layer, Model, Module, Part
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError


class QuantizationPlan(Struct, frozen=True):
    """Which module is quantised, and how (mlx-lm utils.py, quantize_model and load_model)."""

    default: Quantization
    """The format of every matrix that has no entry of its own."""
    overrides: Mapping[str, Quantization | None] = field(default_factory=dict)
    """A published config's entries by path; None: not quantised."""
    converting: bool = False
    """Whether the class's own ``quant_predicate`` decides the bits, as in mlx_lm.convert; a
    published config already contains its answers, so that only refusals still count."""

    def quantization(self, path: str, module: Module) -> Quantization | None:
        """Return the format of a module's weight, None when it stays as it is.

        Raises:
            UnsupportedError: when the group size given for this matrix does not divide its rows.
        """
        chosen = self._chosen(path, module)
        if chosen and module.shape[-1] % chosen.group_size:
            raise UnsupportedError(
                f"{path}: mlx-lm cannot quantise rows of {module.shape[-1]} in the groups of"
                f" {chosen.group_size} it asks for here; take another group size"
            )
        return chosen

    def layer_formats(self, prefix: str, layer: Layer) -> tuple[Quantization | None, ...]:
        """Return what equal layers can differ in: the formats of modules with entries."""
        if not self.overrides:
            return ()
        return tuple(self.quantization(prefix + m.path, m) for m in layer.modules)

    def _chosen(self, path: str, module: Module) -> Quantization | None:
        if not module.quantizable:
            return None
        # An entry of the config decides before any predicate (mlx-lm utils.py, class_predicate).
        if path in self.overrides:
            return self.overrides[path]
        # Rows that do not divide into groups stay as they are (quantize_model).
        if module.predicate is False or module.shape[-1] % self.default.group_size:
            return None
        if self.converting and isinstance(module.predicate, Quantization):
            return module.predicate
        return self.default


class WeightTotals(Struct):
    """Sums over the tensors of a model."""

    parameters: int = 0
    """Numbers before packing."""
    by_part: Counter[Part] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    """How many loaded tensors there are of each size in bytes."""
    unloaded_by_part: Counter[Part] = field(default_factory=Counter)
    """Bytes of what the runtime drops at load."""
    unloaded_parameters: int = 0

    def add(
        self, part: Part, nbytes: int, *, parameters: int, loaded: bool = True, count: int = 1
    ) -> None:
        """Count equal tensors; bytes and parameters are of one."""
        self.parameters += count * parameters
        self.by_part[part] += count * nbytes
        if loaded:
            self.sizes[nbytes] += count
        else:
            self.unloaded_by_part[part] += count * nbytes
            self.unloaded_parameters += count * parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those the runtime drops included."""
        return self.by_part.total()

    @property
    def unloaded(self) -> int:
        """Bytes of what the runtime drops at load."""
        return self.unloaded_by_part.total()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors the runtime keeps."""
        return sum(size * count for size, count in self.sizes.items())


def derive(model: Model, plan: QuantizationPlan | None) -> WeightTotals:
    """Return the totals of a model built from its config alone, as mlx-lm would write it."""
    totals = WeightTotals()
    for module, quantization, count in formats(model, plan):
        # mlx_lm.convert loads before it writes: what mlx-lm drops is not written.
        if plan and plan.converting and not module.loaded:
            continue
        parameters = module.elements + module.bias
        for nbytes in tensor_bytes(module, model.dtype, quantization):
            totals.add(
                module.part, nbytes, parameters=parameters, loaded=module.loaded, count=count
            )
            # Counted with the weight: scales and biases of its groups are no parameters.
            parameters = 0
    return totals


def formats(
    model: Model, plan: QuantizationPlan | None
) -> Iterator[tuple[Module, Quantization | None, int]]:
    """Yield each kind of module with its format, and how many modules have both.

    Raises:
        UnsupportedError: when a group size given for a matrix does not divide its rows.
    """
    for module, paths in model.module_paths.items():
        if plan is None:
            yield module, None, len(paths)
        elif plan.overrides:
            found = Counter(plan.quantization(path, module) for path in paths)
            yield from ((module, format_, count) for format_, count in found.items())
        else:
            yield module, plan.quantization(paths[0], module), len(paths)


def tensor_bytes(module: Module, dtype: str, quantization: Quantization | None) -> Iterator[int]:
    """Yield the bytes of a module's tensors: weight, scales, biases, and its own bias."""
    # Parameters that a class keeps in float32, whatever the type of the model.
    own_dtype = "F32" if module.float32 else dtype
    if quantization:
        yield from quantization.tensors(module.elements, dtypes.nbytes(1, own_dtype))
    else:
        yield dtypes.nbytes(module.elements, own_dtype)
    if module.bias:
        yield dtypes.nbytes(module.bias, own_dtype)
