"""What a checkpoint's weights take on disk and after the runtime has loaded them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.results.estimate import Note, WeightDoubt
from memfit.estimators.results.terms import Basis
from memfit.estimators.weights.derived import (
    QuantizationPlan,
    TensorGroup,
    WeightTotals,
    derive,
    sizes,
    tensor_groups,
)
from memfit.estimators.weights.headers import read_headers
from memfit.estimators.weights.loading import (
    Conversion,
    CutArray,
    FirstArray,
    conversions,
    normalised_head,
)
from memfit.estimators.weights.match_tensors import Match, match_tensors
from memfit.estimators.weights.quantization_plan import Declared, text_class
from memfit.estimators.weights.sanitize import (
    drop_rule,
    repacked_awq,
    sanitize_conversions,
    sanitize_names,
)


class WeightFootprint(Struct, frozen=True):
    """Weights as the checkpoint holds them and as the runtime does."""

    nbytes: int
    """Bytes on disk."""
    by_part: dict[str, int]
    """Bytes on disk of each part, by its name."""
    parameters: int
    """Numbers before packing; scales and zero points do not count."""
    sizes: Counter[int]
    """How many loaded tensors there are of each size in bytes."""
    basis: Basis
    """``exact`` from headers, ``derived`` from the config, or ``bound``."""
    plan: QuantizationPlan | None
    """Their format after loading."""
    notes: tuple[Note, ...] = ()
    unloaded_by_part: Mapping[str, int] = field(default_factory=dict)
    """Bytes on disk of each part that the runtime does not load."""
    conversions: tuple[Conversion, ...] = ()
    """What is made of the files' tensors while loading."""
    first: tuple[FirstArray, ...] = ()
    """Of these the one that is made before all others, if any is."""
    sliced_bytes: int = 0
    """What slices keep in memory beyond themselves: the rest of the arrays they are cut from."""
    cut: tuple[CutArray, ...] = ()
    """What a tensor-parallel rank reads, in the order in which it does."""
    of_original: bool = False
    """Whether they are of the unquantised original: the library cannot load or convert what is
    there, so that no command runs it."""
    refusal: str = ""
    """Why mlx-lm does not load the checkpoint; empty where nothing is known against it."""
    loaded: tuple[TensorGroup, ...] = ()
    """The loaded tensors under the names of the class; empty where they are not all known."""
    converted_from: tuple[TensorGroup, ...] = ()
    """The ``loaded`` ones of the checkpoint, where these are of its conversion."""
    converter_reads: tuple[Conversion, ...] = ()
    """The ``conversions`` of the checkpoint, where these are of its conversion."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes the runtime keeps, before its allocator rounds them."""
        return sum(size * count for size, count in self.sizes.items())

    @property
    def unloaded_bytes(self) -> int:
        """Bytes on disk that the runtime does not load."""
        return sum(self.unloaded_by_part.values())

    def kept(self, part: Part) -> int:
        """Return the bytes on disk of what the runtime loads of a part."""
        return self.by_part[part.value] - self.unloaded_by_part.get(part.value, 0)


def load_footprint(checkpoint: Checkpoint, model: Model, declared: Declared) -> WeightFootprint:
    """Return the weights of a checkpoint: exact from headers, else derived from its config.

    Where mlx-lm refuses to load it the basis is ``bound``, and a warning says why.

    Raises:
        CheckpointError: when there are headers and no parameter in them.
    """
    if checkpoint.tensors is not None:
        return _from_headers(checkpoint, checkpoint.tensors, model, declared)
    derived = derive(model, declared.plan)
    # PyTorch files: their sizes are known, their contents are never unpickled.
    if checkpoint.weight_bytes_bound is not None:
        return _from_file_sizes(checkpoint.weight_bytes_bound, derived)
    result = footprint_of(derived, "derived", declared.plan)
    if declared.method and declared.is_plain:
        text = (
            f"the config declares {declared.method} weights, which mlx-lm dequantises while"
            " loading: the figure is of what it holds, the files are smaller"
        )
        result = replace(result, notes=(Note("info", "dequantised-at-load", text),))
    if declared.method is None:
        result = bounded_by_name(result, checkpoint.id, model.dtype)
    return _as_declared(result, declared)


