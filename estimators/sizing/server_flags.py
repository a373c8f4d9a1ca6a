"""The flags of mlx_lm.server whose bound fits a device."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.sizing.search import PREFILL_STEPS, first_fitting, halves, is_accepted
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.server_memory import need_of


def fitting_flags(
    bound: ServerBound, settings: ServerSettings, device: Device
) -> ServerSettings | None:
    """Return the flags nearest to ``settings`` whose bound fits the device, None without any.

    Concurrency that the clients cannot use is left out: it costs nothing. Then the levers are the
    size of the prompt cache, which keeps a batch for each entry, the requests that decode, the
    prompts prefilled together, smaller chunks, and no prompt cache at all.
    """

    def fits(flags: ServerSettings) -> bool:
        return judge(need_of(bound.moment(flags)), device)[0] == "fits"

    for flags in _concurrencies(settings, bound.clients):
        size = flags.prompt_cache_size
        if size and is_accepted(fits, replace(flags, prompt_cache_size=1)):
            sizes = [replace(flags, prompt_cache_size=each) for each in range(size, 0, -1)]
            return first_fitting(sizes, fits, monotone=True)
    none = (replace(each, prompt_cache_size=0) for each in _concurrencies(settings, bound.clients))
    return first_fitting(tuple(none), fits)


def _concurrencies(settings: ServerSettings, clients: int) -> Iterator[ServerSettings]:
    decode = min(settings.decode_concurrency, clients)
    prompts = min(settings.prompt_concurrency, clients)
    given = settings.prefill_step
    for step in (given, *(each for each in PREFILL_STEPS if each < given)):
        for together in (prompts, *halves(prompts, 1)):
            for rows in (decode, *halves(decode, 1)):
                # The larger of the two decides how many decode (BatchGenerator).
                if rows >= together:
                    yield replace(
                        settings,
                        prefill_step=step,
                        prompt_concurrency=together,
                        decode_concurrency=rows,
                    )
