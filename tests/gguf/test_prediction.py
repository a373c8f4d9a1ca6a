"""Drafting with a file's own prediction layers, against what llama.cpp b11549 allocates.

Each recorded file got a prediction layer with the tensors of one of its own. llama.cpp (`no_alloc`,
a GPU that computes nothing, `load_mtp`) made a context with ``n_rs_seq`` 3 and logits of four
tokens for each sequence, and one of type MTP beside it.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.machine.devices import find_device
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, tensor, write

MIB = 2**20
DRAFTED = 3


class Logged(NamedTuple):
    """A run, and the MiB of llama.cpp's log lines."""

    architecture: str
    copied: int  # the layer whose tensors the prediction layer has
    context: int
    microbatch: int
    sequences: int
    kv: float  # of the MTP context
    compute: tuple[float, float]  # on the GPU: of the target, of the MTP context


LOGGED = [
    Logged("qwen35", 7, 8192, 512, 1, 32.0, (85.02, 75.02)),
    Logged("qwen35", 7, 4096, 512, 4, 16.0, (109.39, 68.02)),
    Logged("qwen35", 7, 32_768, 256, 2, 128.0, (62.20, 34.51)),
    Logged("qwen3next", 3, 8192, 2048, 1, 16.0, (376.05, 192.04)),
    Logged("qwen3next", 3, 4096, 512, 4, 8.0, (87.01, 41.01)),
    Logged("deepseek2", 1, 8192, 512, 1, 9.0, (88.13, 65.51)),
    Logged("deepseek2", 1, 32_768, 256, 2, 36.0, (48.07, 36.75)),
    Logged("deepseek32", 2, 8192, 2048, 1, 9.0, (1696.12, 1500.02)),
    Logged("glm-dsa", 2, 4096, 512, 4, 4.5, (402.08, 368.01)),
]
# n_rs_seq 0 and 2, two sequences of 2048 tokens: the MiB of llama_memory_recurrent.
STATES = {"qwen35": (25.12, 75.38), "qwen3next": (25.12, 25.12)}


def with_prediction_layer(folder: Path, name: str, copied: int) -> Path:
    entry = recorded()[name]
    metadata, blocks = dict(entry.metadata), entry.metadata[f"{name}.block_count"]
    hidden = metadata[f"{name}.embedding_length"]
    for key, value in entry.metadata.items():
        if isinstance(value, list) and len(value) == blocks:
            metadata[key] = [*value, value[copied]]
    metadata |= {f"{name}.block_count": blocks + 1, f"{name}.nextn_predict_layers": 1}
    added: list[Tensor] = [
        each._replace(name=each.name.replace(f"blk.{copied}.", f"blk.{blocks}."))
        for each in entry.tensors
        if each.name.startswith(f"blk.{copied}.")
    ]
    added.append(tensor(f"blk.{blocks}.nextn.eh_proj.weight", (2 * hidden, hidden)))
    return write(folder / "mtp.gguf", metadata, (*entry.tensors, *added))


def sized(path: Path, drafted: int) -> SizedModel:
    runtime = get_runtime("llama.cpp")
    if drafted:
        runtime = runtime.with_setting("mtp_tokens", drafted)
    return Catalog().sized(str(path), runtime=runtime, device=find_device("rtx-4090"))


@pytest.mark.parametrize("run", LOGGED, ids=lambda run: f"{run.architecture}-{run.sequences}")
def test_drafting_takes_the_prediction_layers_and_a_context_of_their_own(
    tmp_path: Path, run: Logged
) -> None:
    path = with_prediction_layer(tmp_path, run.architecture, run.copied)
    workload = Workload(
        prompt_tokens=run.context // run.sequences,
        batch=run.sequences,
        prefill_step=run.microbatch,
    )
    without, drafting = (sized(path, n).runtime_model for n in (0, DRAFTED))
    before, after = without.figures(workload), drafting.figures(workload)
    assert (after.kv.nbytes - before.kv.nbytes) / MIB == run.kv
    added = sum(
        each.nbytes for each in drafting.subject.checkpoint.tensors or () if ".nextn." in each.name
    )
    assert drafting.resident_bytes() - without.resident_bytes() > added
    # The buffers are an upper bound.
    used = after.moment.workspace_bytes / MIB
    assert sum(run.compute) <= used <= 1.5 * sum(run.compute)


@pytest.mark.parametrize("name", STATES)
def test_a_sequence_keeps_a_state_more_for_each_drafted_token(tmp_path: Path, name: str) -> None:
    path = with_prediction_layer(tmp_path, name, 3)
    workload = Workload(prompt_tokens=1024, batch=2)
    kept = [sized(path, n).runtime_model.figures(workload).ssm_bytes / MIB for n in (0, 2)]
    assert kept == pytest.approx(STATES[name], abs=0.005)


def test_the_command_and_a_pasted_line_name_the_drafted_tokens(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = with_prediction_layer(tmp_path, "qwen35", 7)
    line = f"llama-server -m {path} -np 1 -c 8192 --spec-type draft-mtp --spec-draft-n-max 2"
    pasted = memfit("--from", line, "--device", "rtx-4090", "--json").json
    asked = ("-c", "8192", "--mtp-tokens", "2", "-ngl", "auto", "--runtime", "llama.cpp")
    assert (
        pasted["peak_bytes"]
        == memfit(path, *asked, "--device", "rtx-4090", "--json").json["peak_bytes"]
    )
    assert "--spec-type draft-mtp --spec-draft-n-max 2" in pasted["actions"][0]["commands"][-1]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("qwen3", 2, "--mtp-tokens: the file has no prediction layers"),
        ("glm4moe", 3, "--mtp-tokens: prediction layers of glm4moe are not described"),
    ],
)
def test_what_does_not_draft_is_refused(
    memfit: Memfit, tmp_path: Path, name: str, code: int, said: str
) -> None:
    entry = recorded()[name]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    run = memfit(path, "--mtp-tokens", "2")
    assert (run.code, said in run.err) == (code, True), run.err
