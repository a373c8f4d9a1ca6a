"""``memfit plan train``: the memory of mlx_lm.lora, and what lowers it."""

from collections.abc import Iterator, Sequence
from statistics import median_high
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization, converted
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import SHORTEST, Recipe
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions, format_version, parse_version
from memfit.estimators.plans.train.changes import Change
from memfit.estimators.plans.train.commands import train_commands
from memfit.estimators.plans.train.question import TrainQuestion
from memfit.estimators.results.estimate import Limit, Note
from memfit.estimators.results.terms import Basis
from memfit.estimators.results.train import (
    DataSummary,
    KnobName,
    MeasuredPhases,
    TrainingChange,
    TrainingLimits,
    TrainingMemory,
    TrainingPhases,
    TrainPlan,
)
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.run_limits import ending_notes, tightened, training_buffers
from memfit.estimators.sizing.search import first_fitting, halves, most_fitting
from memfit.estimators.sizing.sized_model import SizedModel, is_loadable
from memfit.estimators.sizing.training_steps import TracedSteps
from memfit.estimators.trace.libraries import versions
from memfit.estimators.trace.recording import TooLargeError
from memfit.estimators.trace.replay import CallPeak
from memfit.estimators.trace.training_peak import TrainingPeak
from memfit.estimators.trace.training_recorder import GRADIENTS, LOGITS

MAX_BATCH = 256
_LONGEST = 2**17
_KNOB_BITS = 4
# Trained layers of a class that loops over tokens, with traces of one or two seconds each.
_MOST_LOOPS = 8


def plan_train(sized: SizedModel, question: TrainQuestion) -> TrainPlan:
    """Return what a recipe takes, what fits, and what each setting saves.

    Raises:
        InputError: when the data has fewer examples than a batch.
        UnsupportedError: when mlx-lm cannot train the class, or the step cannot be traced.
    """
    runtime = sized.runtime_model.runtime
    steps = TracedSteps(sized.checkpoint, sized.model.dtype, sized.device, runtime.versions)
    return _TrainPlan(sized, question, steps).result()


def with_measured(
    plan: TrainPlan, measured: MeasuredPhases | None, device: Device | None
) -> TrainPlan:
    """Return a plan by what its recipe took on the device, as it is without a measurement."""
    if measured is None:
        return plan
    phases = (measured.validation_bytes, measured.first_step_bytes, measured.later_steps_bytes)
    need = Need(max(plan.phases.load_bytes, *phases) + plan.margin_bytes, plan.largest_buffer_bytes)
    verdict, exceeded = judge(need, device)
    return replace(
        plan,
        measured=measured,
        needed_bytes=need.peak_bytes,
        basis="measured",
        verdict=verdict,
        exceeded=exceeded,
        actions=plan.actions if verdict == "exceeds" else (),
    )


