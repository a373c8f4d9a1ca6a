"""A model over several ranks: what each of them takes, and which has the least room."""

from collections.abc import Callable, Hashable, Iterator
from functools import cache

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.ranks import Parallel, Rank, check_split, even_split
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import Ranks
from memfit.estimators.results.estimate import (
    AloneFigures,
    DecodeSpeed,
    Estimate,
    Note,
    OtherSplit,
    RankFigures,
    RankPlan,
)
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.facets import (
    Sharding,
    communication_bytes,
    load_bytes,
    loaded_weights,
)
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.search import fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel, for_rank, verdict_of


class RankedModel(Struct, frozen=True):
    """A model over ranks; ranks that are equal share one sized model."""

    parallel: Parallel | None
    """None: it is not asked to run over ranks."""
    ranks: tuple[SizedModel, ...]
    split: tuple[int, ...] | None
    """In a pipeline, the layers of each rank."""
    is_even: bool = True
    """Whether mlx-lm splits the layers so by itself."""
    whole: SizedModel | None = None
    """The model that the ranks share; None where there is one rank."""
    parts: "_Parts | None" = None
    """In a pipeline, the parts of any split."""

    def tightest(self, workload: Workload) -> SizedModel:
        """Return the rank with the least room, which decides whether the workload fits."""
        return self._first(lambda sized: (room(sized, workload),))

    def full_first(self, workload: Workload) -> SizedModel:
        """Return the rank that is full first as prompts get longer; by room where none is full."""

        def longest(sized: SizedModel) -> tuple[int, ...]:
            # The search for settings, which one rank does not need.
            from memfit.estimators.sizing.recommend import recommended_context

            tokens = recommended_context(sized.formula_view(), workload)
            return tokens or 0, room(sized, workload)

        return self._first(longest)

    def _first(self, key: Callable[[SizedModel], tuple[int, ...]]) -> SizedModel:
        """The rank with the smallest key, which is not computed where all ranks are equal."""
        distinct = list({id(sized): sized for sized in self.ranks}.values())
        return distinct[0] if len(distinct) == 1 else min(distinct, key=key)

    def added(self, estimate: Estimate) -> Estimate:
        """Return an estimate of the tightest rank with the figures of all, if there are ranks."""
        if self.parallel is None:
            return estimate
        return replace(
            estimate,
            ranks=self.plan(estimate.workload, self.parallel),
            decode_speed=self._decode_speed(estimate.workload),
            notes=(*estimate.notes, *self._notes(estimate)),
        )

    def _notes(self, estimate: Estimate) -> Iterator[Note]:
        """Yield that another rank has less room for the longest prompt, as unlike ones may."""
        workload, tightest = estimate.workload, self.tightest(estimate.workload)
        longest = estimate.recommendation.context_tokens.value
        if not isinstance(longest, int) or tightest.device is None:
            return
        others = {id(each): each.formula_view() for each in self.ranks if each is not tightest}
        prompt = workload.prompt_only(longest)
        full = [each for each in others.values() if not fits_comfortably(each, prompt)]
        if full:
            from memfit.estimators.sizing.recommend import recommended_context

            tokens = min(recommended_context(each, workload) or 0 for each in full)
            yield Note(
                "warning",
                "other-rank",
                f"another rank has room for {tokens} tokens; longer prompts and other settings are"
                f" of the rank with the least room at {workload.prompt_tokens}",
            )

    def _decode_speed(self, workload: Workload) -> DecodeSpeed | None:
        """Return a bound: how much of it ranks reach depends on what connects them."""
        from memfit.estimators.sizing.decode_speed import decode_speed, pipeline_speed

        if self.parallel == "pipeline":
            return pipeline_speed(self.ranks, workload)
        distinct = {id(sized): sized for sized in self.ranks}.values()
        speeds = [decode_speed(sized, workload) for sized in distinct]
        if not all(speeds):
            return None
        slowest = min(filter(None, speeds), key=lambda speed: speed.most_tokens_per_second)
        return replace(slowest, expected_tokens_per_second=None, range_tokens_per_second=None)

    def plan(self, workload: Workload, parallel: Parallel) -> RankPlan:
        """Return what every rank takes."""
        return RankPlan(
            parallel=parallel,
            split=self.split,
            even=self.is_even,
            ranks=_all_figures(self.ranks, self.split, workload),
            other=self._other_split(workload) or UNSET,
            alone=tuple(self._alone(workload)),
        )

    def _other_split(self, workload: Workload) -> OtherSplit | None:
        """Return the split that leaves unlike machines the most room, or else the even one."""
        parts = self.parts
        if parts is None or (self.is_even and not parts.are_unlike):
            return None
        # For a class without a formula, with the workspace of all layers: the same at each rank.
        split = parts.by_formula().widest(workload) if self.is_even else parts.even
        if split == self.split:
            return None
        ranks = _all_figures(parts.of(split), split, workload)
        verdict = max((rank.verdict for rank in ranks), key=_WORST_LAST.index)
        return OtherSplit(split=split, even=split == parts.even, verdict=verdict, ranks=ranks)

    def _alone(self, workload: Workload) -> Iterator[AloneFigures]:
        """Yield what each kind of machine takes that runs the whole model alone."""
        if self.whole is None:
            return
        whole = self.whole.formula_view()
        for device in filter(None, dict.fromkeys(sized.device for sized in self.ranks)):
            need = whole.on(device).requirement(workload)
            verdict, _ = judge(need, device)
            if verdict in ("fits", "tight"):
                yield AloneFigures(
                    device=device.name,
                    working_set_bytes=device.working_set_bytes,
                    needed_bytes=need.peak_bytes,
                    verdict=verdict,
                )


