"""Results with fields that are computed when one of them is first read."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

Own = TypeVar("Own", bound="Lazy")


class Lazy:
    """A base of structs whose slots may be empty for a while: whole before they are copied.

    msgspec's own functions read the slots themselves, and do not wait for them: `complete` first.
    """

    def without(self: Own, names: Iterable[str], compute: Callable[[], Struct]) -> Own:
        """Empty fields of this new struct; return it. ``compute`` returns one that has them."""
        names = tuple(names)
        for name in names:
            vars(type(self))[name].__delete__(self)
        self.__dict__["_later"] = names, compute
        return self

    def complete(self: Own) -> Own:
        """Compute the fields that are missing; return the struct itself."""
        if later := self.__dict__.get("_later"):
            names, compute = later
            other = compute()
            assert isinstance(self, Struct)
            for name in names:
                force_setattr(self, name, getattr(other, name))
            self.__dict__.pop("_later", None)
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute what is missing; a slot that is not empty does not get here."""
            if name not in self.__dict__.get("_later", ((),))[0]:
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            return getattr(self.complete(), name)

    def __repr__(self) -> str:
        return super(Lazy, self.complete()).__repr__()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Lazy):
            other.complete()
        return super(Lazy, self.complete()).__eq__(other)

    def __copy__(self) -> Any:
        return super(Lazy, self.complete()).__copy__()  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return super(Lazy, self.complete()).__reduce__()
