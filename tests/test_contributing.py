"""CONTRIBUTING is right: what it says is done in a copy of the product, which then runs."""

import json
from pathlib import Path

from tests.tree_copy import TreeCopy

LIMIT = """\
    LimitRule("states", "recurrent states", _MEMORY, "weights", "state_bytes", ("batch",)),
"""


def test_a_limit_of_the_gate_is_one_row(tmp_path: Path) -> None:
    tree = TreeCopy(tmp_path)
    tree.insert("estimators/gate/limits.py", '    LimitRule("load_peak"', LIMIT)
    target = {
        "model": "sample:falcon-h1-7b",
        "device": "m4-pro-24",
        "workload": {"prompt_tokens": 4096, "batch": 4},
        "limits": {"states": "1B", "peak": "90%"},
    }
    policy = {"schema": "memfit.policy/1", "targets": {"chat": target}}
    tree.write("memfit.yaml", json.dumps(policy))
    broken = tree.run("gate", "--format", "json", "--output", "gate.md")
    peak, states = json.loads(broken.stdout)["targets"][0]["checks"]
    assert (broken.returncode, peak["limit"], states["limit"]) == (1, "peak", "states")
    assert states["excess"] == states["figure"] - 1 > 0
    assert "recurrent states: " in (tree.folder / "gate.md").read_text()
    target["limits"] = {"states": f"{states['figure']}B"}
    tree.write("memfit.yaml", json.dumps(policy))
    assert tree.run("gate", "--update").returncode == 0
