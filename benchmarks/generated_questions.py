"""Ask thousands of generated questions, and print what contradicts itself in their answers.

    python -m benchmarks.generated_questions           # 2,000
    python -m benchmarks.generated_questions 600 2 4   # the second fourth of 600

Each printed command has to have the verdict it was printed under when it is given back to memfit,
and no two outputs of one question may contradict: tests/generated.
"""

import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.generated.contradictions import contradictions
from tests.generated.questions import Models, drawn

COUNT = 2000


def main() -> None:
    """Print the contradictions, then how often each program was printed; end with 1 for any."""
    count, part, parts = (*map(int, sys.argv[1:]), *(COUNT, 1, 1)[len(sys.argv) - 1 :])
    programs: Counter[str] = Counter()
    found, start = 0, time.process_time()
    with TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for number, question in enumerate(drawn(count)):
            if number * parts // count != part - 1:
                continue
            try:
                said = list(contradictions(models, question, Path(folder), number))
            except Exception as error:  # noqa: BLE001 - the other questions are asked too
                said = [("", f"{type(error).__name__}: {error}")]
            for program, contradiction in said:
                programs[program] += 1
                found += bool(contradiction)
                if contradiction:
                    print(f"{number} {question}: {contradiction}", flush=True)
    seconds = time.process_time() - start
    counts = ", ".join(f"{name} {times}" for name, times in programs.items() if name)
    print(f"{count // parts} questions in {seconds:.0f} s: {found} contradictions; {counts}")
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
