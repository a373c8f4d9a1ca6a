"""mlx-vlm's loops that do not take a prompt as `generate_step` does: of a canvas, of a batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from memfit.estimators.base.workload import Workload
from memfit.estimators.trace.libraries import Absent, Silent, changed

# The first token and the one after it: all others are equal.
TOKENS = 2
# Of generate_step by position; stream_generate passes the rest on to the class.
BY_POSITION = ("input_ids", "pixel_values", "attention_mask")
# A loop looks for functions and classes in the process, which may have imported mlx-vlm too.
OWN = {"_generate_module_override": lambda _, own: own}
# Of a canvas: one from noise alone, one with the logits before it, and the last one.
_DENOISING_STEPS = 3
# Of the embeddings of all tokens; a list of tokens is shorter.
_LARGE_MASK = 2**20


class _NoDraft(Silent):
    """mlx-vlm's SpeculativePrefill without a draft model, which keeps nothing."""

    kwargs: Mapping[str, Any] = {}

    def finish(self, output: Any) -> Any:
        return output


@contextmanager
def few_places(module: ModuleType, tokens: int, features: int) -> Iterator[None]:
    """Give a class a NumPy that does not list which embeddings features replace: any will do.

    ``features`` of the ``tokens`` are replaced. The list, and the mask that it is made of, take
    gigabytes for a long prompt.
    """
    import mlx.core as mx

    numpy: Any = getattr(module, "np", None)

    def where(mask: Any, *rest: Any) -> Any:
        if rest or not isinstance(mask, mx.array) or mask.size < _LARGE_MASK or mask.size % tokens:
            return numpy.where(mask, *rest)
        places = mx.broadcast_to(mx.array(0, mx.uint32), (mask.size // tokens * features,))
        mx.eval(places)
        return (places,)

    replaced = {"np": SimpleNamespace(**{**vars(numpy), "where": where})} if numpy else {}
    with changed(module, replaced):
        yield


def denoising(
    step: Callable[..., Iterator[Any]], model: Any, given: Mapping[str, Any], prefill_step: int
) -> Iterator[Any]:
    """Return a run of mlx-vlm's stream_diffusion_generate, which ends after a whole canvas."""
    rest = {name: array for name, array in given.items() if name not in BY_POSITION}
    no_words = SimpleNamespace(reset=bool, finalize=bool, last_segment="")
    return step(
        model,
        SimpleNamespace(detokenizer=no_words),
        SimpleNamespace(stopping_criteria=lambda _: True),
        *map(given.get, BY_POSITION),
        max_tokens=TOKENS,
        skip_special_token_ids=(),
        temperature=0.0,
        max_denoising_steps=_DENOISING_STEPS,
        diffusion_full_canvas=True,
        prefill_step_size=prefill_step,
        **rest,
    )


def batch_generating(
    loop: Any, model: Any, given: Mapping[str, Any], workload: Workload
) -> Iterator[Any]:
    """Run mlx-vlm's batch_generate until its second token, on what its processor would give."""
    replaced = OWN | {
        "prepare_inputs": lambda *_, **__: given,
        "apply_chat_template": lambda *_, **__: "",
        "should_add_special_tokens": lambda *_: False,
        "SpeculativePrefill": _NoDraft,
        "wired_limit": Silent,
    }
    with changed(loop, replaced):
        texts, _ = loop._generate_batch(
            model,
            Absent,  # it stops at the first token, when the second is computed
            [""] * workload.batch,
            max_tokens=TOKENS,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
        )
    return iter(texts)