def ranked(sized: SizedModel, ranks: Ranks | None) -> RankedModel:
    """Return a sized model over ranks, one without any as it is.

    Without a split of its own a pipeline has the one that mlx-lm makes, on unequal machines too.

    Raises:
        InputError: when the split or the number of ranks is not the model's.
        UnsupportedError: when mlx-lm does not run the model over such ranks.
    """
    if ranks is None:
        return RankedModel(None, (sized,), None)
    if sized.draft or sized.runtime_model.subject.adapter:
        what = "draft model" if sized.draft else "adapter"
        raise UnsupportedError(f"mlx_lm.server loads no {what} on several ranks: leave it out")
    sharding = sized.runtime_model.facet(Sharding)
    if sharding is None:
        raise UnsupportedError(
            f"{sized.runtime}: several ranks are described for mlx-lm, which mlx.launch starts"
        )
    parallel = sharding.parallel(ranks.parallel)
    if ranks.split and parallel == "tensor":
        raise InputError(
            f"{setting('split')} is of the layers of a pipeline: add {setting('parallel')} pipeline"
        )
    if ranks.size == 1:
        return RankedModel(parallel, (sized.on(ranks.device(0, sized.device)),), None)
    if parallel == "tensor":
        share = for_rank(sized, Rank(0, ranks.size, parallel))
        # Equal in bytes: `shard` cuts every matrix into equal parts.
        placed = _placing(share)
        devices = (ranks.device(index, sized.device) for index in range(ranks.size))
        return RankedModel(parallel, tuple(map(placed, devices)), None, whole=sized)
    return _pipeline(sized, ranks)


def room(sized: SizedModel, workload: Workload) -> int:
    """Return the bytes that a workload leaves, below 0 where they are missing."""
    need = sized.requirement(workload).peak_bytes
    return (sized.device.working_set_bytes if sized.device else 0) - need


def _placing(share: SizedModel) -> Callable[[Device | None], SizedModel]:
    @cache
    def placed(device: Device | None) -> SizedModel:
        return share if device == share.device else share.on(device)

    return placed


def _pipeline(sized: SizedModel, ranks: Ranks) -> RankedModel:
    count = len(sized.model.layers)
    if ranks.split:
        check_split(ranks.split, ranks.size, count)
    if ranks.size > count:
        raise InputError(
            f"{setting('ranks')} {ranks.size}: the model has {count} layers, each rank needs one"
        )
    parts = _Parts(sized, ranks)
    split = ranks.split or parts.even
    return RankedModel("pipeline", parts.of(split), split, split == parts.even, sized, parts)


