"""Values with their range: msgspec checks it on reading, and the JSON Schemas state it."""

from typing import Annotated, TypeVar

from msgspec import Meta

Item = TypeVar("Item")

Bytes = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
"""A number of anything else, or a time in the unit of the field's name."""
Positive = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(ge=0)]
NonEmpty = Annotated[tuple[Item, ...], Meta(min_length=1)]


def one_of(*values: str | int) -> Meta:
    """Return what the JSON Schema says of a value that is one of these; reading accepts others."""
    return Meta(extra_json_schema={"enum": list(values)})
