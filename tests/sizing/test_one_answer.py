"""Gate, compare and plan give the figures and the verdict of an estimate for the same question."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import InputError, MemfitError, PolicyError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.compare.axes import parse_axis
from memfit.estimators.compare.compare import ComparedModel, compare
from memfit.estimators.gate.evaluate import run_gate
from memfit.estimators.gate.policy import read_policy
from memfit.estimators.gate.report import TargetReport
from memfit.estimators.machine.device import DEFAULT_REGIME, Device
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.mlx.versions import parse_version
from memfit.estimators.plans.context.plan import ContextQuestion, plan_context
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.results.comparison import Comparison
from memfit.estimators.results.context import ContextPlan
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.runtimes.facets import ProgramContext
from memfit.estimators.runtimes.registry import get_runtime, list_runtimes, with_versions
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.resolved import TargetQuestion
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write
from tests.selection import examples, quick
from tests.sparse import write_adapter

SAMPLES = Path(__file__).parents[2] / "sample_configs"
NAMES = (
    "qwen3-4b-4bit",
    "gemma-2-2b",
    "mistral-nemo-12b",
    "qwen3-30b-a3b-4bit",
    "qwen3-next-80b-a3b-4bit",
    "falcon-h1-7b",
    "gguf",
)
DEVICES = ("m4-pro-24", "m4-max-64", "rtx-4090")
RUNTIMES = tuple(runtime.name for runtime in list_runtimes())


class Question(NamedTuple):
    """One question in the form of a policy; ``workload`` is completed by the runtime's defaults."""

    model: str
    machine: str
    runtime: str | None
    quantize: int | None
    workload: Mapping[str, Any]
    margin_bytes: int
    mlx: str | None = None
    """A version of MLX, where the runtime runs on it."""
    mlx_lm: str | None = None
    """The same of mlx-lm."""
    adapter: Path | None = None

    @property
    def device(self) -> Device:
        if not self.machine.endswith("GB"):
            return find_device(self.machine)
        return memory_device(int(self.machine.removesuffix("GB")) * 2**30)

    @property
    def partial(self) -> WorkloadQuestion:
        return WorkloadQuestion(**self.workload)


