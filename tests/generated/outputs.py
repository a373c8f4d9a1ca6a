"""The outputs of one question: screen, JSON, Markdown and HTML, gate, compare and plan context."""

import json
import re
import traceback
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from memfit.cli.render.document import Verdict
from memfit.cli.render.output import Format, rendered, visible
from memfit.cli.render.views.estimate import EstimateView
from memfit.estimators.base.units import Units
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.results.estimate import Estimate
from tests.generated.questions import Models, Question
from tests.sizing import test_one_answer as one_answer

_TEXTS: tuple[Format, ...] = ("table", "markdown", "html")
_COMMANDS = {0: "gate", 3: "compare", 6: "plan context"}
"""What a question is compared with, by the last digit of its number; others by their texts."""


def contradictions(
    models: Models, question: Question, result: Estimate, folder: Path, number: int
) -> Iterator[str]:
    """Yield what contradicts a result: by its parts, its texts, and one other command of some."""
    yield from _of_parts(result)
    command = _COMMANDS.get(number % 10)
    if command and question.kind in ("mlx-lm", "other runtime"):
        yield from _of_command(models, question, result, folder, command)
    else:
        yield from _of_texts(result)


def _of_parts(result: Estimate) -> Iterator[str]:
    """The verdict, the actions, the grid and what is recommended."""
    best = result.best
    if result.verdict == "fits" and (best is None or best.settings):
        yield f"it fits, and the best action is {best}"
    if best and not best.settings and best.verdict != result.verdict:
        yield f"nothing has to change, and {best.verdict} is not {result.verdict}"
    workload = result.workload
    for row in result.grid.rows[:1] if result.grid.axis == "context_tokens" else ():
        for tokens, cell in zip(result.grid.columns, row.cells, strict=True):
            is_asked = (tokens, cell.prefill_step) == (
                workload.prompt_tokens,
                workload.prefill_step,
            )
            if is_asked and not row.settings and cell.verdict != result.verdict:
                yield f"{cell.verdict} in the grid, {result.verdict} above it"
    context = result.recommendation.context_tokens.value
    if workload.batch > workload.prefill_batch and workload.max_tokens:
        return  # with a short reply a group ends before the next, and without one all are kept
    # A model's own context may end before a prompt that fits.
    asked = min(workload.prompt_tokens, (result.model.max_context or 2**62) - workload.max_tokens)
    if result.verdict == "fits" and context is not None and context < asked:
        yield f"{workload.prompt_tokens} tokens fit, and {context} are recommended"


def _of_texts(result: Estimate) -> Iterator[str]:
    """What is typed, and the verdict, in all texts and in JSON."""
    view = EstimateView(result, Units.GB)
    document = json.loads(rendered(view, "json", to_file=True))
    texts = {form: _plain(rendered(view, form, to_file=True)) for form in _TEXTS}
    if document["verdict"] != result.verdict:
        yield f"{document['verdict']} in JSON"
    printed = [list(action.commands) for action in result.actions]
    if [action["commands"] for action in document["actions"]] != printed:
        yield "other commands in JSON"
    said = [part.text for part in view.document() if isinstance(part, Verdict)]
    said += result.best.commands if result.best else ()
    said = [_plain(visible(each)) for each in said]
    for form, text in texts.items():
        yield from (f"{form} lacks {each}" for each in said if each not in text)


def _plain(text: str) -> str:
    """A text without its marks, and without where its lines end."""
    return re.sub(r"[\s\\]|&#8203;|<[^>]*>", "", unescape(text))


def _of_command(
    models: Models, question: Question, result: Estimate, folder: Path, command: str
) -> Iterator[str]:
    """The gate, a comparison or a plan of contexts."""
    machine = question.machine
    asked = one_answer.Question(
        question.model,
        machine if isinstance(machine, str) else f"{machine}GB",
        question.runtime,
        question.bits,
        question.given,
        MARGIN_BYTES,
    )
    path = str(models.path(question.model, question.kind))
    try:
        if command == "gate":
            one_answer.check_gate(result, one_answer.gated(asked, path, folder), asked)
        elif command == "compare":
            one_answer.check_comparison(result, one_answer.compared(asked, path))
        else:
            one_answer.check_plan(result, one_answer.planned(asked, path))
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        yield f"{command}: {line} {error}"
