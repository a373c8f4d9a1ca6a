"""Real ranks under mlx.launch on this machine; a rank that fails ends the run and is named."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="the ranks are mlx-lm's")

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.ranks import Ranks
from memfit.probes.rank_run import RankRequest, RankStopped, measure_ranks
from memfit.probes.tune_ranks import tune_ranks
from tests.checkpoints import Recipe, save_checkpoint

WORKLOAD = Workload(prompt_tokens=70, max_tokens=3, prefill_step=64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    save_checkpoint(path, Recipe("llama"))
    return path


def asked(
    path: Path, workload: Workload, seconds: float = 240, limit: int | None = None
) -> RankRequest:
    return RankRequest(
        path=path,
        size=2,
        parallel="tensor",
        split=None,
        workload=workload,
        timeout_seconds=seconds,
        memory_limit_bytes=limit,
    )


def ranks_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of ranks that run a model."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        pid, _, arguments = line.strip().partition(" ")
        if "memfit.probes.rank_child" in arguments and str(path) in arguments:
            yield int(pid), arguments.split()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "parallel", "size", "split"),
    [
        ("llama", "tensor", 2, None),
        ("qwen2", "pipeline", 2, (1, 2)),
        ("qwen3_moe", "pipeline", 2, None),
        ("deepseek_v3", "pipeline", 4, None),
    ],
)
def test_weights_and_caches_of_every_rank_are_as_estimated(
    tmp_path: Path, case: str, parallel: Parallel, size: int, split: tuple[int, ...] | None
) -> None:
    path = tmp_path / case
    save_checkpoint(path, Recipe(case, bits=8 if "_" in case else None))
    ranks = Ranks(size, parallel, split)
    result = tune_ranks(str(path), path, WORKLOAD, ranks, timeout_seconds=240)
    assert len(result.ranks) == size
    for rank in result.ranks:
        assert rank.loaded.weights_bytes == rank.estimated.weights_bytes
        assert rank.run.kv_bytes == rank.estimated.kv_bytes
        assert rank.run.ssm_bytes == rank.estimated.state_bytes
    assert list(ranks_of(path)) == []


@pytest.mark.exhaustive
def test_a_rank_without_memory_is_named(llama: Path) -> None:
    with pytest.raises(RankStopped, match=r"rank [01]: MLX took .* more than the memory limit"):
        measure_ranks(asked(llama, WORKLOAD, limit=700_000))
    assert list(ranks_of(llama)) == []


@pytest.mark.exhaustive
def test_a_host_without_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank [01]: .*no such directory on this host"):
        measure_ranks(asked(tmp_path / "none", WORKLOAD))


def test_ranks_are_checked_before_any_is_started(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", Recipe("llama"))
    with pytest.raises(UnsupportedError, match="has no pipeline"):
        tune_ranks(
            str(tmp_path / "llama"),
            tmp_path / "llama",
            WORKLOAD,
            Ranks(2, "pipeline"),
            timeout_seconds=1,
        )
