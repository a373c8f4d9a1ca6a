"""Options that are given more than once: a list, or an error."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from memfit.cli.options.questions import LISTS
from memfit.estimators.base.errors import InputError


def with_lists(arguments: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the arguments of a command with the machines of several ranks in one list.

    >>> with_lists(["--memory", "64GB", "-v", "--memory=32GB"], ["--memory", "--ranks"])
    ['--memory', '64GB,32GB', '-v']
    """
    found = list(arguments)
    if "--ranks" not in known:
        return found
    for option in filter(set(known).__contains__, LISTS):
        values, places = [], []
        for place, word in enumerate(found):
            name, sign, value = word.partition("=")
            if name == option and (sign or place + 1 < len(found)):
                values.append(value if sign else found[place + 1])
                places.append(range(place, place + 2 - len(sign)))
        if len(places) > 1:
            gone = {place for span in places for place in span}
            first = places[0].start
            rest = [word for place, word in enumerate(found) if place > first and place not in gone]
            found = [*found[:first], option, ",".join(values), *rest]
    return found


def require_once(given: Iterable[Any]) -> None:
    """Check the options that were given, in their order: those that are no list are there once.

    A switch without a value may be repeated, which changes nothing.

    Raises:
        InputError: for another one, of which only the last would count.
    """
    for option, times in Counter(given).items():
        is_switch = getattr(option, "is_flag", False) and not option.secondary_opts
        if times > 1 and not (option.multiple or option.nargs == -1 or is_switch):
            names: list[str] = option.opts + option.secondary_opts
            also = f" ({', '.join(names[1:])} is the same option)" if names[1:] else ""
            raise InputError(f"{names[0]} is given {times} times: give it once{also}")