class _TrainPlan:
    """One question; every setting is evaluated by the same steps."""

    def __init__(self, sized: SizedModel, question: TrainQuestion, steps: TracedSteps) -> None:
        self._sized, self._question, self._steps = sized, question, steps
        self._layers = len(sized.model.layers)
        recipe = question.recipe
        if recipe.num_layers < 1:
            recipe = replace(recipe, num_layers=self._layers)
        self._recipe = recipe
        self._start = Change({}, recipe, question.quantize)

    def result(self) -> TrainPlan:
        recipe, quantize, sized = self._recipe, self._question.quantize, self._sized
        tokens = self._question.tokens(recipe)
        peak = self._peak(recipe, quantize)
        assert peak.first is not None
        memory = _memory(peak, max(peak.moments, key=lambda moment: moment.nbytes))
        phases = TrainingPhases(
            load_bytes=max(self._steps.load_bytes(quantize), peak.frozen_bytes),
            validation_bytes=peak.validation.nbytes if peak.validation else None,
            first_step_bytes=peak.first.nbytes,
            later_steps_bytes=peak.later.nbytes,
        )
        need = self._need(recipe, quantize)
        verdict, exceeded = judge(need, sized.device)
        # They are traced before the search, which begins with some of them.
        knobs = tuple(filter(None, map(self._evaluated, self._knobs())))
        return TrainPlan(
            model=sized.checkpoint.id,
            model_type=sized.model.model_type,
            versions={**versions(), "mlx rules": format_version(self._versions.mlx)},
            device=device_summary(sized.device) if sized.device else None,
            recipe=recipe,
            weight_bits=quantize.bits if quantize else None,
            layers=self._layers,
            sequence_tokens=tokens,
            data=self._data(tokens),
            memory=memory,
            phases=phases,
            measured=None,
            largest_buffer_bytes=need.largest_buffer_bytes,
            margin_bytes=sized.margin_bytes,
            needed_bytes=need.peak_bytes,
            basis=self._basis(peak),
            verdict=tightened(verdict, self._run_limits(peak)),
            exceeded=exceeded,
            limits=self._limits() if sized.device and self._is_searched else None,
            run_limits=self._run_limits(peak),
            knobs=knobs,
            actions=self._actions() if verdict == "exceeds" else (),
            commands=self._commands(recipe, quantize),
            assumptions=tuple(self._assumptions()),
            notes=tuple(self._notes(peak)),
        )

    def _run_limits(self, peak: TrainingPeak) -> tuple[Limit, ...]:
        device, lengths = self._sized.device, self._question.lengths(self._recipe)
        if device and device.backend != "metal":
            return ()
        return (training_buffers(peak.parameters, lengths, peak.constants),)

    @property
    def _versions(self) -> MlxVersions:
        """The versions with the rules that apply; classes and trainer are the installed ones."""
        return self._sized.runtime_model.runtime.versions

    @property
    def _is_cuda(self) -> bool:
        return self._sized.device is not None and self._sized.device.backend == "cuda"

    def _basis(self, peak: TrainingPeak) -> Basis:
        if self._is_cuda:
            return "bound"
        return "derived" if peak.is_continued else "traced"

    @property
    def _is_searched(self) -> bool:
        """Whether traces are quick enough to search what fits; known once a step is traced."""
        loops = self._steps.built(self._question.quantize).loops_in_training
        return not loops or self._recipe.num_layers <= _MOST_LOOPS

    def _peak(
        self, recipe: Recipe, quantize: Quantization | None, *, is_whole: bool = True
    ) -> TrainingPeak:
        tokens, validated = self._question.tokens(recipe), self._question.validated(recipe)
        # Only a validation on longer sequences can take more than a step.
        is_requested = (recipe, quantize) == (self._recipe, self._question.quantize)
        if validated and validated <= tokens and not is_requested:
            validated = None
        return self._steps.peak(
            recipe, tokens, validated=validated, is_whole=is_whole, quantize=quantize
        )

    def _need(
        self, recipe: Recipe, quantize: Quantization | None, *, is_whole: bool = True
    ) -> Need:
        """Return what the largest step needs, with the margin."""
        peak = self._peak(recipe, quantize, is_whole=is_whole)
        nbytes = max(moment.nbytes for moment in peak.moments)
        largest = max(moment.largest_buffer_bytes for moment in peak.moments)
        return Need(
            max(nbytes, self._steps.load_bytes(quantize)) + self._sized.margin_bytes,
            max(largest, peak.largest_parameter_bytes),
        )

    def _commands(self, recipe: Recipe, quantize: Quantization | None) -> tuple[str, ...]:
        if not is_loadable(self._sized):
            return ()
        data = self._question.data
        return train_commands(
            self._sized.checkpoint.to_load,
            recipe,
            data=data.directory if data else None,
            config=self._question.config,
            quantize=quantize,
        )

    def _evaluated(self, change: Change) -> TrainingChange | None:
        """Return what a change saves, None where it makes the graph too large."""
        try:
            need = self._need(change.recipe, change.quantize)
        except TooLargeError:
            return None
        before = self._need(self._recipe, self._question.quantize).peak_bytes
        return TrainingChange(
            settings=change.settings,
            cost=change.cost,
            peak_bytes=need.peak_bytes - self._sized.margin_bytes,
            saved_bytes=max(0, before - need.peak_bytes),
            verdict=judge(need, self._sized.device)[0],
            commands=self._commands(change.recipe, change.quantize),
        )

    def _knobs(self) -> Iterator[Change]:
        """Yield one change each, cheapest first."""
        start = self._start
        if not start.recipe.grad_checkpoint:
            yield start.with_setting("grad_checkpoint", True)
        if start.recipe.batch_size > 1:
            yield start.with_setting("batch_size", 1)
        if start.recipe.num_layers > 1:
            yield start.with_setting("num_layers", start.recipe.num_layers // 2)
        if self._is_convertible:
            yield start.with_setting("weight_bits", _KNOB_BITS)
        # Half of what the batches have, which examples of a data set may not reach.
        tokens = self._question.tokens(start.recipe)
        if tokens >= 2 * SHORTEST:
            yield start.with_setting("max_seq_length", tokens // 2)

    @property
    def _is_convertible(self) -> bool:
        """Whether fewer bits are another setting: mlx_lm.convert may fail on the class."""
        is_plain = self._recipe.fine_tune_type != "full" and not self._question.quantize
        if not is_plain or _KNOB_BITS not in weight_bits_of(self._sized):
            return False
        try:
            self._steps.built(converted(_KNOB_BITS))
        except UnsupportedError:
            return False
        return True

    def _actions(self) -> tuple[TrainingChange, ...]:
        """Return the cheapest settings together that fit, and of them the fewest."""
        # The first is known already, and mostly these are enough.
        changes = tuple(self._joint())
        found = first_fitting(changes[:2], self._fits)
        found = found or first_fitting(changes[2:], self._fits, monotone=True)
        evaluated = self._evaluated(self._fewest(found)) if found else None
        return (evaluated,) if evaluated else ()

    def _fits(self, change: Change) -> bool:
        try:
            need = self._need(change.recipe, change.quantize)
        except TooLargeError:
            return False
        return judge(need, self._sized.device)[0] != "exceeds"

    def _fewest(self, found: Change) -> Change:
        """Return the change without the settings that it fits without, the dearest first.

        Each setting of `_joint` keeps the ones before, of which a later one may need none. One
        that takes more memory here, as checkpointing can, may be all that another makes up for.
        """
        fewer = (found.without(name, self._start) for name in reversed(tuple(found.settings)))
        smaller = next((each for each in fewer if each.settings and self._fits(each)), None)
        return self._fewest(smaller) if smaller else found

    def _joint(self) -> Iterator[Change]:
        """Yield changes that each keep the ones before, those of the least cost first."""
        change = self._start
        if not change.recipe.grad_checkpoint:
            yield (change := change.with_setting("grad_checkpoint", True))
        for size in halves(change.recipe.batch_size, 1):
            yield (change := change.with_setting("batch_size", size))
        if self._is_convertible:
            yield (change := change.with_setting("weight_bits", _KNOB_BITS))
        for layers in halves(change.recipe.num_layers, 1):
            yield (change := change.with_setting("num_layers", layers))
        for length in halves(self._question.tokens(change.recipe), SHORTEST):
            yield (change := change.with_setting("max_seq_length", length))

    def _limits(self) -> TrainingLimits:
        """Return the most of each setting that fits, everything else as requested."""
        recipe, data = self._recipe, self._question.data
        # The trainer needs a whole batch of each set.
        sets = filter(None, (data.train, data.valid)) if data else ()
        examples = min(map(len, sets), default=MAX_BATCH)
        lengths = _lengths(self._longest(), recipe.max_seq_length)
        return TrainingLimits(
            max_seq_length=self._most("max_seq_length", lengths),
            batch_size=self._most("batch_size", range(1, min(examples, MAX_BATCH) + 1)),
            num_layers=self._most("num_layers", range(1, self._layers + 1)),
        )

    def _most(self, name: KnobName, values: Sequence[int]) -> int:
        """Return the largest value of a setting that fits, 0 when none does."""
        device, quantize, recipe = self._sized.device, self._question.quantize, self._recipe
        assert device is not None
        limit = device.working_set_bytes

        def needed(value: int, *, is_whole: bool = False) -> int:
            need = self._need(replace(recipe, **{name: value}), quantize, is_whole=is_whole)
            # A buffer that is too large does not fit, however much memory is free.
            fits = judge(need, device)[0] != "exceeds"
            return need.peak_bytes if fits else max(need.peak_bytes, limit + 1)

        now = getattr(recipe, name)
        found = most_fitting(
            values,
            needed,
            limit,
            # A half of it is among the changes.
            (now,) if name == "batch_size" else (now, max(1, now // 2)),
            floor=self._peak(recipe, quantize).frozen_bytes,
        )
        # The first step is traced for the answer alone: it is hardly ever larger.
        fitting = (v for v in reversed(values) if v <= found and needed(v, is_whole=True) <= limit)
        return next(fitting, 0)

    def _longest(self) -> int:
        """Return the longest sequence to search: of the model, or of the data."""
        longest = min(self._sized.model.max_context or _LONGEST, _LONGEST)
        data = self._question.data
        if data:
            whole = replace(self._recipe, max_seq_length=longest)
            longest = min(longest, self._question.tokens(whole))
        return max(longest, self._recipe.max_seq_length)

    def _data(self, tokens: int) -> DataSummary | None:
        data = self._question.data
        if data is None:
            return None
        counts = [example.tokens for example in data.train]
        return DataSummary(
            directory=data.directory,
            examples=len(counts),
            validation_examples=len(data.valid),
            median_tokens=median_high(counts),
            longest_tokens=max(counts),
            truncated=sum(count > self._recipe.max_seq_length for count in counts),
            longest_batch_tokens=tokens,
            counted="tokenizer" if data.is_tokenized else "bytes",
        )

    def _assumptions(self) -> Iterator[str]:
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        yield (
            f"one batch of each kind, traced with {found}, by the rules of mlx"
            f" {format_version(self._versions.mlx)}; the trainer clears MLX's cache"
        )
        if self._question.data is None:
            yield "a batch is as long as max_seq_length: --data DIR takes the lengths of the data"

    def _notes(self, peak: TrainingPeak) -> Iterator[Note]:
        yield from ending_notes(self._run_limits(peak))
        data, installed = self._question.data, versions()["mlx-lm"]
        if parse_version(installed) != self._versions.mlx_lm:
            text = (
                f"classes and trainer are those of mlx-lm {installed}, which is installed, not of"
                f" {format_version(self._versions.mlx_lm)}"
            )
            yield Note("warning", "other-classes", text)
        if self._is_cuda:
            text = (
                "CUDA: attention is taken as not fused, which some GPUs fuse in training too;"
                " copies and temporaries are those of Metal"
            )
            yield Note("warning", "cuda-bound", text)
        if peak.is_continued:
            text = (
                "the class loops over tokens when it is trained; a few of them are traced and the"
                " rest is added, which was 1 % below to 27 % above whole traces of small models"
            )
            yield Note("info", "token-loop", text)
        if not self._is_searched:
            text = "what fits at most is not searched: a trace of its loops takes seconds"
            yield Note("info", "not-searched", text)
        if data and not data.is_tokenized:
            text = (
                "the model has no tokenizer here: tokens are counted as a third of the bytes of"
                " each line, which is more than most texts have"
            )
            yield Note("warning", "no-tokenizer", text)
        if data and not data.valid:
            yield Note("info", "no-validation", "no valid.jsonl: mlx-lm trains without validation")


def _memory(peak: TrainingPeak, moment: CallPeak[Any]) -> TrainingMemory:
    alive = dict(moment.alive)
    gradients, logits = alive.get(GRADIENTS, 0), alive.get(LOGITS, 0)
    known = (peak.frozen_bytes, peak.trained_bytes, peak.optimizer_bytes, gradients, logits)
    return TrainingMemory(
        weights_bytes=peak.frozen_bytes,
        trained_bytes=peak.trained_bytes,
        optimizer_bytes=peak.optimizer_bytes,
        gradient_bytes=gradients,
        logits_bytes=logits,
        activation_bytes=moment.nbytes - sum(known),
        peak_bytes=moment.nbytes,
    )


def _lengths(longest: int, requested: int) -> Sequence[int]:
    """Return lengths to search: each about an eighth longer than the one before."""
    lengths, length = {requested, longest}, SHORTEST // 2
    while length < longest:
        lengths.add(length)
        length += max(SHORTEST // 2, length // 512 * 64)
    return sorted(lengths)
