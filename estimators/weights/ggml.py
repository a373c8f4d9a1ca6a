"""The weights of a GGUF file: every byte from its tensor table, by part."""

import re
from collections import Counter
from math import prod

from memfit.estimators.arch.model import Part
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.weights.derived import part_rules
from memfit.estimators.weights.footprint import WeightFootprint

# Names as llama.cpp gives them: src/llama-arch.cpp, LLM_TENSOR_NAMES.
# Only a number between dots is replaced by 0: the number of a block.
_part_of = part_rules(
    r"(?<=\.)\d+(?=\.)",
    (Part.VISION, r"^(v|mm|a|resampler)\."),
    (Part.OTHER, r"^(blk\.0\.)?(nextn\.|rope_freqs|rope_factors|altup_|laurel_|inp_gate|proj\.)"),
    (Part.NORM, r"^(.*[._])?(norm|layer_out_scale)([._].*)?"),
    (Part.EMBEDDING, r"^(token_embd|per_layer_token_embd|position_embd|token_types)\..*"),
    (Part.HEAD, r"^output\..*"),
    (Part.ROUTER, r"^blk\.0\.(ffn_gate_inp|exp_probs).*"),
    (Part.SHARED_EXPERTS, r"^blk\.0\.ffn_.*_shexp.*"),
    (Part.EXPERTS, r"^blk\.0\.ffn_(.*_(exps|chexps)|(gate|down|up)\.\d)\..*"),
    (Part.MLP, r"^blk\.0\.(ffn_|channel_mix).*"),
    (Part.ATTENTION, r"^blk\.0\.(attn_|ssm_|time_mix|shortconv|indexer|hc_).*"),
)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


def gguf_footprint(tensors: tuple[Tensor, ...], trunk: int) -> WeightFootprint:
    """Return the weights of a file; blocks from ``trunk`` on stay on disk (prediction layers)."""
    by_part: Counter[Part] = Counter()
    sizes: Counter[int] = Counter()
    unloaded: Counter[str] = Counter()
    for tensor in tensors:
        by_part[part_of(tensor.name)] += tensor.nbytes
        block = _BLOCK.match(tensor.name)
        if block and int(block[1]) >= trunk:
            unloaded[part_of(tensor.name).value] += tensor.nbytes
        else:
            sizes[tensor.nbytes] += 1
    return WeightFootprint(
        nbytes=by_part.total(),
        by_part={part.value: by_part[part] for part in Part},
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        sizes=sizes,
        basis="exact",
        plan=None,
        unloaded_by_part=unloaded,
    )


def part_of(name: str) -> Part:
    """Return the part a tensor of llama.cpp's naming belongs to.

    >>> part_of("blk.7.ffn_gate_exps.weight").value
    'experts'
    """
    return _part_of(name)
