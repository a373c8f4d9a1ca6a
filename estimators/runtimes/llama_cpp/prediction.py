"""Drafting with a file's own prediction layers (MTP): a second context over them alone.

Source: common/speculative.cpp (draft-mtp), src/llama-memory-recurrent.cpp (n_rs_seq) and
src/models of build b11549, graph_mtp.
"""

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.runtimes.llama_cpp.builder import FLOAT, Context
from memfit.estimators.runtimes.llama_cpp.caches import recurrent_bytes
from memfit.estimators.runtimes.llama_cpp.compute import compute_buffers
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Sizes
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights

# With a graph_mtp, and compared with what build b11549 allocates (tests/gguf/test_prediction.py);
# qwen35moe.cpp has the block of qwen35.cpp with experts.
_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next", "deepseek2", "deepseek32", "glm-dsa")
# src/llama-arch.cpp, llm_arch_supports_rs_rollback: others keep one state.
_KEEPS_STATES = ("qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")


def prediction_layers(model: Model, blocks: int) -> tuple[Layer, ...]:
    """Return the layers behind the trunk of a file: they attend as the last that attends to all.

    An indexer has no cache there: the context of the prediction layers is a plain one.

    Raises:
        InputError: when the file has none.
        UnsupportedError: when the architecture's are not described.
    """
    count = blocks - len(model.layers)
    if not count:
        raise InputError(f"{setting('mtp_tokens')}: the file has no prediction layers")
    if model.model_type not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{setting('mtp_tokens')}: prediction layers of {model.model_type} are not described"
        )
    layer = _attending(model)
    mixers = tuple(
        replace(each, indexer=None) if "indexer" in each.__struct_fields__ else each
        for each in layer.mixers
    )
    return count * (replace(layer, mixers=mixers),)


def _attending(model: Model) -> Layer:
    """The last layer that attends to all tokens."""
    return [
        layer
        for layer in model.layers
        if any(mixer.owns_cache and mixer.window is None for mixer in layer.mixers)
    ][-1]


def kept_states(model: Model, drafted: int) -> int:
    """Return how many recurrent states a sequence has: one more for each drafted token."""
    return 1 + drafted if model.model_type in _KEEPS_STATES else 1


def prediction_buffers(
    model: Model, drafted: int, context: Context, weights: Weights, placement: Placement
) -> Sizes:
    """Return an upper bound of the compute buffers that drafting adds.

    The context of the prediction layers computes one of them for a micro-batch, after its input is
    joined with the embedding; here they are two layers, all of whose rows are computed. Where
    several states are kept, the target has them of a layer, with what is written, at once.
    """
    place = placement.of(placement.blocks - 1)
    on_gpu = placement.blocks + 1 if place is Place.GPU else 0
    alone = replace(placement, gpu_layers=on_gpu, host_experts=0)
    two = replace(model, layers=2 * (_attending(model),), deepstack_layers=0)
    sizes = compute_buffers(two, context, weights, alone)
    joined = 2 * FLOAT * model.hidden_size * context.room.microbatch
    states = max((recurrent_bytes(replace(model, layers=(x,)), 1) for x in model.layers), default=0)
    if (count := kept_states(model, drafted)) > 1:
        joined += context.room.sequences * (count + 1) * states
    if place is Place.GPU:
        return Sizes(gpu=sizes.gpu + joined, host=sizes.host)
    return Sizes(gpu=sizes.gpu, host=sizes.host + joined)
