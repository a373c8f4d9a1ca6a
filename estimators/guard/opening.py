"""Opens a guard of a model or of its card: for the library, `memfit replay` and `memfit serve`."""

from collections.abc import Callable
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.guard.call_tables import card_tables, model_tables
from memfit.estimators.guard.card import read_card
from memfit.estimators.guard.guard import Guard
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.sizing.sized_model import SizedModel


def open_guard(
    reference: str,
    size: Callable[[], SizedModel],
    settings: ServerSettings,
    *,
    limit_bytes: int | None,
    device: Device | None = None,
) -> Guard:
    """Return the guard of a card, a ``.json`` file, or of the model that ``size`` returns.

    The limit is in bytes; by default it is the working set of the machine less the margin: of
    ``device`` for a card, of the model's own for a model.

    Raises:
        InputError: when a card was altered, no limit is known, or it is below the weights.
        UnsupportedError: for a model that the server does not batch.
    """
    if reference.endswith(".json"):
        tables = card_tables(read_card(Path(reference)))
    else:
        sized = size()
        tables, device = model_tables(sized), sized.device
    if limit_bytes is None:
        if device is None:
            raise InputError("name the machine, such as m4-max-64, or a limit, such as 20GB")
        limit_bytes = device.working_set_bytes - MARGIN_BYTES
    return Guard(
        tables=tables,
        limit_bytes=limit_bytes,
        prompt_concurrency=settings.prompt_concurrency,
        decode_concurrency=settings.decode_concurrency,
        prefill_step=settings.prefill_step,
    )
