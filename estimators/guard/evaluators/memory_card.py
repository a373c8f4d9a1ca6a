"""Evaluate a memory card of memfit: the standard library alone, integers alone.

python3 memory_card.py CARD.json checks the card's own vectors. docs/card.md explains the format.
"""

import json
import sys
from operator import mul
from typing import Any

STEP = 256  # tokens by which mlx-lm's caches grow
SHARES = 1024  # of what windows hold beyond their limit


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def up(tokens: int) -> int:
    return ceil_div(tokens, STEP) * STEP


def lookup(knots: Any, keys: int) -> int:
    """Return the units between two knots, rounded up; before the first they are its own."""
    low, high = 0, len(knots) - 1
    if keys <= knots[0][0]:
        return knots[0][1]
    while high - low > 1:
        middle = (low + high) // 2
        if knots[middle][0] < keys:
            low = middle
        else:
            high = middle
    (x0, y0), (x1, y1) = knots[low], knots[high]
    return y0 + ceil_div((y1 - y0) * (keys - x0), x1 - x0)


class Prompt:
    """One request: new tokens after cached ones, in chunks of a step, then a reply."""

    def __init__(self, card: dict[str, Any], new: int, cached: int, step: int, reply: int) -> None:
        if min(new - 1, cached, reply) < 0 or cached + new + reply > card["max_tokens"]:
            raise ValueError(f"the card ends at {card['max_tokens']} tokens")
        if step not in card["steps"]:
            raise ValueError(f"the card has steps {card['steps']}, not {step}")
        self.card, self.new, self.cached, self.step, self.reply = card, new, cached, step, reply

    def stored(self) -> int:
        """Return the bytes of the stored cache of the cached tokens, which stays."""
        if not self.cached:
            return 0
        tokens = (
            min(self.cached, limit - 1 + self.step) if limit else self.cached
            for limit, _ in self.card["caches"]
        )
        own = sum(map(mul, tokens, (per_token for _, per_token in self.card["caches"])))
        return own + self.card["state_bytes"]

    def room(self, limit: int, done: int) -> int:
        """Return the tokens that a cache has room for once `done` new ones are in chunks."""
        if not done:
            return min(self.cached, limit) if limit else self.cached
        full, rest = divmod(done, self.step)
        last = rest or self.step
        if limit:
            return min(self.cached + done - last, limit - 1) + last
        return self.cached + full * self.step + up(rest)

    def chunk(self, done: int, tokens: int) -> int:
        """Return the bytes above the weights of a chunk after `done` new tokens."""
        total, keys = self.card["state_bytes"], self.cached + done + tokens
        for limit, per_token in self.card["caches"]:
            after = self.room(limit, done + tokens)
            total += per_token * (max(self.room(limit, done), after) if done else after)
        _, scores, first, later = next(row for row in self.card["rows"] if tokens <= row[0])
        knots = later if done else first
        view = self.card["view_bytes"] * max(tokens, self.step if done else 0)
        return total + view + scores * tokens * keys + lookup(knots, keys) * self.card["unit"]

    def decode(self) -> int:
        """Return the bytes above the weights of the last token of the reply, or of the prompt."""
        card, done, grows, beyond = self.card, self.new - 1, False, 0
        total, end = card["state_bytes"], self.cached + self.new + self.reply
        for limit, per_token in card["caches"]:
            before = self.room(limit, done)
            room = before + up(max(0, end - before))
            room = min(room, limit) if limit else room
            grows = grows or room > before
            beyond += per_token * max(0, before - room)
            total += per_token * room
        total += ceil_div(beyond * card["window_shares"][grows], SHARES)
        view = card["decode_view_bytes"] * min(self.step, done)
        knots = card["growing" if grows else "decode"]
        return total + view + lookup(knots, end) * card["unit"]

    def peak(self) -> int:
        """Return the most bytes of the run, with the weights: never below memfit's own figure."""
        full, rest = divmod(self.new - 1, self.step)
        calls = [self.decode()]
        if full:
            calls += [self.chunk(0, self.step), self.chunk((full - 1) * self.step, self.step)]
        if rest:
            calls.append(self.chunk(full * self.step, rest))
        above = self.stored() + max(calls)
        return max(self.card["load_bytes"], self.card["weights_bytes"] + above)


def peak(card: dict[str, Any], new: int, cached: int, step: int, reply: int) -> int:
    """Return the peak in bytes; ValueError outside of the card."""
    return Prompt(card, new, cached, step, reply).peak()


def wrong_vectors(card: dict[str, Any]) -> int:
    """Return how many of the card's vectors this evaluator answers otherwise."""
    return sum(peak(card, *vector[:4]) != vector[4] for vector in card["vectors"])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wrong = wrong_vectors(json.load(file))
    sys.stdout.write(f"{wrong} wrong\n")
    sys.exit(bool(wrong))
