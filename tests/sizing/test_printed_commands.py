"""Every printed command, given back to memfit as its program reads it, has its verdict.

Questions are drawn from all samples, machines and settings. A command is read by the argument
parser of the program that it calls, so that defaults which memfit does not print count too.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import converted
from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.machine.working_set import GIB
from memfit.estimators.plans.server.plan import plan_server
from memfit.estimators.results.advice import Action
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.run_limits import run_limits, tightened
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.sized_model import SizedModel
from tests.printed import Parsers

SAMPLES = sorted((Path(__file__).parents[2] / "sample_configs").glob("*.yaml"))
DEVICES = ("m1-8", "m2-max-64", "m3-ultra-96", "m4-pro-24", "m5-max-64", "rtx-4090", "h100-80")
MACS = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 512)
SEED = 35


@cache
def catalog() -> Catalog:
    return Catalog()


@cache
def parsers() -> Parsers:
    return Parsers()


@cache
def sized(sample: Path, bits: int | None) -> SizedModel:
    quantize = converted(bits) if bits else None
    return catalog().sized(str(sample), quantize=quantize)


def drawn(count: int) -> Iterator[tuple[Path, int | None, Device, Workload]]:
    """Yield questions, the same ones each time."""
    draw = random.Random(SEED)
    for _ in range(count):
        machine = draw.choice((*MACS, *DEVICES))
        device = memory_device(machine * GIB) if isinstance(machine, int) else find_device(machine)
        kv_bits = draw.choice((None, None, None, 8, 4))
        workload = Workload(
            prompt_tokens=draw.choice((100, 1000, 4096, 5000, 8192, 16_384, 32_768, 65_536)),
            max_tokens=draw.choice((0, 0, 0, 1, 500, 2000)),
            batch=1 if kv_bits else draw.choice((1, 1, 1, 1, 2, 4, 16)),
            prefill_step=draw.choice((2048, 2048, 2048, 512, 4096, 300)),
            kv_bits=kv_bits,
            quantized_kv_start=0 if kv_bits else 5000,
        )
        yield draw.choice(SAMPLES), draw.choice((None, None, 4, 8)), device, workload


def asked(sample: Path, bits: int | None, device: Device, workload: Workload) -> Estimate | None:
    """Return the answer, None where the model is not converted to these bits or not run so."""
    try:
        return estimate(sized(sample, bits).on(device), workload)
    except UnsupportedError:
        return None


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 50),
        *(pytest.param(first, 125, marks=pytest.mark.exhaustive) for first in (50, 175)),
    ],
)
def test_a_printed_command_has_the_verdict_it_was_printed_under(first: int, count: int) -> None:
    checked = {"mlx_lm.server": 0, "mlx_lm.generate": 0, "mlx_lm.convert": 0}
    for sample, bits, device, workload in islice(drawn(first + count), first, None):
        answer = asked(sample, bits, device, workload)
        for action in answer.actions if answer else ():
            for program in check(sample, bits, device, workload, action):
                checked[program] += 1
    assert all(times >= count // 20 for times in checked.values()), checked


def check(
    sample: Path, bits: int | None, device: Device, workload: Workload, action: Action
) -> Iterator[str]:
    """Check the commands of an action, and yield the programs they call."""
    if "memory_bytes" in action.settings:
        device = memory_device(action.settings["memory_bytes"])
    now = action.settings.get("weight_bits", bits)
    for command in action.commands:
        program = command.partition(" ")[0]
        options = parsers().options(command)
        if program == "mlx_lm.convert":
            assert options["q_bits"] == now
        elif program == "mlx_lm.server":
            check_server(sized(sample, now).on(device), workload, action, options)
        else:
            check_run(sized(sample, now).on(device), workload, action, options)
        yield program


def read_back(workload: Workload, options: dict[str, Any]) -> Workload:
    """The workload as a program runs it with the options of its command."""
    return replace(
        workload,
        max_tokens=workload.max_tokens or options["max_tokens"],
        prefill_step=options["prefill_step_size"],
        kv_bits=options["kv_bits"],
        kv_group_size=options["kv_group_size"],
        quantized_kv_start=options["quantized_kv_start"],
    )


def check_server(
    model: SizedModel, workload: Workload, action: Action, options: dict[str, Any]
) -> None:
    settings = ServerSettings(
        prefill_step=options["prefill_step_size"],
        prompt_concurrency=options["prompt_concurrency"],
        decode_concurrency=options["decode_concurrency"],
        prompt_cache_size=options["prompt_cache_size"],
    )
    assert action.server
    assert settings == action.server.settings
    served = read_back(workload, options)
    limit = model.model.max_context
    for tokens in {workload.prompt_tokens, action.server.context_tokens or 1}:
        if limit and tokens + served.max_tokens > limit:
            continue  # plan server refuses what the model's positions do not reach
        request = replace(served, prompt_tokens=tokens, batch=1)
        plan = plan_server(model, request, settings, clients=workload.batch)
        limits = run_limits(model.runtime_model, request, serving=True)
        assert plan.verdict == tightened("fits", limits), (model.checkpoint.id, request, settings)


def check_run(
    model: SizedModel, workload: Workload, action: Action, options: dict[str, Any]
) -> None:
    tokens = action.context_tokens if action.goal == "longer_prompt" else workload.prompt_tokens
    assert tokens
    printed = replace(read_back(workload, options), prompt_tokens=tokens)
    limits = run_limits(model.runtime_model, printed)
    verdict = tightened(judge(model.requirement(printed), model.device)[0], limits)
    assert verdict == action.verdict, (model.checkpoint.id, printed)
