"""Foundry's METALLIC_* variables: the documented table of its environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.foundry import FoundrySettings, foundry_settings
from memfit.estimators.runtimes.registry import get_runtime

MAC = Device("a Mac", "metal", 32 * 2**30, 24 * 2**30, None, "flag")


def test_nothing_set_is_the_documented_defaults() -> None:
    found = foundry_settings({"PATH": "/bin"})
    assert found == FoundrySettings()
    assert (found.prefill_chunk, found.decode_batch) == (32, 64)


def test_every_variable_is_honoured() -> None:
    assert foundry_settings(
        {
            "METALLIC_MAX_CONTEXT_LEN": "4096",
            "METALLIC_KV_MEMORY_BUDGET_MB": "512",
            "METALLIC_INTERMEDIATES_SHARED": "1",
            "METALLIC_KV_CACHE_SHARED": "1",
            "METALLIC_PREFILL_CHUNK_SIZE": " 64 ",
            "METALLIC_FOUNDRY_DECODE_BATCH_SIZE": "16",
        }
    ) == FoundrySettings(
        max_context=4096,
        kv_budget_bytes=512 * 2**20,
        prefill_chunk=64,
        decode_batch=16,
        kv_cache_shared=True,
        intermediates_shared=True,
    )


@pytest.mark.parametrize(("written", "chunk"), [("0", 1), ("512", 512), ("100000", 512)])
def test_chunks_are_brought_into_range(written: str, chunk: int) -> None:
    # Foundry, prefill_config: clamp(1, 512).
    assert foundry_settings({"METALLIC_PREFILL_CHUNK_SIZE": written}).prefill_chunk == chunk


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("METALLIC_MAX_CONTEXT_LEN", "many"),
        ("METALLIC_KV_MEMORY_BUDGET_MB", "-1"),
        ("METALLIC_PREFILL_CHUNK_SIZE", "32k"),
        ("METALLIC_KV_CACHE_SHARED", "yes"),
    ],
)
def test_what_cannot_be_read_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        foundry_settings({name: value})


def test_the_budget_is_half_the_working_set_unless_set() -> None:
    foundry = get_runtime("foundry")
    assert foundry.budget.of_device(MAC) == 12 * 2**30
    told = foundry_settings({"METALLIC_KV_MEMORY_BUDGET_MB": "100"}).applied(foundry)
    assert told.budget.of_device(MAC) == 100 * 2**20


def test_the_settings_reach_the_runtime() -> None:
    told = FoundrySettings(max_context=1000, prefill_chunk=64).applied(get_runtime("foundry"))
    assert (told.max_context, told.prefill_step) == (1000, 64)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_other_variables_are_nobodys_business(environ: dict[str, str]) -> None:
    assert foundry_settings(environ) == FoundrySettings()
