"""What ends a run though its bytes fit is said wherever a verdict is."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chips
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.mlx.data.run_limits import BUFFER_COUNT
from memfit.estimators.results.estimate import Estimate, Limit
from memfit.estimators.runtimes.mlx_lm import MLX_LM
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.run_limits import run_limits
from memfit.estimators.sizing.sized_model import SizedModel

CASES = Path(__file__).parents[1] / "arch" / "cases"
CATALOG = Catalog()


def sized(model: str, device: str) -> SizedModel:
    machine = memory_device(int(device) * 2**30) if device.isdecimal() else find_device(device)
    return CATALOG.sized(model, device=machine, runtime=MLX_LM)


def limits(model: str, device: str, **workload: Any) -> dict[str, Limit]:
    found = run_limits(sized(model, device), Workload(**workload))
    return {limit.name: limit for limit in found}


@pytest.mark.parametrize("device", ["m1-max-64", "m2-max-64", "m2-ultra-192"])
def test_long_prompts_are_tight_on_the_gpus_that_macos_interrupts(device: str) -> None:
    passing = limits("qwen3-8b-4bit", device, prompt_tokens=65536)["gpu_watchdog"]
    beyond = limits("qwen3-8b-4bit", device, prompt_tokens=65537)["gpu_watchdog"]
    assert (passing.verdict, beyond.verdict) == ("fits", "tight")
    assert beyond.figure > beyond.limit == 65536
    assert all(source.startswith("https://github.com/") for source in beyond.source)


@pytest.mark.parametrize("device", ["m3-ultra-96", "m4-max-64"])
def test_longer_prompts_are_open_on_gpus_that_nobody_saw_interrupted(device: str) -> None:
    passing = limits("qwen3-8b-4bit", device, prompt_tokens=131072)["gpu_watchdog"]
    beyond = limits("qwen3-8b-4bit", device, prompt_tokens=131073)["gpu_watchdog"]
    assert (passing.verdict, beyond.verdict, beyond.beyond) == ("fits", "unknown", "unknown")
    assert answer("qwen3-8b-4bit", device, prompt_tokens=131073).verdict == "fits"


def test_the_newest_gpus_have_no_watchdog_row_and_unknown_chips_an_open_one() -> None:
    assert "gpu_watchdog" not in limits("qwen3-8b-4bit", "m5-max-128", prompt_tokens=10**6)
    found = limits("qwen3-8b-4bit", "64", prompt_tokens=65537)["gpu_watchdog"]
    assert (found.verdict, found.beyond, found.limit) == ("unknown", "unknown", 65536)
    # No M1 or M2 was sold with so much memory, an M3 Ultra was.
    found = limits("qwen3-8b-4bit", "256", prompt_tokens=131073)["gpu_watchdog"]
    assert (found.verdict, found.limit) == ("unknown", 131072)


@pytest.mark.parametrize("device", [chip.id for chip in chips().values()])
def test_every_chip_has_the_row_of_its_generation(device: str) -> None:
    """The second word of a name is its generation; Apple's architectures are 12 more."""
    name = f"{device}-{max(chips()[device].memory_gib)}"
    found = limits("qwen3-0.6b", name, prompt_tokens=10**6).get("gpu_watchdog")
    expected = {"m1": 65536, "m2": 65536, "m3": 131072, "m4": 131072, "m5": None}
    assert (found and found.limit) == expected[device[:2]]


def test_the_watchdog_counts_the_keys_that_a_cache_keeps() -> None:
    """A rotating cache never has more keys than its size."""
    found = limits("qwen3-8b-4bit", "m2-max-64", prompt_tokens=131072, max_kv_size=4096)
    assert (found["gpu_watchdog"].figure, found["gpu_watchdog"].verdict) == (4096, "fits")
    assert not limits("mamba-2.8b", "m2-max-64", prompt_tokens=131072)


@pytest.mark.parametrize(
    ("model", "most"), [("qwen3.6-27b", 10617), ("qwen3.6-35b-a3b", 17207), ("qwen3-8b-4bit", None)]
)
def test_leaked_buffers_end_the_server_after_so_many_tokens(model: str, most: int | None) -> None:
    found = limits(model, "m4-max-64", prompt_tokens=64, max_tokens=10618).get("buffer_count")
    assert (found and found.limit) == most
    if found:
        # One run is not in a batch: mlx_lm.generate leaks none.
        assert found.verdict == ("unknown" if found.limit < 10618 else "fits")
        workload = Workload(prompt_tokens=64, max_tokens=10618)
        served = run_limits(sized(model, "m4-max-64"), workload, serving=True)
        assert [limit.verdict for limit in served if limit.name == "buffer_count"] == [
            "tight" if found.limit < 10618 else "fits"
        ]