questions = st.builds(
    Question,
    st.sampled_from(NAMES),
    st.sampled_from((*DEVICES, "16GB", "32GB", "128GB")),
    st.none() | st.sampled_from(RUNTIMES),
    st.sampled_from((None, None, None, 3, 4, 8)),
    st.fixed_dictionaries(
        {"prompt_tokens": st.integers(1, 20_000)},
        optional={
            "max_tokens": st.integers(0, 300),
            "batch": st.integers(1, 4),
            "prefill_step": st.sampled_from((300, 512, 1024, 4096)),
            "kv_bits": st.sampled_from((4, 8)),
            "kv_group_size": st.sampled_from((32, 64)),
            "quantized_kv_start": st.sampled_from((0, 3000)),
        },
    ),
    st.sampled_from((MARGIN_BYTES, MARGIN_BYTES, 0, 10**9)),
    st.sampled_from((None, None, "0.32.0", "0.29.2")),
    st.sampled_from((None, None, "0.31.0")),
    # Its directory takes the place of this one.
    st.sampled_from((None, None, Path("of-qwen3-4b"))),
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of Qwen3-4B; no other sample has its matrices."""
    return write_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = recorded()["qwen3"]
    return write(tmp_path_factory.mktemp("gguf") / "qwen3.gguf", entry.metadata, entry.tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the policy that each example writes."""
    return tmp_path_factory.mktemp("policy")


def path_of(question: Question, gguf: Path) -> str:
    if Path(question.model).is_absolute():
        return question.model
    return str(gguf if question.model == "gguf" else SAMPLES / f"{question.model}.yaml")


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """The models of all examples, each read once."""
    return Catalog()


def runtime_of(question: Question, path: str) -> Runtime:
    named = question.runtime
    return versioned(question, get_runtime(named) if named else catalog().native_runtime(path))


def versioned(question: Question, runtime: Runtime) -> Runtime:
    """The runtime as of the versions that the one asked for has; a command refuses others."""
    named = get_runtime(question.runtime) if question.runtime else runtime
    mlx = parse_version(question.mlx) if question.mlx and named.mlx_version else None
    mlx_lm = parse_version(question.mlx_lm) if question.mlx_lm and named.mlx_lm_version else None
    return with_versions(runtime, mlx=mlx, mlx_lm=mlx_lm, strict=False)


def sized_for(
    question: Question, path: str, runtime: Runtime | None, *, method: MethodSetting = "auto"
) -> SizedModel:
    return catalog().sized(
        path,
        quantize=converted(question.quantize) if question.quantize else None,
        device=question.device,
        runtime=runtime,
        method=method,
        adapter=question.adapter,
        margin_bytes=question.margin_bytes,
    )


def estimated(question: Question, path: str) -> Estimate:
    sized = sized_for(question, path, runtime_of(question, path))
    # On its machine: vLLM's defaults depend on the memory.
    return estimate(sized, workload_of(question, sized))


def workload_of(question: Question, sized: SizedModel) -> Workload:
    """What a runtime makes of it, as Ollama chooses its own batch."""
    work = question.partial.under(sized.runtime_model.runtime)
    program = sized.runtime_model.facet(ProgramContext)
    chooses = program and question.partial.prefill_step is None
    return program.program_workload(work) if program and chooses else work


def policy_of(question: Question, path: str) -> dict[str, Any]:
    key = "memory" if question.machine.endswith("GB") else "device"
    target: dict[str, Any] = {
        "model": path,
        key: question.machine,
        "workload": dict(question.workload),
        "limits": {"peak": "90%", "context": 1024, "basis": "bound"},
    }
    optional = {"runtime": question.runtime, "quantize": question.quantize}
    runtime = runtime_of(question, path)
    if runtime.mlx_version:
        optional["mlx_version"] = question.mlx
    if runtime.mlx_lm_version:
        optional["mlx_lm_version"] = question.mlx_lm
    optional["adapter"] = str(question.adapter) if question.adapter else None
    target |= {name: value for name, value in optional.items() if value is not None}
    return {"schema": "memfit.policy/1", "targets": {"it": target}}


def gated(question: Question, path: str, folder: Path) -> TargetReport:
    file = folder / "memfit.yaml"
    file.write_text(json.dumps(policy_of(question, path)))
    outcome = run_gate(read_policy(file), None, allow_bounds=False)
    return outcome.report.targets[0]


def compared(question: Question, path: str) -> Comparison:
    # The prompt is an axis, so that the matrix answers the same question once more.
    work: dict[str, Any] = {**question.workload, "prompt_tokens": 1}
    axis = parse_axis(
        f"context={question.workload['prompt_tokens']}",
        find_device=find_device,
        os_regime=DEFAULT_REGIME,
    )
    return compare(
        catalog(),
        [ComparedModel("it", path)],
        TargetQuestion(
            workload=WorkloadQuestion(**work),
            device=question.device,
            quantize=converted(question.quantize) if question.quantize else None,
            margin_bytes=question.margin_bytes,
            adapter=question.adapter,
        ),
        [axis],
        # A version is of a runtime: without one the comparison takes each model's own.
        runtime=(
            runtime_of(question, path)
            if question.runtime or question.mlx or question.mlx_lm
            else None
        ),
    )


def planned(question: Question, path: str) -> ContextPlan:
    runtime = runtime_of(question, path)
    native = versioned(question, catalog().native_runtime(path))
    # No formula has a model that is given by its path here.
    method: MethodSetting = "auto" if Path(question.model).is_absolute() else "formula"
    sized = with_runtime(sized_for(question, path, native, method=method), runtime)
    work = workload_of(question, sized)
    asked = ContextQuestion(contexts=(work.prompt_tokens,), requests=(work.batch,))
    return plan_context(sized, work, asked)


@settings(max_examples=examples(50), deadline=None)
@given(questions)
def test_every_command_gives_the_figures_of_an_estimate(
    gguf: Path, adapter: Path, folder: Path, question: Question
) -> None:
    check_every_command(gguf, adapter, folder, question)


@pytest.mark.parametrize("runtime", quick(RUNTIMES, ("vllm",)))
def test_every_command_gives_the_figures_of_each_runtime(
    gguf: Path, adapter: Path, folder: Path, runtime: str
) -> None:
    work = {"prompt_tokens": 9000, "max_tokens": 128, "batch": 2}
    question = Question("qwen3-30b-a3b-4bit", "128GB", runtime, None, work, MARGIN_BYTES)
    check_every_command(gguf, adapter, folder, question)


def check_every_command(gguf: Path, adapter: Path, folder: Path, question: Question) -> None:
    path = path_of(question, gguf)
    if question.adapter:
        question = question._replace(adapter=adapter)
    try:
        expected = estimated(question, path)
    except UnsupportedError as error:
        check_rejection(question, path, folder, error)
        return
    check_gate(expected, gated(question, path, folder), question)
    check_comparison(expected, compared(question, path))
    check_plan(expected, planned(question, path))


def check_rejection(question: Question, path: str, folder: Path, error: MemfitError) -> None:
    report = gated(question, path, folder)
    assert (report.status, report.message) == ("undecided", str(error))
    comparison = compared(question, path)
    assert comparison.matrix
    for undecided in (comparison.models[0].undecided, comparison.matrix.cells[0].undecided):
        assert undecided
        assert undecided.reason == str(error)
    # With two reasons, a plan may report the other one.
    with pytest.raises(UnsupportedError):
        planned(question, path)


def check_gate(expected: Estimate, report: TargetReport, question: Question) -> None:
    parts, figures, peak = expected.components, report.figures, expected.peak_bytes
    assert figures
    assert report.message is None
    if figures.peak_of:
        # A smaller workload that the same command allows takes more (sizing/search.py).
        assert figures.peak_bytes > peak
        peak = figures.peak_bytes
    else:
        assert figures.workspace_bytes == parts.workspace.bytes
    assert figures.peak_bytes == peak
    assert figures.wired_limit_bytes == peak + MARGIN_BYTES
    assert figures.weights_bytes == parts.weights.loaded_bytes
    # mlx-moe loads more than it keeps.
    if question.runtime != "mlx-moe":
        assert figures.load_peak_bytes == parts.weights.resident_bytes
    assert figures.kv_bytes_per_token == parts.kv.bytes_per_token
    assert figures.kv_bytes == parts.kv.bytes
    assert figures.state_bytes == parts.ssm.bytes
    assert figures.basis == parts.weights.basis
    passed = {check.limit: check.passed for check in report.checks}
    assert passed["peak"] == (peak <= question.device.working_set_bytes * 9 // 10)
    assert passed["context"] == ((figures.context_tokens or 0) >= 1024)
    if question.margin_bytes == MARGIN_BYTES:
        assert figures.context_tokens == expected.recommendation.context_tokens.value


def check_comparison(expected: Estimate, comparison: Comparison) -> None:
    (model,) = comparison.models
    parts, needed = expected.components, expected.peak_bytes + expected.components.margin.bytes
    # Of all models: a runtime that chooses its own batch does so for each.
    step = expected.workload.prefill_step
    assert replace(comparison.workload, prefill_step=step) == expected.workload
    assert (model.verdict, model.exceeded) == (expected.verdict, expected.exceeded)
    assert model.needed_bytes == needed
    own = len(expected.notes)
    assert model.notes[:own] == expected.notes
    # Of the longest context, which a comparison shows without the mark of an estimate.
    assert {note.code for note in model.notes[own:]} <= {"gpu-watchdog", "buffer-count"}
    shown = {figure.name: figure.values[0] for figure in comparison.figures}
    for name, component in {"weights": parts.weights, "kv": parts.kv, "state": parts.ssm}.items():
        value = shown[name]
        assert value
        assert (value.value, value.basis) == (component.bytes, component.basis)
    context = shown["recommended_context"]
    assert (context and context.value) == expected.recommendation.context_tokens.value
    assert comparison.matrix
    (cell,) = comparison.matrix.cells
    assert (cell.verdict, cell.exceeded) == (expected.verdict, expected.exceeded)
    assert (cell.peak_bytes, cell.needed_bytes) == (expected.peak_bytes, needed)


def check_plan(expected: Estimate, plan: ContextPlan) -> None:
    assert plan.verdict == expected.verdict
    assert plan.weights_bytes == expected.components.weights.resident_bytes
    assert plan.longest_context == expected.recommendation.context_tokens.value
    assert plan.fit
    assert plan.fit.required_bytes == expected.peak_bytes + plan.margin_bytes
    if not expected.workload.max_tokens and plan.matrix:
        assert plan.matrix[0].verdict == expected.verdict
        assert plan.matrix[0].needed_bytes == plan.fit.required_bytes


def test_a_prompt_that_no_runtime_accepts_is_rejected_by_every_command(
    gguf: Path, folder: Path
) -> None:
    question = Question("gguf", "128GB", None, None, {"prompt_tokens": 2**30 + 1}, MARGIN_BYTES)
    for answer in (estimated, compared, planned):
        with pytest.raises(InputError, match="must be from 1 to 1073741824"):
            answer(question, str(gguf))
    with pytest.raises(PolicyError, match="must be from 1 to 1073741824"):
        gated(question, str(gguf), folder)


@pytest.mark.parametrize(
    "question",
    [
        Question("qwen3-4b-4bit", "16GB", "zinc", None, {"prompt_tokens": 40_960}, MARGIN_BYTES),
        Question("gguf", "m4-pro-24", None, None, {"prompt_tokens": 8192}, MARGIN_BYTES),
        # 195,313 chunks of llama.cpp's.
        Question("gguf", "128GB", None, None, {"prompt_tokens": 10**8}, MARGIN_BYTES),
        Question(
            "qwen3-30b-a3b-4bit",
            "rtx-4090",
            "agent-memory",
            3,
            {"prompt_tokens": 9000, "batch": 2, "prefill_step": 1024},
            MARGIN_BYTES,
        ),
    ],
    ids=lambda question: question.model,
)
def test_the_command_line_gives_one_answer(
    memfit: Memfit, gguf: Path, folder: Path, question: Question
) -> None:
    path = path_of(question, gguf)
    options = ["--device" if question.machine in DEVICES else "--memory", question.machine]
    optional = {"runtime": question.runtime, "quantize": question.quantize}
    options += [f"--{name}={value}" for name, value in optional.items() if value is not None]
    work = {**question.workload, "context": question.workload["prompt_tokens"]}
    del work["prompt_tokens"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in work.items()]
    alone = memfit("estimate", path, *options, "--json")
    peak, verdict = alone.json["peak_bytes"], alone.json["verdict"]
    context = alone.json["recommendation"]["context_tokens"]["value"]

    (folder / "memfit.yaml").write_text(json.dumps(policy_of(question, path)))
    run = memfit("gate", "--policy", folder / "memfit.yaml", "--format", "json")
    figures = run.json["targets"][0]["figures"]
    assert (figures["peak_bytes"], figures["context_tokens"]) == (peak, context)

    compared = memfit("compare", path, path, *options, "--json").json
    assert [model["verdict"] for model in compared["models"]] == [verdict] * 2
    assert next(f for f in compared["figures"] if f["name"] == "peak")["values"][0]["value"] == peak

    planned = memfit("plan", "context", path, *options, "--json")
    assert (planned.json["verdict"], planned.json["longest_context"]) == (verdict, context)
    assert planned.json["fit"]["required_bytes"] == peak + MARGIN_BYTES
    assert planned.code == alone.code


@pytest.mark.exhaustive
def test_an_adapter_is_in_the_answer_of_every_command(
    memfit: Memfit, adapter: Path, tmp_path: Path
) -> None:
    model, machine = "qwen3-4b-4bit", ("--device", "m4-max-64", "--context", "4k", "--json")
    arguments = (*machine, "--adapter", adapter)
    alone = memfit("estimate", model, *arguments).json["peak_bytes"]
    assert alone > memfit("estimate", model, *machine).json["peak_bytes"]
    figures = memfit("compare", model, model, *arguments).json["figures"]
    (peak,) = [figure for figure in figures if figure["name"] == "peak"]
    assert [value["value"] for value in peak["values"]] == [alone, alone]
    plan = memfit("plan", "context", model, *arguments).json
    assert plan["fit"]["required_bytes"] == alone + MARGIN_BYTES
    fitting = memfit("fits", *arguments).json
    assert [(row["name"], row["peak_bytes"]) for row in fitting["models"]] == [(model, alone)]
    assert len(fitting["of_other_adapters"]) > 50
    offload = ("plan", "offload", model, "--tokens", "4k", "--adapter", adapter, "--json")
    assert memfit(*offload).json["active_bytes"] == alone
    tickets = "tickets: [{name: t, policy: p, weights: estimate, kv: estimate(context=4k)}]"
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        f"schema: memfit.wired-scenario/1\nmodel: {SAMPLES / model}.yaml\nadapter: {adapter}\n"
        f"policies: {{p: {{kind: max}}}}\n{tickets}\n"
    )
    (ticket,) = memfit("plan", "wired", scenario, "--json").json["tickets"]
    assert ticket["size_bytes"] > 36 * 64 * 4 * (9728 + 2560) + 2 * 10**9
