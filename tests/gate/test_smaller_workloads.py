"""A limit on the peak holds for all that a command allows: fewer sequences, shorter prompts."""

from random import Random

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.gate.figures import SmallerRun, figures_of
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.search import largest_workload
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.workspace.peak import ERROR_PERCENT

# docs/accuracy.md, "Not checked": two sequences take more than three, and a prompt whose last chunk
# has 1,792 tokens more than either.
QUANTISED = Workload(prompt_tokens=23518, kv_bits=4)
# Dense, mixtures, windows, latent attention, recurrent and convolution layers.
MODELS = (
    *("qwen3-vl-4b", "llama-3.1-8b", "gemma-3-4b", "deepseek-v2-lite", "qwen3-30b-a3b-4bit"),
    *("gpt-oss-20b", "lfm2-1.2b", "phi-4-mini", "qwen3.5-35b-a3b", "falcon-h1-7b"),
)
DEVICES = ("m4-pro-24", "m1-max-64", "m3-ultra-512", "m5-32")


def sized_on(name: str, device: str) -> SizedModel:
    return size(open_sample(name), device=find_device(device))


def random_workload(random: Random, sized: SizedModel) -> Workload:
    takes_kv_bits = sized.model.model_type not in ("gemma3", "gpt_oss")  # mlx-lm rotates theirs
    return Workload(
        prompt_tokens=int(2 ** random.uniform(7, 15)),
        max_tokens=random.choice((0, 0, 100, 1000)),
        batch=random.choice((1, 2, 3, 5, 8)),
        prefill_step=random.choice((256, 512, 2048, 2048, 4096)),
        kv_bits=random.choice((None, None, 4, 8)) if takes_kv_bits else None,
        quantized_kv_start=random.choice((0, 5000)),
    )


def smaller(workload: Workload, random: Random, count: int) -> list[Workload]:
    """Return any smaller workloads, of which half are as near as two chunks."""
    near = max(1, workload.prompt_tokens - 2 * workload.prefill_step)
    return [
        replace(
            workload,
            batch=random.randint(1, workload.batch),
            prompt_tokens=random.randint(near if number % 2 else 1, workload.prompt_tokens),
        )
        for number in range(count)
    ]


def lost_percent(sized: SizedModel, workload: Workload, others: list[Workload]) -> int:
    """Return how much more one of others takes than the largest found, of its workspace."""
    found = sized.figures_for(largest_workload(sized, workload)).moment.nbytes
    most = max((sized.figures_for(each).moment for each in others), key=lambda each: each.nbytes)
    return 100 * max(0, most.nbytes - found) // max(1, most.workspace_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_no_smaller_workload_takes_more_within_the_stated_error(name: str) -> None:
    random = Random(name)
    sized = sized_on(name, random.choice(DEVICES))
    for _ in range(2):
        workload = random_workload(random, sized)
        lost = lost_percent(sized, workload, smaller(workload, random, 40))
        assert lost <= ERROR_PERCENT // 2, workload


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_dense_scan_finds_none_that_takes_more(name: str, device: str) -> None:
    random = Random(f"{name} {device}")
    sized = sized_on(name, device)
    for _ in range(6):
        workload = random_workload(random, sized)
        lost = lost_percent(sized, workload, smaller(workload, random, 600))
        assert lost <= ERROR_PERCENT // 2, workload


def test_the_peak_is_the_largest_of_the_smaller_batches_and_prompts() -> None:
    sized = sized_on("qwen3-vl-4b", "m4-pro-24")
    workload = replace(QUANTISED, batch=3)
    figures = figures_of(sized, workload, with_context=False)
    run = figures.peak_of
    assert isinstance(run, SmallerRun)
    taken = replace(workload, batch=run.batch, prompt_tokens=run.prompt_tokens)
    assert figures.peak_bytes == sized.figures_for(taken).moment.nbytes
    for other in (
        workload,
        replace(workload, batch=2),
        replace(workload, prompt_tokens=22273),
        replace(workload, prompt_tokens=18433, batch=1),
    ):
        assert sized.figures_for(other).moment.nbytes <= figures.peak_bytes, other
    # What is of the command, not of its largest moment, is of the workload itself.
    assert figures.kv_bytes == sized.figures_for(workload).kv.nbytes


@pytest.mark.parametrize("name", MODELS)
def test_where_no_smaller_workload_takes_more_the_figures_are_of_the_workload(name: str) -> None:
    sized = sized_on(name, "m3-ultra-512")
    workload = Workload(prompt_tokens=4097, max_tokens=64)
    figures = figures_of(sized, workload, with_context=False)
    own = figures_of(sized, workload, with_context=False, with_smaller=False)
    assert (figures == own) is (figures.peak_of is UNSET)
    assert figures.peak_of is UNSET or figures.peak_bytes > own.peak_bytes
