"""Wall times of a model on the Hub, memfit and hf-mem on one server: at once and 30 ms a request.

The job is what both do: fetch a repository's headers and add up the bytes of its weights, from the
first connection to the total, measured inside a process that has done it once. The table also has
whole processes: memfit makes its whole estimate, hf-mem prints the total, and with --experimental a
KV cache. The server runs on this machine and behaves like the Hub, with redirects of large files;
memfit's cache is empty unless the column says "again". hf-mem has the Hub's address built in, so
its HTTP client gets the server's, and nothing else is changed. Every command runs once before it is
timed, and Python keeps the bytecode of both, as for installed packages.

    python -m venv /tmp/hf-mem && /tmp/hf-mem/bin/pip install hf-mem
    python benchmarks/hub_speed.py /tmp/hf-mem/bin/python

docs/performance.md sums up what it prints; it exits with 1 when a limit is exceeded: at most
hf-mem's time on one shard with 30 ms a request, at most half of it on sixty, for the job and for
the whole process. Where the server answers at once, the estimate itself may come on top.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.hub.server import FakeHub, Repo, serve  # noqa: E402
from tests.models import QWEN3_4B, write_checkpoint  # noqa: E402
from tests.sparse import Shapes  # noqa: E402

REPEATS = 7
NAME = "org/name"
MODELS = (  # layers, shards, seconds a request takes, limit
    (36, 1, 0.030, 1.0),
    (80, 60, 0.030, 0.5),
    (36, 1, 0.0, 1.3),
    (80, 60, 0.0, 1.1),
)
MEMFIT = "from memfit.cli.__main__ import main; main()"
# A job runs once, then is timed REPEATS times.
MEMFIT_JOB = """
import sys, tempfile, time
from pathlib import Path
from huggingface_hub.utils import close_session
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache
from memfit.estimators.checkpoint.hub.source import open_hub
for turn in range(int(sys.argv[2]) + 1):
    close_session()
    with tempfile.TemporaryDirectory() as empty:
        started = time.perf_counter()
        sum(t.nbytes for t in open_hub(sys.argv[1], cache=HeaderCache(Path(empty) / "c")).tensors)
        if turn:
            print(time.perf_counter() - started)
"""
SHIM = """
import httpx2, os, sys, time
send = httpx2.AsyncClient.get
async def get(self, url, **rest):
    url = url.replace("https://huggingface.co", os.environ["HF_ENDPOINT"])
    return await send(self, url, **rest)
httpx2.AsyncClient.get = get
"""
OTHER = f"{SHIM}\nfrom hf_mem.cli import main\nmain()"
OTHER_JOB = f"""{SHIM}
from hf_mem.run import run
for turn in range(int(sys.argv[2]) + 1):
    started = time.perf_counter()
    run(sys.argv[1])
    if turn:
        print(time.perf_counter() - started)
"""


def shapes(layers: int) -> Shapes:
    """Return the tensors of a dense model in the Hub's layout, eleven a layer."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (151669, 2560)),
        "model.norm.weight": ("BF16", (2560,)),
    }
    each: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (4096, 2560),
        "self_attn.k_proj": (1024, 2560),
        "self_attn.v_proj": (1024, 2560),
        "self_attn.o_proj": (2560, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (9728, 2560),
        "mlp.up_proj": (9728, 2560),
        "mlp.down_proj": (2560, 9728),
        "input_layernorm": (2560,),
        "post_attention_layernorm": (2560,),
    }
    for layer in range(layers):
        for name, shape in each.items():
            found[f"model.layers.{layer}.{name}.weight"] = ("BF16", shape)
    return found


def output(command: list[str], environment: dict[str, str]) -> str:
    """Return the output of a process that must succeed."""
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    if ran.returncode != 0:
        raise SystemExit(f"{command}: {ran.stderr}")
    return ran.stdout


def jobs(python: str, code: str, environment: dict[str, str]) -> float:
    """Return the median seconds of a job inside one process."""
    lines = output([python, "-c", code, NAME, str(REPEATS)], environment).split()
    return statistics.median(map(float, lines))


def processes(
    commands: dict[str, list[str]], environment: dict[str, str], cache: Path
) -> dict[str, float]:
    """Return median seconds of whole processes, in turns so that all meet the same machine."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(1 + REPEATS):
        shutil.rmtree(cache, ignore_errors=True)
        for name, command in commands.items():
            started = time.perf_counter()
            output(command, environment)
            if turn:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in taken.items()}


def row(hub: FakeHub, home: Path, other: str) -> dict[str, float]:
    """Return the seconds of every column."""
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPYCACHEPREFIX": str(home / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",  # empty means unset
    }
    memfit = [sys.executable, "-c", MEMFIT, "estimate", NAME, "--json"]
    hf_mem = [other, "-c", OTHER, "--model-id", NAME, "--json-output"]
    commands = {
        "memfit estimate": memfit,
        "again": memfit,
        "hf-mem": hf_mem,
        "hf-mem --experimental": [*hf_mem, "--experimental"],
    }
    return {
        "job: memfit": jobs(sys.executable, MEMFIT_JOB, environment),
        "job: hf-mem": jobs(other, OTHER_JOB, environment),
        **processes(commands, environment, home / "cache"),
    }


def main(other: str) -> int:
    """Print the table; 1 when a limit is broken."""
    broken = False
    config: dict[str, Any] = {**QWEN3_4B, "architectures": ["Qwen3ForCausalLM"]}
    for number, (layers, shards, latency, share) in enumerate(MODELS):
        with tempfile.TemporaryDirectory() as folder:
            model = {**config, "num_hidden_layers": layers}
            repo = Repo(write_checkpoint(Path(folder) / "model", model, shapes(layers), shards))
            with serve(FakeHub({NAME: repo}, latency_seconds=latency)) as hub:
                taken = row(hub, Path(folder), other)
        if not number:
            print(f"| | {' | '.join(taken)} |\n|---|{'---:|' * len(taken)}")
        broken |= taken["job: memfit"] > share * taken["job: hf-mem"]
        broken |= taken["memfit estimate"] > share * taken["hf-mem"]
        cells = " | ".join(f"{seconds:.2f} s" for seconds in taken.values())
        count = "1 shard" if shards == 1 else f"{shards} shards"
        print(f"| {count}, {latency * 1000:.0f} ms | {cells} |", flush=True)
    return int(broken)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1]))
