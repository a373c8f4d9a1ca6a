"""The peaks of models by the classes of one version of mlx-lm or mlx-vlm: a process of its own.

A question in JSON comes on standard input, the answer in JSON goes to standard output. The folder
of the question is searched before every other, so the version there is the one that is traced.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from msgspec import Struct
from msgspec.json import decode, encode

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.results.library_diff import CallShape
from memfit.model import open

PROMPTS = (1, 2048, 2049, 4096, 5000)
"""Prompts whose calls are observed: about the default step of 2,048 tokens."""


class LibraryQuestion(Struct, frozen=True, forbid_unknown_fields=True):
    """Which models are traced, with which packages."""

    folder: str | None
    has_mlx_vlm: bool
    models: tuple[str, ...]
    prompts: tuple[int, ...]
    device: str
    image: str | None


class LibraryPeaks(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: peaks in bytes for each prompt of a model, or the reason why there is none."""

    versions: dict[str, str]
    peaks: dict[str, tuple[int, ...] | str]
    calls: dict[int, tuple[CallShape, ...]]
    """Those of generate_step, by tokens of the prompt."""


class _Cache:
    """An empty cache of any class, which `generate_step` only looks at."""

    offset = 0
    state = ()
    nbytes = 0

    def empty(self) -> bool:
        return True


class _Model:
    """A model of mlx-lm, or of mlx-vlm, that only notes its calls."""

    layers = (None,)
    config = SimpleNamespace(model_type="")

    def __init__(self) -> None:
        self.calls: list[CallShape] = []
        self.language_model = self

    def make_cache(self) -> list[_Cache]:
        return [_Cache()]

    def get_input_embeddings(self, tokens: Any, *_: Any, **__: Any) -> Any:
        import mlx.core as mx

        embedded = mx.zeros((*tokens.shape, 8))
        return SimpleNamespace(inputs_embeds=embedded, to_dict=lambda: {"inputs_embeds": embedded})

    def _called(self, tokens: int, rows: int | None) -> Any:
        import mlx.core as mx

        self.calls.append((tokens, rows or tokens))
        return mx.zeros((1, tokens, 8))

    def __call__(self, tokens: Any = None, **settings: Any) -> Any:
        if "inputs_embeds" not in settings:
            return self._called(tokens.shape[1], None)
        embedded = settings["inputs_embeds"]
        count = (tokens if embedded is None else embedded).shape[1]
        logits = self._called(count, settings.get("logits_to_keep"))
        return SimpleNamespace(logits=logits, cross_attention_states=None, encoder_outputs=None)


def observed_calls(prompt: int, *, has_mlx_vlm: bool = False) -> tuple[CallShape, ...]:
    """Return the calls that generate_step of mlx-lm, or of mlx-vlm, makes for a prompt.

    Three tokens are generated: the library itself is run, with a model that computes nothing.
    """
    import mlx.core as mx

    from memfit.estimators.trace.libraries import PrivateLibrary

    model, library = _Model(), PrivateLibrary("loop")
    tokens = mx.zeros((prompt,), mx.int32)
    if has_mlx_vlm:
        step = library.load("mlx_vlm.generate.ar").generate_step
        run = step(tokens[None], model, None, None, max_tokens=3)
    else:
        run = library.load("mlx_lm.generate").generate_step(tokens, model, max_tokens=3)
    for _ in run:
        pass
    return tuple(model.calls)


def _peaks(question: LibraryQuestion, versions: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name in question.models:
        try:
            model = open(name, method="trace", mlx_lm_version=versions["mlx-lm"])
            there = model.on(question.device)
            settings: Any = {"image": question.image} if question.image else {}
            yield name, tuple(there.peak(prompt, **settings) for prompt in question.prompts)
        except MemfitError as error:
            yield name, str(error)


def answer(question: LibraryQuestion) -> LibraryPeaks:
    """Return the peaks of all models, and the calls of the loop."""
    from memfit.estimators.trace.libraries import versions, vision_versions

    found = vision_versions() if question.has_mlx_vlm else versions()
    calls = {prompt: observed_calls(prompt, has_mlx_vlm=question.has_mlx_vlm) for prompt in PROMPTS}
    return LibraryPeaks(found, dict(_peaks(question, found)), calls)


def main() -> None:
    """Answer the question on standard input."""
    question = decode(sys.stdin.buffer.read(), type=LibraryQuestion)
    if question.folder is not None:
        sys.path.insert(0, question.folder)
    if not question.has_mlx_vlm:
        # Another version of mlx-lm may not go with the mlx-vlm that is installed.
        sys.modules["mlx_vlm"] = None  # type: ignore[assignment]
    sys.stdout.buffer.write(encode(answer(question)))


if __name__ == "__main__":
    main()