def test_no_buffers_leak_where_the_server_does_not_batch() -> None:
    """KV bits switch batching off, and it rotates no cache."""
    model = "qwen3.6-27b"
    for setting in ({"kv_bits": 8}, {"max_kv_size": 4096}):
        assert "buffer_count" not in limits(
            model, "m4-max-64", prompt_tokens=64, max_tokens=10**5, **setting
        )


def answer(model: str, device: str, **workload: Any) -> Estimate:
    return estimate(sized(model, device), Workload(**workload))


def test_verdict_action_grid_and_reasons_agree_on_a_long_prompt() -> None:
    result = answer("qwen3-next-80b-a3b-4bit", "m2-ultra-192", prompt_tokens=131072)
    assert result.verdict == result.actions[0].verdict == "tight"
    for row in result.grid.rows:
        cells = dict(zip(result.grid.columns, row.cells, strict=True))
        assert cells[131072].verdict in ("tight", "exceeds")
        assert cells[65536].verdict == "fits"
    assert "tightly" in result.recommendation.prefill_step.reason
    assert "65536" in result.recommendation.context_tokens.reason
    assert [note.level for note in result.notes if note.code == "gpu-watchdog"] == ["warning"]


def test_the_longest_prompt_keeps_the_answer_of_its_bytes_and_a_mark() -> None:
    """Also where the request itself is short: every length beyond the limit is marked."""
    marked = answer("qwen3-next-80b-a3b-4bit", "m2-ultra-192", prompt_tokens=4096)
    free = answer("qwen3-next-80b-a3b-4bit", "m5-max-128", prompt_tokens=4096)
    for row in marked.grid.rows:
        assert (row.context_tokens > 261000, row.context_verdict) == (True, "tight")
    assert marked.recommended.context_verdict == "tight"
    assert (marked.verdict, marked.limits[1].verdict, marked.limits[1].beyond) == (
        *("fits", "fits", "tight"),
    )
    assert {row.context_verdict for row in free.grid.rows} == {"fits"}
    assert free.recommended.context_verdict == "fits"


def test_what_the_server_cannot_generate_is_printed_for_generate() -> None:
    short = answer("qwen3.6-27b", "m4-max-128", prompt_tokens=64, max_tokens=10617)
    long = answer("qwen3.6-27b", "m4-max-128", prompt_tokens=64, max_tokens=10618)
    assert (short.verdict, long.verdict) == ("fits", "fits")
    assert short.actions[0].commands[-1].startswith("mlx_lm.server ")
    assert long.actions[0].commands[-1].startswith("mlx_lm.generate ")
    assert "--max-tokens 10618" in long.actions[0].commands[-1]


def test_the_rows_name_the_classes_that_advance_a_recurrent_cache() -> None:
    models = pytest.importorskip("mlx_lm.models")
    found = {
        path.stem
        for path in Path(models.__path__[0]).glob("*.py")
        if ".advance(" in path.read_text(encoding="utf-8")
    }
    # Its class is that of qwen3_5.
    assert BUFFER_COUNT["recurrent"] == found | {"qwen3_5_moe"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        *("falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "mamba2", "nemotron_h"),
        *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7"),
    ],
)
def test_the_rows_have_the_buffers_that_the_batch_generator_leaks(name: str) -> None:
    """Each is a scalar of 4 bytes; no cache grows between the two readings."""
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    generate = pytest.importorskip("mlx_lm.generate")
    config = json.loads((CASES / f"{name}.json").read_text(encoding="utf-8"))
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.eval(model.parameters())

    def leaked() -> int:
        generator = generate.BatchGenerator(model, max_tokens=900)
        generator.insert([[1, 2, 3, 4, 5]])
        held: list[int] = []
        for step in range(391):
            generator.next()
            if step in (270, 390):
                gc.collect()
                mx.synchronize()
                held.append(mx.get_active_memory())
        return round((held[1] - held[0]) / 4 / 120)

    found = CATALOG.sized(str(CASES / f"{name}.json"), device=find_device("m4-max-64"))
    row = run_limits(found, Workload(prompt_tokens=5))
    most = next((limit.limit for limit in row if limit.name == "buffer_count"), None)
    expected = round(BUFFER_COUNT["buffers"] / most) if most else 0
    # What other tests of the process leave can end up between two readings, now and then.
    assert expected in (leaked() for _ in range(3))
