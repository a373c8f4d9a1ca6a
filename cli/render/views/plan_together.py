"""The models that fit at once, as a document."""

from memfit.cli.render.document import VERDICT_COLOURS, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import size, tenths, tokens
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import name_as_sold
from memfit.estimators.results.together import TogetherPlan

_WORDS = {"fits": "fit at once", "tight": "fit at once, barely", "exceeds": "do not fit at once"}


@view(TogetherPlan)
def to_document(result: TogetherPlan, units: Units) -> Document:
    """Return each model, the sets that fit, and what to unload for another model."""
    models = [
        (
            model.name,
            tenths(model.weights_bytes, units),
            tenths(model.peak_bytes, units),
            "-" if model.held_bytes is None else tenths(model.held_bytes, units),
            tenths(model.needed_bytes, units) + ("" if model.fits_alone else ", too large alone"),
        )
        for model in result.models
    ]
    sets = [
        (
            str(number),
            ", ".join(each.models),
            tenths(each.needed_bytes, units),
            tenths(each.free_bytes, units, down=True),
            tokens(each.longest_prompt),
        )
        for number, each in enumerate(result.sets, 1)
    ]
    swaps = [
        f"set {number}, to load {swap.to_load}: unload {', '.join(swap.unload)}"
        for number, each in enumerate(result.sets, 1)
        if len(each.models) > 1  # else all of it
        for swap in each.swaps
    ]
    device, symbol = result.device, units.symbol
    room = size(device.working_set_bytes, units, down=True)
    return report(
        title="Models at once",
        facts=(
            f"{name_as_sold(device.name)}, {room} {device.budget}; prompts of"
            f" {result.prompt_tokens} tokens and replies of {result.max_tokens}",
        ),
        tables=(
            Table(
                (f"Model, {symbol}", "Weights", "Peak", "Held", "Needs"),
                models,
                align="lrrrr",
                wrapped=(0,),
            ),
            Table(
                ("Set", "Models", f"Needs, {symbol}", "Free", "Longest prompt"),
                sets,
                align="llrrr",
                wrapped=(1,),
            ),
        ),
        verdict=(
            f"the {len(result.models)} models {_WORDS[result.verdict]}: they need"
            f" {size(result.needed_bytes, units)} of {room}"
        ),
        colour=VERDICT_COLOURS[result.verdict],
        sections=(
            ("To make room, with the least to load again", swaps),
            ("Notes", [note.message for note in result.notes]),
        ),
        commands=[command for model in result.models for command in model.commands],
    )
