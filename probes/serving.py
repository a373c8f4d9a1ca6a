"""Starts mlx_lm.server behind a guard, and waits for its end."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.mlx.versions import MLX_LM_VERSION
from memfit.probes.process import CHILD_ENVIRONMENT, ending, require_installed

REFUSED_FLAGS = {
    "--trust-remote-code": "memfit runs no code of a model repository",
    "--draft-model": "with a draft model the server batches nothing",
    "--kv-bits": "with KV bits the server batches nothing",
    "--prompt-cache-bytes": "the guard decides how much is stored",
    "--pipeline": "a guard is of one machine",
    "--model": "MODEL is the model",
    "--adapter-path": "--adapter is the adapter",
}


SAID_WHY = 2
"""The exit code of a server that has written which input is wrong."""


def require_flags(flags: Sequence[str]) -> None:
    """Check the flags that are passed on to mlx_lm.server.

    Raises:
        InputError: for one that is not guarded.
    """
    for flag in flags:
        name = flag.partition("=")[0]
        # argparse takes any beginning of a flag that is of one alone.
        for refused, reason in REFUSED_FLAGS.items():
            if name.startswith("--") and len(name) > 2 and refused.startswith(name):
                raise InputError(f"{name}: {reason}")


def require_version() -> None:
    """Check that the server is the one whose schedule the guard follows.

    Raises:
        MachineError: when it is not installed.
        UnsupportedError: when it is another version.
    """
    require_installed(has_image=False)
    found, tested = importlib.metadata.version("mlx-lm"), ".".join(map(str, MLX_LM_VERSION))
    if found != tested:
        raise UnsupportedError(f"mlx-lm {found}: the guard is tested with {tested} only")


def serve(
    path: Path, *, model: str, limit_bytes: int | None, max_waiting: int, flags: Sequence[str]
) -> int:
    """Serve a model from a folder without its code until it is stopped; return 0 or `SAID_WHY`.

    SIGTERM and Ctrl-C let the open requests end; a second one ends them.

    Raises:
        MachineError: when the server ends by itself.
    """
    setup = {"model": model, "limit_bytes": limit_bytes, "max_waiting": max_waiting}
    command = [sys.executable, "-m", "memfit.probes.guarded.child", json.dumps(setup)]
    with subprocess.Popen(
        [*command, "--model", str(path), *flags],
        stdin=subprocess.PIPE,
        env={**os.environ, **CHILD_ENVIRONMENT},
        start_new_session=True,  # Ctrl-C reaches this process, which lets the other finish
    ) as process:
        stops = 0

        def stop(*_: object) -> None:
            nonlocal stops
            stops += 1
            process.send_signal(signal.SIGTERM if stops == 1 else signal.SIGKILL)

        before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = process.wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
    if code not in (0, SAID_WHY) and not stops:
        raise MachineError(f"the server ended by itself: {ending(code)}")
    return SAID_WHY if code == SAID_WHY else 0
