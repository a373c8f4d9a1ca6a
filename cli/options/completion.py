"""Names that a shell completes; the modules that know them are imported when it asks."""

from typing import Any


def undescribed(completions: list[Any]) -> list[Any]:
    """Return completions without descriptions, for which Typer would import rich."""
    for each in completions:
        each.help = None
    return completions


def complete_device(incomplete: str) -> list[str]:
    """Return the devices that begin with a text."""
    from memfit.estimators.machine.devices import list_devices

    names = ("host", *(device.name for device in list_devices()))
    return [name for name in names if name.startswith(incomplete)]


def complete_runtime(incomplete: str) -> list[str]:
    """Return the runtimes that begin with a text."""
    from memfit.estimators.runtimes.registry import runtime_names

    return [name for name in runtime_names() if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the samples that begin with a text, and the models of the index with a config.

    Those are found without their owner. Without any the shell completes files.
    """
    from memfit.estimators.checkpoint.index.records import index
    from memfit.estimators.checkpoint.local.samples import sample_names

    samples = [name for name in sample_names() if name.startswith(incomplete)]
    if not incomplete:
        return samples
    known = index()
    names = [
        name if "/" in incomplete else name.partition("/")[2].lower()
        for name in known.names
        if known.model(name).config
    ]
    return list(dict.fromkeys((*samples, *(n for n in names if n.startswith(incomplete)))))


def complete_type(incomplete: str) -> list[str]:
    """Return the model types that begin with a text."""
    from memfit.estimators.arch.registry import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]
