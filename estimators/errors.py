"""Every way memfit can fail, as exceptions.

    MemfitError
    ├── InputError              bad usage or input: the user can mend it      (exit 2)
    │   ├── CheckpointError     a file is missing, cut short or inconsistent
    │   └── ConfigError         a configuration key is missing or has a wrong value
    ├── UnsupportedError        the structure is not described                (exit 3)
    ├── UnreachableError        a source cannot be reached                    (exit 4)
    └── MachineError            this machine cannot do it                     (exit 5)

The command line turns each into one line and an exit code; docs/errors.md explains each slug.
"""


class MemfitError(Exception):
    """Base of all errors; the message says what happened, where, and how to mend it."""

    slug = "error"


class InputError(MemfitError):
    """Bad usage or input that the user can mend."""

    slug = "bad-input"


class CheckpointError(InputError):
    """A checkpoint file is missing, cut short or inconsistent."""

    slug = "bad-checkpoint"


class ConfigError(InputError):
    """A configuration key is missing or holds a wrong value."""

    slug = "bad-config"


class UnsupportedError(MemfitError):
    """The structure is not described, so no exact figure can be given."""

    slug = "unsupported"


class UnreachableError(MemfitError):
    """A source (network, permission) cannot be reached."""

    slug = "unreachable"


class MachineError(MemfitError):
    """This machine lacks what the request needs."""

    slug = "machine"
