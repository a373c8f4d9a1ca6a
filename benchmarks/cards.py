"""Memory cards of samples against memfit's own figures on random questions.

``python benchmarks/cards.py QUESTIONS [SAMPLE ...]``, of all samples where none is named; 100,000
questions are five to ten minutes of one core for a card, which takes one or two to make. A line
says how often the card is below and by how much at most, how far above it is, and how many
questions are beyond the two bounds that are aimed at: max(2 %, 128 MB) for 95 %, and max(4 %,
256 MB) for all.
"""

import sys
import time
from pathlib import Path
from random import Random

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.guard.evaluators.memory_card import peak
from memfit.estimators.guard.tabulate import make_card, random_questions
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.result import plain
from memfit.estimators.sizing.catalog import Catalog

SAMPLES = sorted(
    path.stem for path in (Path(__file__).parents[1] / "sample_configs").glob("*.yaml")
)
AIMS = ((0.02, 128 * 10**6), (0.04, 256 * 10**6))
_MB = 10**6


def main(questions: int, names: list[str]) -> None:
    """Print a line for each sample."""
    for name in names:
        begin = time.process_time()
        try:
            print(name, _checked(name, questions), f"{time.process_time() - begin:.0f} s")
        except UnsupportedError as error:
            print(name, "no card:", error)
        sys.stdout.flush()


def _checked(name: str, questions: int) -> str:
    catalog = Catalog()
    sized = catalog.sized(catalog.add(open_sample(name)), device=find_device("m4-max-64"))
    card = make_card(sized)
    known = plain(card)
    excess, shares, beyond, evaluating = [], [], [0, 0], 0.0
    for new, cached, step, reply in random_questions(card, Random(2026), questions):
        workload = Workload(
            prompt_tokens=new + cached, cached_tokens=cached, prefill_step=step, max_tokens=reply
        )
        own = sized.figures_for(workload).moment.nbytes
        begin = time.perf_counter()
        above = peak(known, new, cached, step, reply) - own
        evaluating += time.perf_counter() - begin
        excess.append(above)
        shares.append(above / own)
        for number, (share, nbytes) in enumerate(AIMS):
            beyond[number] += above > max(share * own, nbytes)
    excess.sort()
    shares.sort()
    below = sum(each < 0 for each in excess)
    places = (questions // 2, questions * 95 // 100, -1)
    return (
        f"{len(card.to_json())} bytes, pad {card.check.pad_bytes / _MB:.0f} MB,"
        f" below {below} of {questions}, by {-min(0, excess[0]) / _MB:.1f} MB at most;"
        f" above p50, p95, most"
        f" {'/'.join(f'{excess[place] / _MB:.0f}' for place in places)} MB,"
        f" {'/'.join(f'{shares[place]:.2%}' for place in places)};"
        f" beyond the aims {beyond[0] / questions:.2%} and {beyond[1] / questions:.2%};"
        f" {evaluating / questions * 10**6:.0f} us an evaluation"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or SAMPLES)
