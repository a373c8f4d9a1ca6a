"""``memfit serve``: what it refuses before it starts anything."""

import pytest

from tests.cli.running import Memfit

pytest.importorskip("mlx_lm")


@pytest.mark.parametrize(
    "flags", [("--trust-remote-code",), ("--kv-bits", "8"), ("--draft", "x"), ("--trust",)]
)
def test_a_flag_that_is_not_guarded_is_refused(memfit: Memfit, flags: tuple[str, ...]) -> None:
    run = memfit("serve", "qwen3-0.6b", "--", *flags)
    assert (run.code, flags[0] in run.err) == (2, True)


def test_a_sample_has_no_weights_to_serve(memfit: Memfit) -> None:
    assert memfit("serve", "qwen3-0.6b").code in (2, 3)