def bounded_by_name(result: WeightFootprint, checkpoint_id: str, dtype: str) -> WeightFootprint:
    """Return unquantised weights as a bound where the name of the model says another format."""
    named = _named_format(checkpoint_id)
    if named is None:
        return result
    text = (
        f"the name says {printable(named)}, and the config declares no quantisation: the weights"
        f" count at {dtypes.BITS[dtype]} bits; headers would show what they are"
    )
    return bounded(result, "undeclared-format", text)


# Formats as the names of repositories have them: Qwen3-8B-NVFP4, Mistral-7B-Instruct-4bit.
_NAMED_FORMAT = r"[-.]((?:nv|mx)?fp[48]|awq|gptq|int[48]|w[48]a(?:8|16)|[2-8]-?bits?)(?=$|[-.])"


def _named_format(checkpoint_id: str) -> str | None:
    """Return the format in the name of a model, which is that of its file or directory."""
    path = PurePath(checkpoint_id)
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    found = re.search(_NAMED_FORMAT, name, re.IGNORECASE)
    return found[1] if found else None


def footprint_of(
    totals: WeightTotals, basis: Basis, plan: QuantizationPlan | None
) -> WeightFootprint:
    """Return sums of tensors as weights in the format of a plan."""
    parts = {part.value: totals.by_part[part] for part in Part}
    return WeightFootprint(
        totals.nbytes,
        parts,
        totals.parameters,
        totals.sizes,
        basis,
        plan,
        unloaded_by_part={part.value: size for part, size in totals.unloaded_by_part.items()},
    )


def bounded(result: WeightFootprint, code: WeightDoubt, message: str) -> WeightFootprint:
    """Return the weights as an upper bound, with a warning that says why."""
    return replace(result, basis="bound", notes=(Note("warning", code, message),))


def _as_declared(result: WeightFootprint, declared: Declared) -> WeightFootprint:
    if declared.bound is None:
        return result
    refusal, _, _ = declared.bound.partition("; ")
    if declared.plan is None:
        result = bounded(result, "dequantised", declared.bound)
        return replace(result, of_original=True, refusal=refusal)
    result = bounded(result, "assumed-format", declared.bound)
    return result if declared.quantises else replace(result, refusal=refusal)


def _from_file_sizes(nbytes: int, derived: WeightTotals) -> WeightFootprint:
    parts = {part.value: nbytes if part is Part.OTHER else 0 for part in Part}
    result = WeightFootprint(nbytes, parts, derived.parameters, Counter([nbytes]), "bound", None)
    text = "weights are bounded by the sizes of their files; mlx-lm loads safetensors only"
    refusal = "mlx-lm loads safetensors only, and the weights are in PyTorch files"
    return replace(bounded(result, "file-sizes", text), refusal=refusal)


def _from_headers(
    checkpoint: Checkpoint, tensors: tuple[Tensor, ...], model: Model, declared: Declared
) -> WeightFootprint:
    modules, found = dict(model.all_modules()), tensor_groups(tensors)
    totals = read_headers(found, modules, declared, drop_rule(model, found))
    if not totals.parameters:
        raise CheckpointError(f"{checkpoint.id}: its weight files hold no parameters")
    reader = text_class(checkpoint.config, model)
    loaded = as_loaded(totals.kept, reader, model.model_type, declared.method, modules)
    fit = match_tensors(loaded, modules, declared, rules=row_or_default(model.model_type))
    plan = _plan(fit, modules, declared)
    # Bytes on disk are exact from here on, whatever the load makes of them.
    result = replace(
        footprint_of(totals, "exact", plan),
        conversions=conversions(totals.kept, loaded),
        first=normalised_head(totals.kept, checkpoint.config),
    )
    if unreadable := next((t for t in tensors if t.dtype in _UNREADABLE), None):
        why = (
            f"{printable(unreadable.name)}: MLX has no type {unreadable.dtype} and refuses the file"
        )
        return replace(bounded(_sized(result, loaded), "refused", why), refusal=why)
    if fit.loads:
        result = replace(_sized(result, loaded), loaded=tuple(sorted(loaded)))
        rewritten = result.unloaded_bytes + result.loaded_bytes != result.nbytes
        return replace(result, notes=(_REWRITTEN,) if rewritten else ())
    derived = derive(model, declared.plan)
    # The declared format is an upper bound by itself, whatever the names are.
    if declared.bound:
        sized = _sized(result, loaded) if declared.plan else replace(result, sizes=derived.sizes)
        return _as_declared(replace(sized, plan=declared.plan), declared)
    return _unmatched(_sized(result, loaded), fit, totals, derived)