class _Parts:
    """The parts of a pipeline, each computed once."""

    def __init__(self, sized: SizedModel, ranks: Ranks) -> None:
        self._sized, self._ranks = sized, ranks
        self._kept: dict[Hashable, SizedModel] = {}

    @property
    def even(self) -> tuple[int, ...]:
        """The split that mlx-lm makes."""
        return even_split(len(self._sized.model.layers), self._ranks.size)

    @property
    def are_unlike(self) -> bool:
        """Whether machines differ."""
        return len(set(self._ranks.devices)) > 1

    def by_formula(self) -> "_Parts":
        """The same with figures by formula."""
        return _Parts(self._sized.formula_view(), self._ranks)

    def of(self, split: tuple[int, ...]) -> tuple[SizedModel, ...]:
        """Return all parts of a split."""
        return tuple(self.part(index, split) for index in range(self._ranks.size))

    def part(self, index: int, split: tuple[int, ...]) -> SizedModel:
        """Return the part of one rank."""
        chosen = None if split == self.even else split
        rank = Rank(index, self._ranks.size, "pipeline", chosen)
        start, end = rank.layers(len(self._sized.model.layers))
        # Both by formula and by trace, equal layers at equal ends of the pipeline are equal.
        own = self._sized.model.layers[start:end] if self._is_described else (start, end)
        device = self._ranks.device(index, self._sized.device)
        # A part of an uneven split is one that mlx-lm's programs do not make.
        key = own, rank.receives, rank.sends, device, chosen is None
        if key not in self._kept:
            self._kept[key] = for_rank(self._sized.on(device), rank)
        return self._kept[key]

    @property
    def _is_described(self) -> bool:
        return isinstance(self._sized.runtime_model.subject.source, Formula)

    def widest(self, workload: Workload) -> tuple[int, ...]:
        """Return the split that leaves the rank with the least room the most."""
        best = self.even
        parts = self.of(best)
        low = min(room(part, workload) for part in parts)
        high = min(part.device.working_set_bytes if part.device else 0 for part in parts)
        while high - low > _EXACT_TO:
            middle = (low + high) // 2
            split = self._with_room(middle, workload)
            low, high, best = (middle, high, split) if split else (low, middle, best)
        return best

    def _with_room(self, least: int, workload: Workload) -> tuple[int, ...] | None:
        """Return a split that leaves every rank this room, from the first layers on, or None."""
        size, left = self._ranks.size, len(self._sized.model.layers)
        split = [0] * size
        start = 0
        for index in reversed(range(size)):
            most = left - index
            low, high = 0, most
            while low < high:
                middle = (low + high + 1) // 2
                fits = self._room(index, start, middle, workload) >= least
                low, high = (middle, high) if fits else (low, middle - 1)
            if not low:
                return None
            split[index], start, left = low, start + low, left - low
        return tuple(split) if not left else None

    def _room(self, index: int, start: int, layers: int, workload: Workload) -> int:
        size, count = self._ranks.size, len(self._sized.model.layers)
        # Any split with these layers at this rank will do; higher ranks have the layers before.
        before = [0] * (size - index - 1)
        if before:
            before[0] = start
        after = [0] * index
        if after:
            after[-1] = count - start - layers
        return room(self.part(index, (*after, layers, *before)), workload)


_WORST_LAST: tuple[Verdict, ...] = ("unknown", "fits", "tight", "exceeds")
# A split is compared to the byte of its layers; a megabyte decides nothing.
_EXACT_TO = 10**6


def _all_figures(
    ranks: tuple[SizedModel, ...], split: tuple[int, ...] | None, workload: Workload
) -> tuple[RankFigures, ...]:
    """The figures of all ranks; those that are equal share one model."""
    figures: dict[int, RankFigures] = {}
    for sized in ranks:
        if id(sized) not in figures:
            figures[id(sized)] = _figures(sized, workload)
    return tuple(
        replace(figures[id(sized)], rank=index, first_layer=sum(split[index + 1 :]) if split else 0)
        for index, sized in enumerate(ranks)
    )


def _figures(sized: SizedModel, workload: Workload) -> RankFigures:
    figures, need = sized.figures_for(workload), sized.requirement(workload)
    verdict, exceeded = verdict_of(sized, workload)
    runtime_model, moment = sized.runtime_model, figures.moment
    return RankFigures(
        rank=0,
        device=sized.device.name if sized.device else None,
        working_set_bytes=sized.device.working_set_bytes if sized.device else None,
        first_layer=sized.model.first_layer,
        layers=len(sized.model.layers),
        weights_bytes=loaded_weights(runtime_model).loaded_bytes,
        resident_bytes=sized.resident_bytes,
        kv_bytes=figures.kv.nbytes,
        state_bytes=figures.ssm_bytes,
        workspace_bytes=moment.workspace_bytes,
        communication_bytes=communication_bytes(runtime_model),
        load_bytes=max(load_bytes(runtime_model), sized.resident_bytes),
        prefill_bytes=moment.prefill_bytes,
        decode_bytes=moment.decode_bytes,
        peak_bytes=moment.nbytes,
        needed_bytes=need.peak_bytes,
        verdict=tightened(verdict, run_limits(sized, workload)),
        exceeded=exceeded,
    )
