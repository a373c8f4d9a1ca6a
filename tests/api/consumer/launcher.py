"""A small project that uses memfit: mypy --strict accepts it, and finds the marked mistakes."""

import memfit


def largest_that_fits(names: list[str], device: str, context: int) -> memfit.Estimate | None:
    """Return the estimate of the first model that fits."""
    for name in names:
        answer = memfit.estimate(name, device=device, context=context, quantize=4)
        if answer.fits:
            return answer
    return None


def longest(model: memfit.OpenModel, contexts: tuple[str, ...]) -> int | None:
    """Return the peak of the longest context that fits."""
    machine = model.on(memory="32GB")
    answers = [machine.at(context, kv_bits=8) for context in contexts]
    return max((answer.peak_bytes for answer in answers if answer.fits), default=None)


def admitted(path: str, workload: memfit.Workload, device: memfit.Device) -> str:
    """Return what to do with a request."""
    try:
        answer = memfit.open(path).on(device).at(workload)
    except memfit.MemfitError as error:
        return f"{error.slug}: {error}"
    version: str = memfit.__version__
    return f"{version}: {answer.verdict}, {answer.actions[0].commands}, {answer.to_json()}"


def mistakes(answer: memfit.Estimate) -> None:
    """Each line is an error that the types show."""
    memfit.estimate("org/name", contxt="4k")  # type: ignore[call-arg]
    memfit.estimate("org/name", batch="two")  # type: ignore[arg-type]
    memfit.open("org/name").at(prompt_tokens=["4k"])  # type: ignore[arg-type]
    memfit.open("org/name").on(os_regime=26)  # type: ignore[arg-type]
    answer.fitz  # type: ignore[attr-defined]  # noqa: B018
    text: str = answer.peak_bytes  # type: ignore[assignment]
    del text
