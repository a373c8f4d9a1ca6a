"""A plan of fine-tuning as data: renderers show it and compute nothing."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Positive, Tokens
from memfit.estimators.base.workload import Recipe
from memfit.estimators.results.estimate import DeviceSummary, Limit, Note
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis, Cost, LimitName, Verdict

KnobName = Literal["grad_checkpoint", "batch_size", "num_layers", "weight_bits", "max_seq_length"]


class TrainingMemory(Struct, frozen=True, kw_only=True):
    """What is in use at the largest moment; the parts add up to ``peak_bytes``."""

    weights_bytes: Bytes
    """Of the frozen parameters."""
    trained_bytes: Bytes
    """Of the adapters, or of the unfrozen layers."""
    optimizer_bytes: Bytes
    gradient_bytes: Bytes
    logits_bytes: Bytes
    """Logits, their gradients and the loss."""
    activation_bytes: Bytes
    """Everything else that a step computes."""
    peak_bytes: Bytes


class TrainingPhases(Struct, frozen=True, kw_only=True):
    """The largest moment of each part of a run."""

    load_bytes: Bytes
    validation_bytes: Bytes | None
    """None where there is no validation set."""
    first_step_bytes: Bytes
    """Until the first update of the optimizer, which makes its state."""
    later_steps_bytes: Bytes


class DataSummary(Struct, frozen=True, kw_only=True):
    """Token counts of the training set, as the trainer sees them."""

    directory: str
    examples: Count
    validation_examples: Count
    median_tokens: Tokens
    longest_tokens: Tokens
    truncated: Count
    """Examples longer than max_seq_length."""
    longest_batch_tokens: Tokens
    """Of each sequence of the longest batch, padded."""
    counted: Literal["tokenizer", "bytes"]
    """How tokens were counted; ``bytes``: from the length of the text, without a tokenizer."""


class TrainingChange(Struct, frozen=True, kw_only=True):
    """One setting changed, or several: what the run then takes."""

    settings: Mapping[KnobName, Count | bool]
    cost: Cost
    peak_bytes: Bytes
    saved_bytes: Bytes
    """0 where it saves nothing."""
    verdict: Verdict
    commands: tuple[str, ...]
    """To paste into a shell."""


class TrainingLimits(Struct, frozen=True, kw_only=True):
    """The most of one setting that fits with the others as they are; 0 when none does."""

    max_seq_length: Tokens
    batch_size: Count
    num_layers: Count


class MeasuredPhases(Struct, frozen=True, kw_only=True):
    """What `memfit tune train` measured of the recipe on this machine."""

    measurement_id: str
    validation_bytes: Bytes
    first_step_bytes: Bytes
    later_steps_bytes: Bytes


class TrainPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-train/1"):
    """The result of ``memfit plan train``."""

    model: str
    model_type: str
    versions: Mapping[str, str]
    """Of the installed libraries, and of MLX the one with the rules that apply."""
    device: DeviceSummary | None
    recipe: Recipe
    weight_bits: Positive | None
    """Of --quantize; None: the checkpoint as it is."""
    layers: Positive
    """Of the model."""
    sequence_tokens: Tokens
    """Of each sequence of the longest batch, padded."""
    data: DataSummary | None
    """None without --data: a batch is then as long as max_seq_length allows."""
    memory: TrainingMemory
    phases: TrainingPhases
    measured: MeasuredPhases | None
    """None where this machine has no measurement of the recipe; it decides where there is one."""
    largest_buffer_bytes: Bytes
    margin_bytes: Bytes
    needed_bytes: Bytes
    """The peak with the margin."""
    basis: Basis
    verdict: Verdict
    exceeded: tuple[LimitName, ...]
    limits: TrainingLimits | None
    """None without a device."""
    run_limits: tuple[Limit, ...]
    """What else may end the run, with its figure."""
    knobs: tuple[TrainingChange, ...]
    """One setting each, cheapest first."""
    actions: tuple[TrainingChange, ...]
    """The cheapest settings together that fit; empty where nothing has to change, or none fit."""
    commands: tuple[str, ...]
    """The run as asked."""
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
