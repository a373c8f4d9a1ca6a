"""Every way memfit can fail, as exceptions.

    MemfitError
    ├── InputError              bad usage or input: the user can fix it       (exit 2)
    │   ├── CheckpointError     a file is missing, cut short or inconsistent
    │   ├── ConfigError         a configuration key is missing or has a wrong value
    │   └── PolicyError         a policy file has mistakes: all of them, each with its line
    ├── UnsupportedError        the structure is not described                (exit 3)
    │   ├── DoesNotLoadError    the runtime refuses to load the checkpoint
    │   ├── OtherKindError      no language model: what it is, and what is exact
    │   └── UnknownArchitectureError  no family describes it; what is known, and the ways on
    ├── UnreachableError        a source cannot be reached                    (exit 4)
    └── MachineError            this machine cannot do it                     (exit 5)

The command line turns each into one line and an exit code; docs/errors.md explains each slug.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.setting_names import setting


class MemfitError(Exception):
    """Base of all errors; the message says what happened, where, and how to fix it."""

    slug = "error"

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, one mistake a line: most errors are one."""
        return (str(self),)


class InputError(MemfitError):
    """Bad usage or input that the user can fix."""

    slug = "bad-input"


class CheckpointError(InputError):
    """A checkpoint file is missing, cut short or inconsistent."""

    slug = "bad-checkpoint"


class ConfigError(InputError):
    """A configuration key is missing or holds a wrong value."""

    slug = "bad-config"


class Mistake(NamedTuple):
    """One mistake in a policy: its place and what is wrong."""

    file: str
    line: int  # 0 when it is not known
    key: str  # the path of the key, "targets.chat.limits.peak"; empty for the whole file
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, (place, self.key, self.text)))


class PolicyError(InputError):
    """A policy file has mistakes; ``mistakes`` holds every one, in the order of the file."""

    slug = "bad-policy"

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        """Take at least one mistake."""
        super().__init__("; ".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(str, self.mistakes))


class UnsupportedError(MemfitError):
    """The structure is not described, so no exact figure can be given."""

    slug = "unsupported"


class DoesNotLoadError(UnsupportedError):
    """The runtime refuses to load the checkpoint."""

    slug = "does-not-load"


class OtherModelError(UnsupportedError):
    """An adapter was trained on another model."""


class OtherKindError(UnsupportedError):
    """It is no language model: what it is, what is exact, and what is not decided; a line each."""

    def __init__(self, *lines: str) -> None:
        """Take one line each."""
        super().__init__("; ".join(lines))
        self._lines = lines

    @property
    def lines(self) -> tuple[str, ...]:
        return self._lines


class UnknownArchitectureError(UnsupportedError):
    """No family describes the architecture: what is wrong, what is known, and the ways on."""

    def __init__(self, fault: str, known: str, ways: str, *, trace: str = "") -> None:
        """Take one line each; ``trace`` is why it cannot be traced either."""
        self._fault, self._known, self._ways = fault, known, ways
        on = ways if trace else f"{ways}, {setting('method')} trace (mlx-lm's own class)"
        self._lines = tuple(filter(None, (fault, known, trace, on)))
        super().__init__("; ".join(self._lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """At most four lines."""
        return self._lines

    def after_trace(self, reason: str) -> "UnknownArchitectureError":
        """Return the same with the reason why a trace fails."""
        return UnknownArchitectureError(self._fault, self._known, self._ways, trace=reason)


class UnreachableError(MemfitError):
    """A source (network, permission) cannot be reached."""

    slug = "unreachable"


class MachineError(MemfitError):
    """This machine lacks what the request needs."""

    slug = "machine"
