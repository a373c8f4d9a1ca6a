"""Every command for every class of mlx-lm that no formula describes: which do not answer, and why.

Run from the checkout with mlx and mlx-lm installed: ``python -m benchmarks.class_matrix [TYPE]``.
The configs are the small ones of tests/trace/cases.json. It takes some minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "trace" / "cases.json"
# One process runs the command line for all of them: each line is a command, each answer a code.
_CHILD = """
import contextlib, io, json, sys
from memfit.cli.app import main
for line in sys.stdin:
    sys.argv = ["memfit", *json.loads(line)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "oe")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
    print(json.dumps([code, err.buffer.getvalue().decode()]), flush=True)
"""
_MAC = ("--memory", "16GB")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "estimate": ("estimate", "MODEL", *_MAC),
    "no machine": ("estimate", "MODEL"),
    "KV bits": ("estimate", "MODEL", *_MAC, "--kv-bits", "8", "--prompt-tokens", "600"),
    "batch": ("estimate", "MODEL", *_MAC, "--batch", "3"),
    "4 bits": ("estimate", "MODEL", *_MAC, "--quantize", "4", "--group-size", "32"),
    "CUDA": ("estimate", "MODEL", "--device", "h100-80"),
    "2 ranks": ("estimate", "MODEL", *_MAC, "--ranks", "2"),
    "unequal ranks": (
        *("estimate", "MODEL", "--device", "m4-pro-24,m4-max-64", "--parallel", "pipeline"),
    ),
    "plan ranks": ("plan", "ranks", "MODEL", "--device", "m4-pro-24"),
    "plan context": ("plan", "context", "MODEL", *_MAC),
    "plan server": ("plan", "server", "MODEL", *_MAC),
    "plan experts": ("plan", "experts", "MODEL", *_MAC),
    "plan offload": ("plan", "offload", "MODEL", *_MAC),
    "plan growth": ("plan", "growth", "MODEL", *_MAC),
    "plan static": ("plan", "static", "MODEL", "--context", "64"),
    "plan train": (
        *("plan", "train", "MODEL", *_MAC, "--max-seq-length", "256", "--num-layers", "1"),
    ),
    "compare": ("compare", "MODEL", *_MAC, "--matrix", "context=1k,2k"),
    "gate": ("gate", "--policy", "MODEL/memfit.yaml"),
    "MLX Swift": ("estimate", "MODEL", *_MAC, "--runtime", "mlx-swift-lm"),
    "page": ("estimate", "MODEL", *_MAC, "--format", "html"),
}


def main() -> None:
    """Print what did not answer: the class, the command, its exit code and its last line."""
    only = sys.argv[1:]
    configs = [c for c in json.loads(CASES.read_text()) if not only or c["model_type"] in only]
    answered: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, command, code, text in answers(configs, Path(folder)):
            if code in (0, 1):
                answered[command] += 1
            else:
                print(f"{name}: {command}: {code}: {text}", flush=True)
    for command in COMMANDS:
        print(f"{command}: {answered[command]} of {len(configs)} classes")


def answers(configs: list[dict[str, Any]], folder: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield class, command, exit code and the last line of its errors."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for config in configs:
        name = config["model_type"]
        model = write(folder / name, config)
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as child:
            assert child.stdin
            assert child.stdout
            for command, arguments in COMMANDS.items():
                written = [each.replace("MODEL", str(model)) for each in arguments]
                child.stdin.write(json.dumps(written) + "\n")
                child.stdin.flush()
                code, text = json.loads(child.stdout.readline())
                yield name, command, code, " ".join(text.split()).rpartition("memfit: ")[2]
            child.stdin.close()


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a config with room for long prompts, and a policy for it; return the folder."""
    folder.mkdir()
    longer = {**config, "max_position_embeddings": 32_768}
    if "text_config" in longer:
        longer["text_config"] = {**longer["text_config"], "max_position_embeddings": 32_768}
    (folder / "config.json").write_text(json.dumps(longer))
    target = {
        "model": str(folder),
        "memory": "16GB",
        "workload": {"context": "1k"},
        "limits": {"peak": "90%", "context": "1k", "wired_limit": "16GB"},
    }
    policy = {"schema": "memfit.policy/1", "targets": {"it": target}}
    (folder / "memfit.yaml").write_text(json.dumps(policy))
    return folder


if __name__ == "__main__":
    main()
