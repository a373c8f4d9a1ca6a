"""A plan of fine-tuning as a document."""

from collections.abc import Iterator

from memfit.cli.render.chart import working_set
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    VERDICT_WORDS,
    Bar,
    BarChart,
    Commands,
    Document,
    Heading,
    Table,
    Text,
    Verdict,
    section,
)
from memfit.cli.render.view import view
from memfit.cli.render.views.text import budget_of
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.train import TrainingChange, TrainPlan

_TYPES = {"lora": "LoRA", "dora": "DoRA", "full": "full fine-tuning"}


@view(TrainPlan)
def to_document(result: TrainPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of the changes."""
    return (
        Verdict(_verdict(result, units), VERDICT_COLOURS[result.verdict], gap=False),
        Heading(result.model),
        Text(tuple(_facts(result, units)), style="dim", mark="-"),
        Table(("At the largest moment", "Size"), tuple(_parts(result, units)), has_total=True),
        Table(("Peak of", "Size"), tuple(_phases(result, units))),
        *_changes(result, units),
        section("The most that fits, all else as asked", tuple(_limits(result))),
        *_advice(result, units),
        section("Assumptions", result.assumptions),
        section("Notes", tuple(note.message for note in result.notes)),
        *([_chart(result, units)] if plot else ()),
    )


def _chart(result: TrainPlan, units: Units) -> BarChart:
    """What the run takes as asked, and after each change."""
    budget = result.device.working_set_bytes if result.device else None
    needs = {"as asked": result.needed_bytes}
    for change in result.knobs:
        needs[_named(change)] = change.peak_bytes + result.margin_bytes
    return BarChart(
        title="Memory of one change",
        kinds=("needs",),
        bars=[Bar(name, (nbytes,), budget) for name, nbytes in needs.items()],
        units=units,
        limit=working_set(budget, units),
    )


def _verdict(result: TrainPlan, units: Units) -> str:
    recipe = result.recipe
    text = (
        f"{_TYPES[recipe.fine_tune_type]} of {result.model}, {_counted(recipe.num_layers, 'layer')}"
        f", batch {recipe.batch_size}, {result.sequence_tokens} tokens:"
        f" {VERDICT_WORDS[result.verdict]}"
    )
    needed = format_bytes(result.needed_bytes, units)
    if result.device is None:
        named = "--device m4-max-64 or --memory 32GB names one"
        return f"{text} without a device ({named}); it needs {needed}."
    of = f"{needed} of {format_limit(result.device.working_set_bytes, units)}"
    if "max_buffer" in result.exceeded:
        of += f"; its largest buffer is {format_bytes(result.largest_buffer_bytes, units)}"
    return f"{text}, {of}."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _facts(result: TrainPlan, units: Units) -> Iterator[str]:
    recipe = result.recipe
    stored = f"quantised to {result.weight_bits} bits, " if result.weight_bits else ""
    settings = [f"{recipe.num_layers} of {result.layers} layers", recipe.optimizer]
    if recipe.fine_tune_type != "full":
        settings.append(f"rank {recipe.rank}")
    if recipe.grad_checkpoint:
        settings.append("checkpointed")
    if recipe.grad_accumulation_steps > 1:
        settings.append(f"an update every {recipe.grad_accumulation_steps} steps")
    yield f"{result.model_type}, {stored}{', '.join(settings)}"
    if data := result.data:
        counted = "" if data.counted == "tokenizer" else ", estimated from bytes"
        yield (
            f"{data.directory}: {_counted(data.examples, 'example')}, median"
            f" {data.median_tokens} and at most {data.longest_tokens} tokens{counted};"
            f" {data.truncated} are cut to {recipe.max_seq_length}"
        )
    if measured := result.measured:
        peaks = {
            "validation": measured.validation_bytes,
            "first step": measured.first_step_bytes,
            "later steps": measured.later_steps_bytes,
        }
        said = ", ".join(f"{name} {format_bytes(size, units)}" for name, size in peaks.items())
        yield f"measured here ({measured.measurement_id}): {said}; the verdict is by these"
    if result.device:
        device = result.device
        largest = device.max_buffer_bytes
        buffer = f", largest buffer {format_limit(largest, units)}" if largest else ""
        yield budget_of(device, units) + buffer


def _parts(result: TrainPlan, units: Units) -> Iterator[tuple[str, str]]:
    memory = result.memory
    trained = "Trained layers" if result.recipe.fine_tune_type == "full" else "Adapters"
    named = {
        "Frozen weights": memory.weights_bytes,
        trained: memory.trained_bytes,
        "Optimizer state": memory.optimizer_bytes,
        "Gradients": memory.gradient_bytes,
        "Logits and loss": memory.logits_bytes,
        "Activations": memory.activation_bytes,
        "Peak": memory.peak_bytes,
    }
    for name, nbytes in named.items():
        yield name, format_bytes(nbytes, units)


def _phases(result: TrainPlan, units: Units) -> Iterator[tuple[str, str]]:
    phases = result.phases
    named = {
        "Load": phases.load_bytes,
        "Validation": phases.validation_bytes,
        "First step": phases.first_step_bytes,
        "Later steps": phases.later_steps_bytes,
    }
    for name, nbytes in named.items():
        if nbytes is not None:
            yield name, format_bytes(nbytes, units)


def _changes(result: TrainPlan, units: Units) -> Iterator[Table]:
    if result.knobs:
        rows = tuple(
            (
                _named(change),
                change.cost,
                format_bytes(change.peak_bytes, units),
                format_bytes(change.saved_bytes, units),
                "" if result.device is None else VERDICT_WORDS[change.verdict],
            )
            for change in result.knobs
        )
        headings = ("One change", "Costs", "Peak", "Saves", "")
        yield Table(headings, rows, align="llrrl", droppable=(1, 3))


def _named(change: TrainingChange) -> str:
    names = {
        "grad_checkpoint": "--grad-checkpoint",
        "weight_bits": "weights of {} bits",
        "batch_size": "--batch-size {}, accumulated",
    }
    flags = (
        names.get(name, f"--{name.replace('_', '-')} {{}}").format(value)
        for name, value in change.settings.items()
    )
    return ", ".join(flags)


def _limits(result: TrainPlan) -> Iterator[str]:
    if limits := result.limits:
        for name in ("max_seq_length", "batch_size", "num_layers"):
            value = getattr(limits, name)
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {value}" if value else f"{flag}: none"


def _advice(result: TrainPlan, units: Units) -> Iterator[Text | Commands]:
    if result.verdict != "exceeds":
        yield Commands(result.commands)
    elif result.actions:
        for action in result.actions:
            peak = format_bytes(action.peak_bytes, units)
            yield section("Do this", (f"{_named(action)}: peak {peak}",))
            yield Commands(action.commands)
    else:
        text = "no setting makes it fit: use a smaller model, or more memory"
        yield section("Do this", (text,))
