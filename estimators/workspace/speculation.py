"""The largest moment of speculative decoding: two models, one of them ahead of the other.

Source: mlx_lm/generate.py, speculative_generate_step. The draft model reads the prompt first, then
the target; each step drafts some tokens one by one, and the target checks all of them in one call.
A head of mlx-vlm drafts from the target's hidden states: mlx_vlm/speculative/mtp.py, _mtp_rounds.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.mixer_kinds import attention_of, gated_delta_of
from memfit.estimators.arch.model import Model
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


def head_moment(
    target: LoadedModel, head: LoadedModel, workload: Workload, tokens: int, *, kept: int
) -> CallMoment | None:
    """Return the largest moment while a target checks ``tokens`` of a head, None without a step.

    Of the prompt the head reads the last token alone, so that its caches have the reply only.
    ``kept`` are bytes that a run holds in addition. A step of the head computes less than a check,
    which runs layers of the same size over all tokens, with the states for a rollback.
    """
    if workload.max_tokens == 1:
        return None
    rows = min(tokens + 1, workload.max_tokens or tokens + 1)
    reply = replace(workload, prompt_tokens=1, max_tokens=workload.max_tokens + rows)
    held = target.resident_bytes + head.resident_bytes + head.caches(reply) + kept
    held += rollback_bytes(target.prepared.model, rows)
    decode = RunMoments(target.prepared, workload, held).decode(rows, 0)
    return max(decode, key=lambda moment: moment.nbytes)


def rollback_bytes(model: Model, rows: int) -> int:
    """Return the bytes of the states that a check of ``rows`` tokens keeps beside the current ones.

    mlx_vlm/models/cache.py, ArraysCache: commit_speculation makes a state a slice of those after
    each token but the last, so that all of them stay; the next check makes one for each token. Of
    a convolution it keeps the inputs, the state before and the one after it.
    """
    recurrent = inputs = 0
    for mixer in map(gated_delta_of, model.mixers()):
        if mixer is not None:
            recurrent += mixer.value_heads * mixer.value_dim * mixer.key_dim
            inputs += (2 * (mixer.kernel - 1) + rows) * mixer.conv_dim
    states = dtypes.nbytes((2 * rows - 2) * recurrent, "F32")
    return states + dtypes.nbytes(inputs, model.dtype)
