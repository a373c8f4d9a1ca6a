"""The error of a refused Hub request: a wrong name, missing access, or the server.

The codes are in the header X-Error-Code (huggingface_hub/utils/_http.py, hf_raise_for_status).
"""

from memfit.estimators.base.errors import CheckpointError, MemfitError, UnreachableError
from memfit.estimators.base.files import printable


class MissingFileError(CheckpointError):
    """The repository has no such file at that revision."""


def http_error(
    status: int,
    code: str,
    message: str,
    *,
    url: str,
    repository: str,
    endpoint: str,
    has_token: bool,
) -> MemfitError:
    """Return the error of a refusing answer.

    A name the Hub does not know is bad input; without a token it answers 401 for a private
    repository and for none at all, so that one is a matter of access.
    """
    login = "log in with `hf auth login`, or set HF_TOKEN"
    other_token = "check that the token is still valid and may read this repository"
    # What helps: a token, or another one.
    way_in = other_token if has_token else login
    # Codes before status: a gated repository answers 401 or 403, as a private one does.
    if code == "GatedRepo":
        then = "then check that the token may read it" if has_token else f"then {login}"
        return UnreachableError(
            f"{repository}: is gated; accept its terms on {endpoint}/{repository}, {then}"
        )
    if code == "RevisionNotFound":
        return CheckpointError(
            f"{repository}: has no such revision; name a branch, a tag or a whole commit"
        )
    if code == "EntryNotFound":
        return MissingFileError(f"{repository}: has no file {printable(url.rpartition('/')[2])}")
    if status == 404:
        return CheckpointError(
            f"{repository}: no such repository on {endpoint}, or a private one that the token"
            " may not read; check the name"
        )
    if status == 401 and not has_token:
        return UnreachableError(
            f"{repository}: no such repository on {endpoint}, or a private one; check the name,"
            f" or {login}"
        )
    if status in (401, 403):
        what = "the token was not accepted" if status == 401 else "access is refused"
        return UnreachableError(f"{repository}: {what} ({_why(status, message)}); {way_in}")
    return UnreachableError(f"{repository}: {endpoint} answered {_why(status, message)}")


def _why(status: int, message: str) -> str:
    return f"{status}: {printable(message)}" if message else str(status)
