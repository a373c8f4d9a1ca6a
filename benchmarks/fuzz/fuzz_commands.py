"""Run whole commands in this process, made from numbers.

    python -m benchmarks.fuzz.fuzz_commands --count 1000

Each finding is printed once, by its kind, and written as a case for tests/fuzz/corpus. Counts of
exit codes and commands come last. docs/reliability.md sums up the runs.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import msgspec

from tests.fuzz.workspace import Workspace, environment

SLOW_SECONDS = 5.0  # printed, and no finding: the machine may be busy


CORPUS = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"


def main() -> None:
    """Run the corpus, then the cases of consecutive seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--findings", type=Path, help="a folder for the case of each finding")
    arguments = parser.parse_args()
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as root:
        # huggingface-hub reads its variables once, when it is imported.
        os.environ.update(environment(Path(root)))
        seeds = range(arguments.first, arguments.first + arguments.count)
        sys.exit(_campaign(Workspace(Path(root)), seeds, arguments.findings))


def _campaign(workspace: Workspace, seeds: range, findings: Path | None) -> int:
    from tests.fuzz.commands import Case, commands, faults, load_case, make_case, run

    run(Case(arguments=("gate", "--update")), workspace, keep=True)
    names = {words for words, _ in commands()}
    codes, used, kinds = Counter[str](), Counter[str](), Counter[str]()
    slowest, started = 0.0, time.monotonic()
    corpus = ((path.stem, load_case(path)) for path in sorted(CORPUS.glob("*.json")))
    for name, case in chain(corpus, ((str(seed), make_case(seed, workspace)) for seed in seeds)):
        outcome = run(case, workspace)
        codes[str(outcome.code)] += 1
        words = case.arguments[:2]
        used[" ".join(words if words in names else words[:1])] += 1
        slowest = max(slowest, outcome.seconds)
        for text in faults(case, outcome):
            kind = re.sub(r"[0-9]+", "N", text)[:60]
            kinds[kind] += 1
            if kinds[kind] == 1:
                print(f"{name}: {text}\n    {' '.join(case.arguments)!r}", flush=True)
                if findings:
                    findings.mkdir(exist_ok=True)
                    (findings / f"{name}.json").write_bytes(msgspec.json.encode(case))
        if outcome.seconds > SLOW_SECONDS:
            print(f"{name}: {outcome.seconds:.1f} s\n    {' '.join(case.arguments)!r}", flush=True)
    print(f"{codes.total()} commands, {time.monotonic() - started:.0f} s, slowest {slowest:.1f} s")
    print(f"exit codes: {dict(codes.most_common())}")
    print(f"commands: {dict(used.most_common())}")
    print(f"findings: {dict(kinds.most_common())}")
    return bool(kinds)


if __name__ == "__main__":
    main()