# MLX's safetensors reader knows no other type (mlx io/safetensors.cpp); F8 is read as bytes.
_UNREADABLE = frozenset(
    {"F64", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)
_REWRITTEN = Note(
    "info",
    "rewritten-at-load",
    "mlx-lm repacks or dequantises the weights while loading: bytes on disk and resident differ",
)


def as_loaded(
    kept: Iterable[TensorGroup],
    reader: str,
    model_type: str,
    method: str | None,
    modules: Mapping[str, Module],
) -> tuple[TensorGroup, ...]:
    """Return the tensors as the runtime holds them, where the class's layout is known."""
    loaded = sanitize_names(sanitize_conversions(tuple(kept), reader), model_type, modules)
    if method == "awq":
        loaded = tuple(repacked_awq(loaded))
    # Of two tensors with one name the last is kept, as in mlx-lm's own dict.
    return tuple({group.name: group for group in loaded}.values())


def _sized(result: WeightFootprint, loaded: tuple[TensorGroup, ...]) -> WeightFootprint:
    return replace(result, sizes=sizes(loaded))


def _plan(fit: Match, modules: Mapping[str, Module], declared: Declared) -> QuantizationPlan | None:
    """The formats found in the headers, over what the config declares."""
    found = {path: value for path, value in fit.formats.items() if modules[path].quantizable}
    default = declared.plan.default if declared.plan else declared.quantises
    if default is None or not any(found.values()):
        return declared.plan
    declared_overrides = declared.plan.overrides if declared.plan else {}
    return QuantizationPlan(default, {**declared_overrides, **found})


def _unmatched(
    result: WeightFootprint, fit: Match, totals: WeightTotals, derived: WeightTotals
) -> WeightFootprint:
    """Names that are not the class's: still right when the number of parameters is the same."""
    refusal = _refusal(fit)
    result = replace(result, refusal=refusal)
    have = totals.parameters - totals.unloaded_parameters
    # A renamed tensor leaves one unknown and one missing name, and the same sum.
    as_many = have == derived.parameters - derived.unloaded_parameters
    if as_many and fit.unknown and fit.missing and not fit.wrong:
        text = (
            f"{printable(fit.unknown[0])}: not a name of the model class, and not one that it"
            " renames: mlx-lm refuses it; the class has as many parameters as the headers"
        )
        return replace(result, basis="derived", notes=(Note("info", "layout", text),))
    why = f"{refusal}; mlx-lm refuses such a checkpoint, and the weights count"
    described = sum(size * count for size, count in derived.sizes.items())
    # What is missing is not in the files. All else is there, if in a format of another program.
    if described > result.loaded_bytes and _is_incomplete(fit):
        result = replace(result, sizes=derived.sizes)
        return bounded(result, "mismatch", f"{why} what the config describes, which is more")
    return bounded(result, "mismatch", f"{why} what it holds")


def _is_incomplete(fit: Match) -> bool:
    """Whether a module of the class has no tensor at all, under no other leaf either."""
    present = {name.rpartition(".")[0] for name in fit.unknown}
    return any(path not in present for path in fit.missing)


def _refusal(fit: Match) -> str:
    if fit.wrong:
        wrong = printable(fit.wrong[0])
        return f"{wrong}: its shape in the header is not the config's{_more(fit.wrong)}"
    if not fit.unknown:
        return f"{fit.missing[0]}: in the model class and in no header{_more(fit.missing)}"
    unknown = printable(fit.unknown[0])
    if not fit.missing:
        return f"{unknown}: in a header and not in the model class{_more(fit.unknown)}"
    why = f"in no header, where {unknown} is not in the model class"
    return f"{printable(fit.missing[0])}: {why}{_more([*fit.missing, *fit.unknown[1:]])}"


def _more(names: Sequence[str]) -> str:
    """How many names there are besides the first.

    >>> _more(["a"]), _more(["a", "b", "c"])
    ('', ' (and 2 more)')
    """
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
