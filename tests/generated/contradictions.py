"""What contradicts the answer to a question, in its commands and its outputs."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.plans.server.plan import plan_server
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.sizing.estimate import estimate
from tests.generated import commands, outputs
from tests.generated.questions import Models, Question

# A server is planned whole, with the usual mixes, for every so many questions: that takes a second.
WITH_MIXES = 50


def contradictions(
    models: Models, question: Question, folder: Path, number: int
) -> Iterator[tuple[str, str]]:
    """Yield what was printed for a question, and what it contradicts or an empty text."""
    try:
        sized = models.sized(question)
        if question.kind == "plan server":
            run = replace(question.workload, batch=1)
            plan = plan_server(sized, run, question.server, clients=question.clients)
            yield from commands.of_plan(sized, question, plan)
            return
        workload = question.workload
        if question.kind == "other runtime":
            workload = WorkloadQuestion(**question.given).under(sized.runtime_model.runtime)
        result = estimate(sized, workload)
    except (InputError, UnsupportedError):
        return  # the model is not converted to these bits, or its runtime does not run this
    for action in result.actions:
        mixes = number % WITH_MIXES == 0
        yield from commands.contradictions(models, question, action, with_mixes=mixes)
    found = outputs.contradictions(models, question, result, folder, number)
    yield from (("", contradiction) for contradiction in found)
