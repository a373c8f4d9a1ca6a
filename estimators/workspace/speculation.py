"""The largest moment of speculative decoding: two models, one of them ahead of the other.

Source: mlx_lm/generate.py, speculative_generate_step. The draft model reads the prompt first, then
the target; each step drafts some tokens one by one, and the target checks all of them in one call.
"""

from collections.abc import Iterator

from msgspec import Struct

from memfit.estimators.arch.mixer_kinds import attention_of
from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kernels import KEPT_BYTES
from memfit.estimators.workspace.call import CallShape
from memfit.estimators.workspace.moments import CallMoment, RunMoments
from memfit.estimators.workspace.prepared import PreparedModel
from memfit.estimators.workspace.run_caches import RunCaches


class LoadedModel(Struct, frozen=True):
    prepared: PreparedModel
    resident_bytes: int

    def caches(self, workload: Workload) -> int:
        """Return the bytes of its caches when a workload ends."""
        return RunCaches(self.prepared, workload).kept_bytes()

    def kept(self, workload: Workload, drafted: int) -> int | None:
        """Return the freed bytes that MLX keeps of decoding: all caches that larger ones replace.

        speculative_generate_step clears after the chunks of the prompt alone. None: scores that no
        kernel fuses are kept too, in each size that they have had.
        """
        traits, keys = self.prepared.traits, workload.total_tokens
        if (most := KEPT_BYTES[traits.backend]) is not None:
            return most
        call = CallShape(drafted + 1, 1, 0, traits, {}, 0)
        for mixer in map(attention_of, self.prepared.model.mixers()):
            if mixer is None or not (
                mixer.fused
                and call.fused(
                    keys=keys,
                    key_dim=mixer.key_dim,
                    value_dim=mixer.value_dim,
                    heads=mixer.heads,
                    kv_heads=mixer.kv_heads,
                    array_mask=bool(mixer.window),
                    quantised=workload.kv_bits is not None,
                )
            ):
                return None
        return RunCaches(self.prepared, workload).replaced_in_decode(drafted + 1)

    def sample(self) -> int:
        """Return the bytes of the log-probabilities of a token."""
        model = self.prepared.model
        return dtypes.nbytes(model.vocab_size, model.dtype)


def speculative_moments(
    target: LoadedModel, draft: LoadedModel, workload: Workload, tokens: int
) -> Iterator[CallMoment]:
    """Yield the moments that can be the largest, with ``tokens`` drafted for each step."""
    drafted = min(tokens, workload.max_tokens or tokens)
    prompt = workload.prompt_only(max(1, workload.prompt_tokens - 1))
    both = target.resident_bytes + draft.resident_bytes
    yield from RunMoments(draft.prepared, workload, both).prefill()
    yield from RunMoments(target.prepared, workload, both + draft.caches(prompt)).prefill()
    # The caller holds a row of the log-probabilities of the step before, which keeps all of them.
    checked = drafted + 1 if workload.max_tokens > 1 else 0
    held = both + target.caches(workload) + checked * target.sample()
    # After a step with every draft accepted, the next begins with two tokens; each finds the
    # log-probabilities of the draft before it.
    yield from RunMoments(draft.prepared, workload, held).decode(2, min(1, drafted - 1))
    held = both + draft.caches(workload)
    yield from RunMoments(target.prepared, workload, held).decode(drafted + 1, checked)
