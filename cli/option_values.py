"""Option texts made into the library's values, the same for every command."""

from typing import Any

from memfit.cli.options import parsed
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantization import Quantization, converted
from memfit.estimators.base.units import parse_count, parse_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import OsRegime
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.workload import RUNTIME_DEFAULTS, PartialWorkload

DEFAULT_CONTEXT = 4096


def requested_workload(
    *,
    context: str | None,
    prompt_tokens: str | None,
    max_tokens: str | None,
    batch: int,
    prefill_step: int | None,
    kv_bits: int | None,
    kv_group_size: int | None,
    quantized_kv_start: int | None,
    max_kv_size: int | None,
) -> PartialWorkload:
    """Return the workload; settings that are not given follow the runtime.

    Raises:
        InputError: when a value cannot be read or is out of range, or options exclude each other.
    """
    prompt, generated = _tokens(context, prompt_tokens, max_tokens)
    settings = (prefill_step, kv_bits, kv_group_size, quantized_kv_start)
    named = zip(RUNTIME_DEFAULTS, settings, strict=True)
    given = {name: value for name, value in named if value is not None}
    values: dict[str, Any] = {**given, "kv_bits": kv_bits or None}  # 0: none, under every runtime
    workload = Workload(
        prompt_tokens=prompt,
        max_tokens=generated,
        batch=batch,
        max_kv_size=max_kv_size,
        **values,
    )
    return PartialWorkload(workload, frozenset(given))


def requested_runtime(name: str) -> Runtime:
    """Return the runtime of a name, with the settings it takes from the environment.

    Raises:
        InputError: when there is no such runtime, or it cannot read a variable.
    """
    import os

    from memfit.estimators.runtimes.registry import get_runtime

    return get_runtime(name, os.environ)


def requested_quantization(
    bits: int | None, group_size: int | None, mode: str | None
) -> Quantization | None:
    """Return the conversion of --quantize, None when it was not given.

    Raises:
        InputError: for a format MLX does not have, or a group size or mode without bits.
    """
    if bits is None:
        if group_size is not None or mode is not None:
            raise InputError("--group-size and --quant-mode need --quantize BITS")
        return None
    return converted(bits, group_size, mode or "affine")


def requested_device(
    name: str | None, memory: str | None, working_set: str | None, regime: OsRegime
) -> Device | None:
    """Return the device that an option names, else this machine if it has a GPU.

    Raises:
        InputError: when the machine is unknown, or more than one is named.
    """
    from memfit.estimators.machine.devices import memory_device, working_set_device

    if sum(value is not None for value in (name, memory, working_set)) > 1:
        raise InputError("--device, --memory and --working-set each name a device: give only one")
    memory_bytes = parsed("--memory", parse_size, memory)
    working_set_bytes = parsed("--working-set", parse_size, working_set)
    if memory_bytes is not None:
        return memory_device(memory_bytes, os_regime=regime)
    if working_set_bytes is not None:
        return working_set_device(working_set_bytes)
    if name is not None:
        return named_device(name, regime)
    from memfit.estimators.machine.host import detect_host

    host = detect_host()
    return host if host and host.backend != "cpu" else None


def named_device(name: str, regime: OsRegime) -> Device:
    """Return the device with a name; ``host`` is this machine.

    Raises:
        InputError: when no machine has that name, or this one's memory cannot be read.
    """
    from memfit.estimators.machine.devices import find_device

    if name != "host":
        return find_device(name, os_regime=regime)
    from memfit.estimators.machine.host import detect_host

    host = detect_host()
    if host is None:
        raise InputError(
            "host: this machine's memory could not be read; name a device or a memory size"
        )
    return host


def _tokens(
    context: str | None, prompt_tokens: str | None, max_tokens: str | None
) -> tuple[int, int]:
    """Return the tokens of the prompt and of the generation."""
    whole = parsed("--context", parse_count, context)
    prompt = parsed("--prompt-tokens", parse_count, prompt_tokens)
    generated = parsed("--max-tokens", parse_count, max_tokens)
    if whole is not None and (prompt is not None or generated is not None):
        raise InputError("--context excludes --prompt-tokens and --max-tokens: use those two")
    if whole is None:
        whole = DEFAULT_CONTEXT
    return (whole if prompt is None else prompt), generated or 0
