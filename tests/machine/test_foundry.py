"""Foundry's METALLIC_* variables: the documented table of its environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.foundry import FOUNDRY, Foundry
from memfit.estimators.runtimes.growth import align_capacity
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime

MAC = Device("a Mac", "metal", 32 * 2**30, 24 * 2**30, None, "flag")


def _sized(runtime: Runtime, device: Device | None) -> SizedModel:
    return with_runtime(size(open_sample("llama-3.2-3b"), device=device), runtime)


def test_unset_variables_give_the_documented_defaults() -> None:
    found = FOUNDRY.configured({"PATH": "/bin"})
    assert found == FOUNDRY == get_runtime("foundry")
    assert (found.prefill_step, found.decode_batch, found.shared) == (32, None, frozenset())


def test_every_variable_is_used() -> None:
    assert FOUNDRY.configured(
        {
            "METALLIC_MAX_CONTEXT_LEN": "4096",
            "METALLIC_KV_MEMORY_BUDGET_MB": "512",
            "METALLIC_INTERMEDIATES_SHARED": "1",
            "METALLIC_KV_CACHE_SHARED": "1",
            "METALLIC_ROPE_SHARED": "1",
            "METALLIC_PREFILL_CHUNK_SIZE": " 64 ",
            "METALLIC_FOUNDRY_DECODE_BATCH_SIZE": "16",
        }
    ) == replace(
        FOUNDRY,
        max_context=4096,
        budget=Budget("cache", bytes=512 * 2**20),
        prefill_step=64,
        decode_batch=16,
        shared=frozenset({"kv_cache", "intermediates", "rope_tables"}),
    )


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
def test_any_value_of_the_variable_enables_sharing(value: str) -> None:
    # Foundry, storage_mode_for: std::env::var("METALLIC_KV_CACHE_SHARED").is_ok().
    assert FOUNDRY.configured({"METALLIC_KV_CACHE_SHARED": value}).shared == {"kv_cache"}


@pytest.mark.parametrize(("written", "chunk"), [("0", 1), ("512", 512), ("100000", 512)])
def test_chunk_sizes_are_limited_to_the_range(written: str, chunk: int) -> None:
    # Foundry, prefill_config: clamp(1, 512).
    assert FOUNDRY.configured({"METALLIC_PREFILL_CHUNK_SIZE": written}).prefill_step == chunk


@pytest.mark.parametrize(("written", "batch"), [("0", 1), ("256", 256), ("100000", 256)])
def test_decode_batches_are_limited_to_the_range(written: str, batch: int) -> None:
    # Foundry, decode_batch_size: clamp(1, MAX) with MAX = 256.
    found = FOUNDRY.configured({"METALLIC_FOUNDRY_DECODE_BATCH_SIZE": written})
    assert found.decode_batch == batch


@pytest.mark.parametrize(
    ("types", "batch"),
    [
        ({"output.weight": "F16", "token_embd.weight": "Q8_0"}, 16),
        ({"output.weight": "Q8_0", "token_embd.weight": "F16"}, 64),
        ({"token_embd.weight": "F16"}, 16),
        ({"token_embd.weight": "BF16"}, 64),
        ({}, 64),
    ],
)
def test_the_decode_batch_follows_the_type_of_the_output_matrix(
    types: dict[str, str], batch: int
) -> None:
    # Foundry, decode_batch_size: 16 if output_weight is F16, else 64.
    sized = _sized(FOUNDRY, MAC)
    subject = sized.runtime_model.subject
    tensors = tuple(Tensor(name, kind, (8, 8), 128) for name, kind in types.items())
    checkpoint = replace(subject.checkpoint, source="gguf", tensors=tensors)
    model = replace(sized.runtime_model, subject=replace(subject, checkpoint=checkpoint))
    assert isinstance(model, Foundry)
    assert model.decode_batch == batch


@pytest.mark.parametrize("most", [500, 1024, 3000])
@pytest.mark.parametrize("device", [MAC, None])
def test_a_context_beyond_the_limit_does_not_fit_and_is_never_allocated(
    most: int, device: Device | None
) -> None:
    runtime = FOUNDRY.configured({"METALLIC_MAX_CONTEXT_LEN": str(most)})
    sized = _sized(runtime, device)
    at_limit, beyond = (
        estimate(sized, Workload(prompt_tokens=most + more, prefill_step=32)) for more in (0, 1)
    )
    assert at_limit.verdict == ("fits" if device else "unknown")
    assert (beyond.verdict, beyond.exceeded) == ("exceeds", ("context",))
    # Foundry, ContextConfig: a capacity is aligned up to 128, and doubling stops at the limit.
    assert beyond.components.kv.allocated_tokens == align_capacity(most)
    assert beyond.components.kv.bytes == at_limit.components.kv.bytes
    assert beyond.peak_bytes == at_limit.peak_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("METALLIC_MAX_CONTEXT_LEN", "many"),
        ("METALLIC_KV_MEMORY_BUDGET_MB", "-1"),
        ("METALLIC_PREFILL_CHUNK_SIZE", "32k"),
    ],
)
def test_an_unreadable_value_is_reported_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        FOUNDRY.configured({name: value})


def test_the_budget_is_half_the_working_set_unless_set() -> None:
    assert FOUNDRY.budget.of_device(MAC) == 12 * 2**30
    smaller = FOUNDRY.configured({"METALLIC_KV_MEMORY_BUDGET_MB": "100"})
    assert smaller.budget.of_device(MAC) == 100 * 2**20


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_other_variables_are_ignored(environ: dict[str, str]) -> None:
    assert FOUNDRY.configured(environ) == FOUNDRY
