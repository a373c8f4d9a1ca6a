"""An error as a document for programs."""

from memfit.estimators.base.units import Count
from memfit.estimators.results.result import Result


class ErrorReport(Result, frozen=True, kw_only=True, tag="memfit.error/1"):
    """What a command prints in place of its result when it fails and JSON was requested."""

    slug: str
    """What went wrong; docs/errors.md has all of them."""
    message: str
    fix: str
    """The part of the message that says what to do; empty where it says nothing."""
    exit_code: Count


def error_report(slug: str, message: str, exit_code: int) -> ErrorReport:
    """Return an error; a message says what is wrong, and after its last semicolon what to do."""
    return ErrorReport(
        slug=slug,
        message=message,
        fix=message.rpartition("; ")[2] if "; " in message else "",
        exit_code=exit_code,
    )
