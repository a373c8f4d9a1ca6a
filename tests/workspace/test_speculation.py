"""Speculative decoding: formula and trace against mlx-lm's own loop on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import Draft
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import error_bytes_of
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import speculative_peak
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.weights.derived import derive
from memfit.estimators.workspace.peak import prepared_model
from memfit.estimators.workspace.speculation import LoadedModel, speculative_moments
from tests.models import QWEN3_4B

pytest.importorskip("mlx_lm")

HOST = Device("this host", "cpu", 0, 0, None, "flag")
TARGET = {
    **QWEN3_4B,
    **{"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 20_000},
    **{"torch_dtype": "float32", "tie_word_embeddings": True},
}
DRAFT = {**TARGET, "num_hidden_layers": 2, "hidden_size": 128}
# In a process of its own: the peak is the process's.
RUN = """
import json, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import qwen3

models, workload, tokens = json.loads(sys.argv[1])
target, draft = (qwen3.Model(qwen3.ModelArgs.from_dict(config)) for config in models)
mx.eval(target.parameters(), draft.parameters())
mx.clear_cache()
prompt = mx.arange(workload["prompt_tokens"]) % 17
mx.eval(prompt)
mx.reset_peak_memory()
held = None
for _, held, _ in speculative_generate_step(
    prompt,
    target,
    draft,
    num_draft_tokens=tokens,
    max_tokens=workload["max_tokens"],
    prefill_step_size=workload["prefill_step"],
):
    pass
print(mx.get_peak_memory())
"""


def loaded(config: dict[str, Any]) -> LoadedModel:
    model = build_model(config, "config.json")
    return LoadedModel(prepared_model(model, None, HOST), derive(model, None).loaded_bytes)


@pytest.mark.parametrize(
    ("workload", "tokens"),
    [
        # The chunks of the prompt are the largest, then the logits of all the draft's tokens.
        (Workload(prompt_tokens=400, max_tokens=4, prefill_step=256), 2),
        pytest.param(
            Workload(prompt_tokens=10, max_tokens=12), 5, marks=pytest.mark.exhaustive(daily=True)
        ),
    ],
)
def test_the_peak_is_that_of_mlx_lms_own_loop(workload: Workload, tokens: int) -> None:
    target, draft = loaded(TARGET), loaded(DRAFT)
    weights = target.resident_bytes + draft.resident_bytes
    by_formula = max(m.nbytes for m in speculative_moments(target, draft, workload, tokens))
    classes = [TracedModel(config, "cpu", dtype="F32") for config in (TARGET, DRAFT)]
    machine = TraceTarget(backend="cpu")
    top = speculative_peak(classes[0], classes[1], workload, tokens, machine=machine, device=HOST)
    settings = {
        name: getattr(workload, name) for name in ("prompt_tokens", "max_tokens", "prefill_step")
    }
    arguments = json.dumps([[TARGET, DRAFT], settings, tokens])
    child = subprocess.run(
        [sys.executable, "-c", RUN, arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for predicted in (by_formula, top.nbytes):
        # A run holds more or less with how far the CPU is behind Python.
        assert 0.93 < (predicted - weights) / (int(child.stdout) - weights) < 1.12


def test_the_stated_error_is_of_the_largest_moment_of_both_models(tmp_path: Path) -> None:
    small = {**DRAFT, "hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    for name, config in (("target", small), ("draft", TARGET)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    catalog, workload = Catalog(), Workload(prompt_tokens=1200, max_tokens=4, prefill_step=512)
    draft = catalog.sized(str(tmp_path / "draft.json"), device=HOST)
    both = catalog.sized(
        str(tmp_path / "target.json"), device=HOST, draft=Draft(str(tmp_path / "draft.json"))
    )
    # The draft's chunks are the largest: its error is that of the answer.
    assert error_bytes_of(both, workload) >= error_bytes_of(draft, workload) > 0
    assert error_bytes_of(replace(both, draft=None), workload) < error_bytes_of(draft, workload)
