"""The type of a model's activations, which its caches are kept in."""

from collections.abc import Iterable, Iterator

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.weights.derived import FLOATING, tensor_groups
from memfit.estimators.weights.footprint import as_loaded
from memfit.estimators.weights.quantization_plan import Declared, text_class

_MATRICES = frozenset({Part.ATTENTION, Part.MLP, Part.EXPERTS, Part.SHARED_EXPERTS})


def activation_type(checkpoint: Checkpoint, model: Model, declared: Declared) -> str:
    """Return the type MLX promotes the stream to, whatever the config says.

    The embedding gives the stream its type; a norm or a matrix of another one promotes it, BF16
    with F16 to F32 (mlx dtype.cpp, promote_types). All layers are taken to be as the first, and
    promoted from its beginning: where only a late matrix does it, this is an upper bound.
    Without headers it is the config's.
    """
    modules = dict(model.all_modules())
    first = (t for t in checkpoint.tensors or () if _is_of_first_layer(t.name))
    reader = text_class(checkpoint.config, model)
    loaded = as_loaded(tensor_groups(first), reader, model.model_type, declared.method, modules)
    deciding = set(_deciding(model, modules))
    types = {
        tensor.dtype
        for tensor in loaded
        if tensor.name.rpartition(".")[0] in deciding
        # A packed matrix computes in the type of its scales.
        and tensor.name.endswith((".weight", ".scales"))
        and tensor.dtype in FLOATING
    }
    if not types:
        return model.dtype
    # Of two different types one is F32, or they are F16 and BF16.
    return types.pop() if len(types) == 1 else "F32"


def _deciding(model: Model, modules: dict[str, Module]) -> Iterator[str]:
    """The embedding, and what of the first layer multiplies the stream.

    Not routers and not norms inside a mixer: classes cast what these make back.
    """
    prefix = f"{model.layers_path}.0."
    for path, module in modules.items():
        inner = path.removeprefix(prefix)
        if module.part is Part.EMBEDDING:
            yield path
        # Classes cast back what they compute with their float32 parameters.
        elif inner != path and not module.float32:
            matrix = module.quantizable and module.part in _MATRICES
            if matrix or (module.part is Part.NORM and "." not in inner):
                yield path


def _is_of_first_layer(name: str) -> bool:
    numbers: Iterable[str] = (part for part in name.split(".") if part.isdecimal())
    return next(iter(numbers), "0") == "0"
