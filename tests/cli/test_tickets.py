"""`--tickets`: reservation and request of one run, as a scenario, as Python and as Swift."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import memfit as library
from memfit.probes.wired import WiredMemoryManager
from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit

pytestmark = pytest.mark.usefixtures("home")
TARGET = ("estimate", "qwen3-4b-4bit", "--device", "m4-max-64", "--context", "8k")
# mlx-swift-lm Libraries/MLXLMCommon/WiredMemoryPolicies.swift and mlx-swift Source/MLX/
# WiredMemory.swift at 14414441 and 09051ed: public initialisers and kinds of tickets.
SWIFT = (
    "MLXLMCommon.WiredSumPolicy()",
    "MLXLMCommon.WiredBudgetPolicy(baseBytes: weightBytes + prefillBytes)",
    "policy.ticket(size: weightBytes, kind: .reservation)",
    "kind: .active)",
)


def parts_of(memfit: Memfit) -> tuple[int, int, int]:
    """The bytes of weights, caches and the rest of the peak."""
    answer = memfit(*TARGET, "--json").json
    weights = answer["components"]["weights"]["resident_bytes"]
    caches = answer["components"]["kv"]["bytes"]
    return weights, caches, answer["peak_bytes"] - weights - caches


def test_tickets_as_yaml_are_a_scenario_whose_demand_is_the_peak(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = tmp_path / "tickets.yaml"
    assert memfit(*TARGET, "--tickets", "yaml", "-o", path).code == 0
    plan = memfit("plan", "wired", path, "--json").json
    assert tuple(each["size_bytes"] for each in plan["tickets"]) == parts_of(memfit)
    assert plan["largest_demand_bytes"] == sum(parts_of(memfit))
    assert plan["device"]["name"] == "m4-max-64"


def test_tickets_as_python_run_in_a_server(memfit: Memfit) -> None:
    run = memfit(*TARGET, "--tickets", "python")
    names: dict[str, Any] = {}
    exec(run.out, names)
    weights, caches, prefill = parts_of(memfit)

    async def serve() -> int:
        names["manager"] = WiredMemoryManager()
        await names["load"]()

        async def generate() -> int:
            return sum(ticket.size for ticket in names["manager"].held)

        held: int = await names["answer"](generate)
        return held

    assert asyncio.run(serve()) == weights + caches + prefill


def test_tickets_as_swift_use_the_policies_of_mlx_swift_lm(memfit: Memfit) -> None:
    run = memfit(*TARGET, "--tickets", "swift")
    figures = re.findall(r"^let (weight|cache|prefill)Bytes = (\d+)$", run.out, re.MULTILINE)
    assert tuple(int(nbytes) for _, nbytes in figures) == parts_of(memfit)
    for call in SWIFT:
        assert call in run.out


@pytest.mark.parametrize("form", ["yaml", "python", "swift"])
def test_tickets_for_cuda_say_that_they_set_no_limit(memfit: Memfit, form: str) -> None:
    run = memfit(*TARGET[:2], "--device", "rtx-4090", "--context", "8k", "--tickets", form)
    assert " CUDA has no wired limit: the tickets admit, and set nothing\n" in run.out
    assert "no wired limit" not in memfit(*TARGET, "--tickets", form).out


@pytest.mark.parametrize(
    "command", [TARGET, ("tune", "nowhere", "--prompt-tokens", "8")], ids=["estimate", "tune"]
)
@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--json",), "leave out --json"),
        (("--format", "html"), "leave out --format"),
        (("--plot",), "leave out --plot"),
        (("-o", "x.json"), "x.json: --tickets python writes no such file"),
        (("-o", "x.yaml"), "give -o a name that ends in .py"),
    ],
)
def test_what_tickets_cannot_be_written_with_is_refused(
    memfit: Memfit, command: tuple[str, ...], more: tuple[str, ...], named: str
) -> None:
    run = memfit(*command, "--tickets", "python", *more)
    assert run.code == 2
    assert named in run.err
    assert not Path("x.json").exists()


def test_tickets_are_written_to_a_file_of_their_language(memfit: Memfit, tmp_path: Path) -> None:
    for form, suffix in (("python", ".py"), ("swift", ".swift"), ("yaml", ".yml"), ("yaml", "")):
        path = tmp_path / f"tickets{suffix}"
        assert memfit(*TARGET, "--tickets", form, "-o", path).code == 0
        assert "Qwen3-4B-4bit" in path.read_text()
    assert memfit(*TARGET, "--tickets", "yaml", "--explain").code == 2
    assert memfit(*TARGET, "--tickets", "yaml", "--breakdown").code == 2


def test_a_runtime_without_a_wired_limit_has_no_tickets(memfit: Memfit) -> None:
    run = memfit(*TARGET, "--runtime", "llama.cpp", "--tickets", "yaml")
    assert run.code == 3
    assert "MLX's wired limit" in run.err


def test_the_library_measures_the_figures_of_the_swift_measurement(
    checkpoints: Checkpoints,
) -> None:
    pytest.importorskip("mlx_lm", reason="the model that runs is mlx-lm's")
    result = library.tune(checkpoints("dense"), prompt_tokens=40, max_tokens=2, prefill_step=16)
    wired = result.wired
    assert wired is not None
    assert wired.weight_bytes == result.loaded.weights_bytes  # type: ignore[union-attr]
    assert (wired.token_count, wired.prefill_step_size) == (40, 16)
    # 3 layers, keys and values, 2 heads of 64, 2 bytes
    assert wired.kv_bytes == 40 * 3 * 2 * 2 * 64 * 2
    assert wired.workspace_bytes > 0
    assert wired.total_bytes == wired.weight_bytes + wired.kv_bytes + wired.workspace_bytes
    assert wired.peak_active_bytes == wired.total_bytes
    tickets = result.tickets()
    total = tickets.weights_bytes + tickets.cache_bytes + tickets.prefill_bytes
    assert total == result.points[0].peak_bytes
    assert f"{tickets.weights_bytes}B" in tickets.text("yaml")
