"""Records: frozen dataclasses that are quick to make.

``dataclass`` writes and compiles six methods for each frozen class, half a millisecond; an answer
needs some seventy classes, and a short process would spend a fifth of its time on them. A record
compiles its ``__init__`` alone and shares the rest. That it is frozen, the type checker holds;
what callers share or what is checked when it is made stays a frozen dataclass.
"""

from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass, fields
    from operator import attrgetter

    def record(*, frozen, slots, kw_only=False):
        """Make a class as ``dataclass`` does with the same words."""
        del frozen

        def make(cls):
            cls.__eq__, cls.__hash__, cls.__repr__ = _equals, _hash, _shown
            cls = dataclass(eq=False, repr=False, slots=slots, kw_only=kw_only)(cls)
            names = [field.name for field in fields(cls) if field.compare]
            cls._values = attrgetter(*names) if names else type
            return cls

        return make

    def _equals(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._values(self) == self._values(other)

    def _hash(self):
        return hash(self._values(self))

    def _shown(self):
        values = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]
        return f"{self.__class__.__qualname__}({', '.join(values)})"
