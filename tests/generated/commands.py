"""Printed commands, given back to memfit as the programs that they call read them."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.plans.server.plan import plan_server
from memfit.estimators.questions.target import RuntimeQuestion
from memfit.estimators.results.advice import Action
from memfit.estimators.results.server import ServerPlan
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.server_bound import ServerBound, need_of
from memfit.estimators.sizing.sized_model import SizedModel, verdict_of, with_runtime
from tests.generated.questions import Models, Question
from tests.printed import Parsers

_OF_LLAMA = (
    *("cache_type_k", "cache_type_v", "gpu_layers", "n_cpu_moe", "batch_size", "kv_unified"),
    *("swa_full", "flash_attn"),
)


@cache
def parsers() -> Parsers:
    return Parsers()


def read_back(workload: Workload, options: dict[str, Any]) -> Workload:
    """Return the workload as a program runs it with the options of its command."""
    bits = options["kv_bits"]
    return replace(
        workload,
        max_tokens=workload.max_tokens or options["max_tokens"],
        prefill_step=options["prefill_step_size"],
        kv_bits=None if bits is None else int(bits),  # mlx-vlm reads a float
        kv_group_size=options["kv_group_size"],
        quantized_kv_start=options["quantized_kv_start"],
    )


def server_settings(options: dict[str, Any]) -> ServerSettings:
    """Return the flags of mlx_lm.server."""
    return ServerSettings(
        prefill_step=options["prefill_step_size"],
        prompt_concurrency=options["prompt_concurrency"],
        decode_concurrency=options["decode_concurrency"],
        prompt_cache_size=options["prompt_cache_size"],
    )


def contradictions(
    models: Models, question: Question, action: Action, *, with_mixes: bool
) -> Iterator[tuple[str, str]]:
    """Yield each program of an action's commands, with what it contradicts or an empty text."""
    sized = models.sized(question, action.settings.get("weight_bits"))
    if "memory_bytes" in action.settings:
        sized = sized.on(memory_device(action.settings["memory_bytes"]))
    for command in action.commands:
        program = command.partition(" ")[0]
        options = parsers().options(command)
        if program.endswith(".convert"):
            bits = action.settings.get("weight_bits", question.bits)
            yield program, "" if options["q_bits"] == bits else f"{options['q_bits']}, not {bits}"
        elif program == "mlx_lm.server":
            for found in _served(sized, question.workload, action, options, with_mixes=with_mixes):
                yield program, found
        elif program == "llama-server":
            yield program, _other(_llama_verdict(sized, question, action, options), action.verdict)
        else:
            yield program, _other(_run_verdict(sized, question, action, options), action.verdict)


def _other(verdict: Verdict, printed: Verdict) -> str:
    return "" if verdict == printed else f"{verdict}, printed as {printed}"


def _prompt(question: Question, action: Action) -> int:
    longer = action.context_tokens if action.goal == "longer_prompt" else None
    return longer or question.workload.prompt_tokens


def _served(
    sized: SizedModel,
    workload: Workload,
    action: Action,
    options: dict[str, Any],
    *,
    with_mixes: bool,
) -> Iterator[str]:
    settings, served = server_settings(options), read_back(workload, options)
    assert action.server
    if settings != action.server.settings:
        yield f"{settings} is printed, {action.server.settings} in the result"
    limit = sized.model.max_context
    for tokens in {workload.prompt_tokens, action.server.context_tokens or 1}:
        if limit and tokens + served.max_tokens > limit:
            continue  # plan server refuses what the model's positions do not reach
        request = replace(served, prompt_tokens=tokens, batch=1)
        verdict = (
            plan_server(sized, request, settings, clients=workload.batch).verdict
            if with_mixes
            else server_verdict(sized, request, settings, workload.batch)
        )
        expected = tightened("fits", run_limits(sized, request, serving=True))
        yield _other(verdict, expected) and f"{tokens} tokens: {_other(verdict, expected)}"


def server_verdict(
    sized: SizedModel, request: Workload, settings: ServerSettings, clients: int
) -> Verdict:
    """Return the verdict of `memfit plan server` where its bound decides, without its mixes."""
    need = need_of(ServerBound(sized, request, clients).moment(settings))
    limits = run_limits(sized, request, serving=True)
    return tightened(judge(need, sized.device)[0], limits)


def of_plan(sized: SizedModel, question: Question, plan: ServerPlan) -> Iterator[tuple[str, str]]:
    """Yield the programs of a server's plan, and what contradicts its printed flags."""
    for command in plan.commands:
        program = command.partition(" ")[0]
        if program != "mlx_lm.server":
            continue
        options = parsers().options(command)
        request = replace(read_back(question.workload, options), batch=1)
        request = replace(request, max_tokens=plan.longest_generation_tokens)
        settings = server_settings(options)
        verdict = server_verdict(sized, request, settings, question.clients)
        expected = tightened("fits", run_limits(sized, request, serving=True))
        yield program, _other(verdict, expected)


def _run_verdict(
    sized: SizedModel, question: Question, action: Action, options: dict[str, Any]
) -> Verdict:
    """Return the verdict on one run of mlx_lm.generate or mlx_vlm.generate."""
    prompt = _prompt(question, action)
    printed = replace(read_back(question.workload, options), prompt_tokens=prompt)
    limits = run_limits(sized, printed)
    return tightened(verdict_of(sized, printed)[0], limits)


def _llama_verdict(
    sized: SizedModel, question: Question, action: Action, options: dict[str, Any]
) -> Verdict:
    """Return the verdict on llama-server with the flags of its command."""
    own = {name: options[name] for name in _OF_LLAMA if name in options}
    runtime = RuntimeQuestion.read(own).with_settings(sized.runtime_model.runtime)
    prompt, sequences = _prompt(question, action), options["batch"]
    run = Workload(
        prompt_tokens=prompt,
        max_tokens=int(options["ctx_size"]) // sequences - prompt,
        batch=sequences,
        prefill_step=options["prefill_step"],
    )
    sized = with_runtime(sized, runtime)
    return tightened(verdict_of(sized, run)[0], run_limits(sized, run))
