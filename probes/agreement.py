"""Greedy generation along the same tokens with two variants of a model, and how well they agree."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from memfit.estimators.base.units import Count, Number
from memfit.probes.run_monitor import ReportFigures


class Agreement(Struct, frozen=True, kw_only=True):
    """How well a run agrees with a reference, along the tokens that the reference generates."""

    tokens: Count
    same_tokens: Count
    """Steps with the same most likely token."""
    leading_tokens: Count
    """Tokens before the first difference: what a greedy generation has in common."""
    mean_divergence: Number
    """Kullback-Leibler divergence of the next token's distribution, in nats."""
    largest_difference: Number
    """Of two logits."""
    perplexity: Number
    """Of the reference's likeliest tokens: how surprised the run is by them, 1 at best."""
    reference_perplexity: Number
    identical: bool
    """Whether every logit is equal, bit by bit."""

    def is_enough(self, percent: int) -> bool:
        """Return whether at least this share of the tokens is equal."""
        return 100 * self.same_tokens >= percent * self.tokens


def prefill(model: Any, caches: list[Any], ids: Any, step: int, report: ReportFigures) -> None:
    """Fill the caches with a prompt, ``step`` tokens at a time."""
    import mlx.core as mx

    for start in range(0, len(ids), step):
        model(ids[None, start : start + step], cache=caches)
        mx.eval([cache.state for cache in caches])
        report({})


def greedy(
    model: Any, caches: list[Any], following: Any, given: Sequence[int] | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield the logits after ``following``, and after each next token: the likeliest or given."""
    import mlx.core as mx

    index = 0
    while True:
        row = model(following[None], cache=caches)[0, -1].astype(mx.float32)
        best: Any = mx.argmax(row).item()
        chosen = best if given is None else given[index]
        yield row, chosen
        following = mx.array([chosen])
        index += 1


def compared(logits: Any, reference: Any) -> Agreement:
    """Return how well logits agree with those of the reference."""
    import mlx.core as mx

    continued = mx.argmax(reference, axis=-1)
    same: Any = (mx.argmax(logits, axis=-1) == continued).tolist()
    own, other = (each - mx.logsumexp(each, axis=-1, keepdims=True) for each in (logits, reference))
    divergence = mx.maximum((mx.exp(other) * (other - own)).sum(axis=-1), 0)
    found: Any = (mx.mean(divergence).item(), mx.max(mx.abs(logits - reference)).item())
    return Agreement(
        tokens=len(same),
        same_tokens=sum(same),
        leading_tokens=same.index(False) if False in same else len(same),
        mean_divergence=found[0],
        largest_difference=found[1],
        perplexity=_perplexity(own, continued),
        reference_perplexity=_perplexity(other, continued),
        identical=bool(mx.array_equal(logits, reference)),
    )


def _perplexity(log_probabilities: Any, tokens: Any) -> Any:
    import mlx.core as mx

    of_tokens = mx.take_along_axis(log_probabilities, tokens[:, None], axis=-1)
    return mx.exp(-mx.mean(of_tokens)).item()
