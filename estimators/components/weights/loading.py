"""What a checkpoint's weights take on disk and after the runtime has loaded them."""

from collections import Counter
from dataclasses import dataclass, replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.components.weights.derived import Plan, WeightTotals, derive
from memfit.estimators.components.weights.headers import in_mlx_layout, read
from memfit.estimators.components.weights.plans import Declared
from memfit.estimators.result import Basis, Note


@dataclass(frozen=True, slots=True)
class Weighed:
    """Weights as the checkpoint holds them and as the runtime does.

    ``sizes`` counts the loaded tensors by bytes; ``plan`` is their format after loading.
    """

    nbytes: int
    by_part: dict[str, int]
    parameters: int
    sizes: Counter[int]
    basis: Basis
    plan: Plan | None
    notes: tuple[Note, ...] = ()
    unloaded_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes the runtime keeps, before its allocator rounds them."""
        return sum(size * count for size, count in self.sizes.items())


def weigh(checkpoint: Checkpoint, model: Model, declared: Declared) -> Weighed:
    """Return the weights of a checkpoint: exact from headers, else derived from its config."""
    derived = derive(model, declared.plan)
    if checkpoint.tensors is not None:
        return _from_headers(checkpoint.tensors, model, declared, derived)
    if checkpoint.weight_bytes_bound is not None:
        return _from_file_sizes(checkpoint.weight_bytes_bound, derived)
    result = _result(derived, "derived", declared.plan)
    return _bounded(result, declared) if declared.bound else result


def convert(model: Model, plan: Plan) -> Weighed:
    """Return the weights after conversion by mlx_lm.convert with a plan."""
    kept = replace(model, modules=tuple(m for m in model.modules if m.loaded))
    return _result(derive(kept, plan), "derived", plan)


def add_adapter(weighed: Weighed, tensors: tuple[Tensor, ...]) -> Weighed:
    """Return the weights with an adapter's tensors, which stay beside them in memory."""
    extra = Counter(tensor.nbytes for tensor in tensors)
    total = sum(size * count for size, count in extra.items())
    parts = {**weighed.by_part, "other": weighed.by_part["other"] + total}
    return replace(
        weighed, nbytes=weighed.nbytes + total, by_part=parts, sizes=weighed.sizes + extra
    )


def _result(totals: WeightTotals, basis: Basis, plan: Plan | None) -> Weighed:
    parts = {part.value: totals.by_part[part] for part in Part}
    return Weighed(
        totals.nbytes,
        parts,
        totals.parameters,
        totals.sizes,
        basis,
        plan,
        unloaded_bytes=totals.unloaded,
    )


def _from_headers(
    tensors: tuple[Tensor, ...], model: Model, declared: Declared, derived: WeightTotals
) -> Weighed:
    totals = read(tensors, model, declared.plan)
    result = _result(totals, "exact", declared.plan)
    if totals.mismatch:
        return _bounded(result, None, "mismatch", _disagrees(totals.mismatch))
    if declared.bound:
        return _bounded(replace(result, sizes=derived.sizes), declared)
    if declared.method in ("fp8", "awq", "gptq", "compressed-tensors", "modelopt"):
        # The loader rewrites these; what it makes of them follows from the class's shapes.
        note = Note("info", "rewritten-at-load", _rewritten(declared.method))
        return replace(result, sizes=derived.sizes, notes=(note,))
    if in_mlx_layout(tensors, model):
        return result
    return _sanitised(result, totals.loaded_parameters, derived)


def _sanitised(result: Weighed, loaded_parameters: int, derived: WeightTotals) -> Weighed:
    """A layout the model class's ``sanitize`` renames and stacks without changing bytes."""
    expected = derived.parameters - derived.unloaded_parameters
    if loaded_parameters == expected:
        same = result.loaded_bytes == derived.loaded_bytes
        return replace(result, sizes=derived.sizes) if same else result
    if loaded_parameters > expected:
        message = (
            f"the headers hold {loaded_parameters - expected} parameters more than the model"
            " class; mlx-lm drops or refuses some, the figure counts them all"
        )
    else:
        message = (
            f"the headers lack {expected - loaded_parameters} of the model class's parameters;"
            " mlx-lm refuses such a checkpoint"
        )
    return _bounded(result, None, "parameter-count", message)


def _from_file_sizes(nbytes: int, derived: WeightTotals) -> Weighed:
    note = Note(
        "warning",
        "file-sizes",
        "weights are bounded by the sizes of their files; mlx-lm loads safetensors only",
    )
    parts = {part.value: nbytes if part is Part.OTHER else 0 for part in Part}
    return Weighed(
        nbytes, parts, derived.parameters, Counter([nbytes]), "bound", None, (note,)
    )


def _bounded(
    result: Weighed, declared: Declared | None, code: str = "dequantised", message: str = ""
) -> Weighed:
    text = declared.bound if declared and declared.bound else message
    return replace(result, basis="bound", notes=(Note("warning", code, text),))


def _disagrees(name: str) -> str:
    return (
        f"{name}: its shape in the header is not the config's; mlx-lm refuses such a checkpoint,"
        " and the weights count what the files hold"
    )


def _rewritten(method: str) -> str:
    return f"mlx-lm rewrites {method} weights while loading: bytes on disk and resident differ"
