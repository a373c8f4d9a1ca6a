"""What a process on MLX holds beside its peak: freed buffers, kept for their next use."""

import pytest
from msgspec import UNSET

from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import ANY_CPU, with_reserve
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.plans.server.plan import plan_server
from memfit.estimators.runtimes.held import most_held_bytes
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from tests.models import SAMPLES
from tests.selection import quick

CATALOG = Catalog()
M4_MAX = find_device("m4-max-64")
LLAMA = "llama-3.1-8b"
# Llama 3.1 8B: 32 layers, keys and values of 8 heads of 128 in 2 bytes.
TOKEN = 131_072


def test_a_chunk_holds_the_caches_that_it_replaces() -> None:
    sized = CATALOG.sized(LLAMA, device=M4_MAX)
    moment = sized.figures_for(Workload(prompt_tokens=32_768)).moment
    assert moment.held_bytes is not None
    # The chunk that grows them last finds 30,720 tokens in them.
    assert moment.held_bytes - moment.nbytes == 30_720 * TOKEN


def test_decode_holds_the_caches_before_they_last_grew() -> None:
    """mlx-examples 1081: 4.034 GiB kept after 33,024 tokens of Llama 3.1 8B in 4 bits."""
    sized = CATALOG.sized(LLAMA, device=find_device("m2-ultra-192"))
    moment = sized.figures_for(Workload(prompt_tokens=32_188, max_tokens=1000)).moment
    assert moment.held_bytes is not None
    assert moment.decode_bytes is not None
    kept = moment.held_bytes - moment.decode_bytes
    assert abs(kept / 2**30 - 4.034) < 0.005 * 4.034


@pytest.mark.parametrize(
    "name", quick((LLAMA, "qwen3-8b-4bit", "gpt-oss-20b", "falcon-h1-7b"), ("gpt-oss-20b",))
)
def test_what_is_held_by_formula_is_near_the_trace(name: str) -> None:
    pytest.importorskip("mlx_lm", reason="the class that is traced is mlx-lm's")
    checkpoint = open_checkpoint(str(SAMPLES / f"{name}.yaml"))
    workload = Workload(prompt_tokens=4096, max_tokens=300)
    derived, traced = (
        size(checkpoint, device=M4_MAX, method=method).figures_for(workload).moment.held_bytes
        for method in ("formula", "trace")
    )
    assert derived is not None
    assert traced is not None
    assert abs(derived - traced) * 1000 <= 25 * traced


def test_mlx_gives_kept_buffers_back_near_the_working_set() -> None:
    sized = CATALOG.sized(LLAMA, device=M4_MAX)
    peak = sized.figures_for(Workload(prompt_tokens=4096)).moment.nbytes
    assert most_held_bytes(peak, 10**12, M4_MAX) == M4_MAX.working_set_bytes * 95 // 100
    small = memory_device(16 * 2**30)
    # What is in use cannot be given back.
    assert most_held_bytes(peak, 10**12, small) == peak
    assert most_held_bytes(peak, 10**12, None) == 10**12


def test_the_cpu_keeps_32_mebibytes_at_most() -> None:
    moment = CATALOG.sized(LLAMA, device=ANY_CPU).figures_for(Workload(prompt_tokens=8192)).moment
    assert moment.held_bytes == moment.nbytes + 32 * 2**20


def test_a_shared_machine_is_judged_by_what_the_process_holds() -> None:
    workload = Workload(prompt_tokens=16_384)
    alone = memory_device(16 * 2**30)
    shared = with_reserve(alone, 8 * 10**9)
    found = estimate(CATALOG.sized("qwen3-8b-4bit", device=shared), workload)
    row = next(limit for limit in found.limits if limit.name == "held_memory")
    assert found.needed_bytes < row.limit * 9 // 10
    assert (found.verdict, row.verdict) == ("tight", "tight")
    assert found.held_bytes == row.figure > row.limit
    assert found.held_phase == "prefill"
    whole = estimate(CATALOG.sized("qwen3-8b-4bit", device=alone), workload)
    assert (whole.verdict, whole.held_bytes) == ("fits", row.figure)
    assert "held_memory" not in {limit.name for limit in whole.limits}


def test_where_held_bytes_are_unknown_the_verdict_says_so() -> None:
    """The peak takes their place in the figure, never in silence."""
    shared = with_reserve(memory_device(16 * 2**30), 8 * 10**9)
    swift = get_runtime("mlx-swift-lm")
    found = estimate(
        CATALOG.sized("qwen3-8b-4bit", device=shared, runtime=swift), Workload(prompt_tokens=4096)
    )
    row = next(limit for limit in found.limits if limit.name == "held_memory")
    assert (row.verdict, row.figure) == ("unknown", found.peak_bytes)
    assert found.held_bytes is UNSET
    assert [note.level for note in found.notes if note.code == "held-memory"] == ["warning"]


def test_a_row_of_the_grid_is_judged_by_what_its_own_settings_hold() -> None:
    """16 bits hold more than the machine has, 4 bits do not."""
    shared = with_reserve(M4_MAX, 43 * 10**9)
    found = estimate(CATALOG.sized("qwen3-8b", device=shared), Workload(prompt_tokens=32_768))
    column = found.grid.columns.index(32_768)
    verdicts = {
        row.settings.get("weight_bits"): row.cells[column].verdict
        for row in found.grid.rows
        if row.program == "run" and "kv_bits" not in row.settings
    }
    assert found.verdict == verdicts[None] == "tight"
    assert verdicts[4] == "fits"


def test_a_server_on_a_shared_machine_is_judged_by_its_life() -> None:
    """One client: caches of its replies are kept, those that grew, and those of prompts."""
    flags = ServerSettings(
        prefill_step=2048, prompt_concurrency=1, decode_concurrency=1, prompt_cache_size=1
    )
    workload = Workload(prompt_tokens=16_384, max_tokens=512)
    shared, alone = (
        plan_server(CATALOG.sized("qwen3-8b-4bit", device=each), workload, flags, clients=1)
        for each in (with_reserve(M4_MAX, 50 * 10**9), M4_MAX)
    )
    assert shared.held_bytes == alone.held_bytes
    assert isinstance(alone.held_bytes, int)
    row = next(limit for limit in shared.limits if limit.name == "held_memory")
    assert row.figure == alone.held_bytes > alone.bound.needed_bytes
    assert (shared.verdict, row.verdict) == ("tight", "tight")
    assert "held_memory" not in {limit.name for limit in alone.limits}


def test_what_decoding_holds_on_cuda_is_not_a_figure() -> None:
    """Whether caches are copied depends on when a thread of the CPU runs: measured up to twice."""
    rtx = find_device("rtx-4090")
    sized = CATALOG.sized("qwen3-8b-4bit", device=rtx)
    prompt, reply = (
        estimate(sized, Workload(prompt_tokens=4096, max_tokens=n), advises=False) for n in (0, 300)
    )
    assert isinstance(prompt.held_bytes, int)
    assert reply.held_bytes is UNSET
    assert "held" not in {note.code for note in reply.notes}
