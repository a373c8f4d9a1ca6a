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
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$", max_length=8192)]
"""A text of one line."""
NonEmpty = Annotated[tuple[Item, ...], Meta(min_length=1)]


def one_of(*values: str | int) -> Meta:
    """Return what the JSON Schema says of a value that is one of these; reading accepts others."""
    return Meta(extra_json_schema={"enum": list(values)})
