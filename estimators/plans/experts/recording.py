"""What the routers chose for every token of some runs, as a file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from memfit.estimators.base.files import read_whole
from memfit.estimators.base.reading.section import Section, json_section, to_record
from memfit.estimators.plans.experts.routing import RoutingProfile, profile_in
from memfit.estimators.weights.expert_slots import ExpertLayer

KEY = "recording"
MOST_BYTES = 256 * 10**6
_MOST_VALUES = 64_000_000


class RecordedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The calls of one run of the model."""

    calls: tuple[int, ...]
    """The tokens of each call."""
    choices: tuple[tuple[int, ...], ...]
    """For each layer with experts, the experts of every token, one token after another."""

    def steps(self, top_k: int) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
        """Yield the tokens of each call, and what each layer chose in it."""
        start = 0
        for tokens in self.calls:
            end = start + tokens * top_k
            yield tokens, tuple(layer[start:end] for layer in self.choices)
            start = end


class Recording(Struct, frozen=True, forbid_unknown_fields=True):
    """The runs that were measured."""

    top_k: int
    runs: tuple[RecordedRun, ...]
    """One for each prompt."""
    order: tuple[int, ...]
    """The runs in which they follow each other, by their places; the slots stay as they are."""
    warm_up: int = 0
    """How many of the first only fill the slots, and are not counted."""


def with_recording(profile_text: str, recording: Recording) -> str:
    """Return the file of a profile with the recording of the runs."""
    top = json.loads(profile_text)
    return json.dumps({**top, KEY: to_builtins(recording)}) + "\n"


def read_recording(
    path: Path, layers: Sequence[ExpertLayer], model_type: str
) -> tuple[RoutingProfile, Recording]:
    """Return the profile and the recording of a file.

    Raises:
        InputError: when the file is none, damaged or of another model.
    """
    content = read_whole(path, limit=MOST_BYTES)
    top = json_section(content, path, what="the recorded routing", max_values=_MOST_VALUES)
    if KEY not in top.values:
        raise top.fail(KEY, "missing: memfit tune experts --record FILE writes it")
    recording: Recording = to_record(Recording, top.values[KEY], top.reading, (KEY,))
    profile = profile_in(top, layers, model_type)
    _check(recording, layers, top)
    return profile, recording


def _check(recording: Recording, layers: Sequence[ExpertLayer], top: Section) -> None:
    def fail(text: str) -> Any:
        return top.reading.fail((KEY,), text)

    if recording.top_k != layers[0].top_k:
        raise fail(f"a token has {recording.top_k} experts there, {layers[0].top_k} in this model")
    if not 0 <= recording.warm_up < len(recording.order):
        raise fail("warm_up: there is no run after it")
    if not all(0 <= number < len(recording.runs) for number in recording.order):
        raise fail(f"order: expected places from 0 to {len(recording.runs) - 1}")
    for number, run in enumerate(recording.runs):
        if not run.calls or min(run.calls) < 1 or len(run.choices) != len(layers):
            raise fail(f"runs[{number}]: expected calls with tokens, and {len(layers)} layers")
        length = sum(run.calls) * recording.top_k
        for chosen, layer in zip(run.choices, layers, strict=True):
            if len(chosen) != length or not 0 <= min(chosen) <= max(chosen) < layer.experts:
                raise fail(
                    f"runs[{number}]: layer {layer.index}: expected {length} experts from 0 to"
                    f" {layer.experts - 1}"
                )
