"""Which Hub to use, and how: huggingface-hub's settings, validated."""

import atexit
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable

if TYPE_CHECKING:
    import httpx2

_OF_CONNECTIONS = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_LONGEST_TIMEOUT_SECONDS = 3600


class Hub(Struct, frozen=True):
    """Which Hub to use, and how; the token is read with the first request."""

    endpoint: str
    """Base address of the Hub, such as https://huggingface.co."""
    snapshots: Path  # huggingface-hub's own cache of downloaded files
    offline: bool = False
    """HF_HUB_OFFLINE: no request may be made."""
    timeout_seconds: float = 10.0
    """For each step of a request: connecting, sending, and every read."""
    longest_seconds: float = 120.0
    """For a whole request, with its redirects, repeats and pauses."""


def configured_hub() -> Hub:
    """Return the Hub that HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and related variables set.

    Raises:
        InputError: when one of them cannot be read.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    # Checked first: huggingface_hub would take any text, and the first request would fail.
    if endpoint is not None and "@" in endpoint:  # messages name the endpoint
        raise InputError("HF_ENDPOINT: has a user or a password in it; put the token into HF_TOKEN")
    if endpoint is not None and not _is_address(endpoint):
        raise InputError(
            f"HF_ENDPOINT={printable(endpoint)!r}: not an address; write https://host, or unset it"
        )
    try:
        from huggingface_hub import constants
    except ValueError as error:
        # The error quotes the value, which shows the variable that has it.
        names = [name for name in _set("HF_") if repr(os.environ[name]) in str(error)]
        raise InputError(f"{', '.join(names) or 'HF_*'}: {printable(error)}") from None
    timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    if not 0 < timeout <= _LONGEST_TIMEOUT_SECONDS:
        raise InputError(f"HF_HUB_DOWNLOAD_TIMEOUT={timeout:.0f}: write seconds, from 1 to 3600")
    return Hub(
        endpoint=constants.ENDPOINT,
        snapshots=Path(constants.HF_HUB_CACHE),
        offline=constants.is_offline_mode(),
        timeout_seconds=timeout,
    )


def open_session() -> "httpx2.Client":
    """Return the process's connection, with the environment's proxies and certificates.

    It is huggingface-hub's where that is in use: a program may have given it one of its own
    (set_client_factory).

    Raises:
        InputError: when they cannot be used.
    """
    try:
        if "huggingface_hub.utils" in sys.modules:
            from huggingface_hub.utils import get_session

            shared: httpx2.Client = get_session()
            return shared
        return _own_session()
    # ImportError: a SOCKS proxy needs a package of its own.
    except (ImportError, OSError, ValueError) as error:
        names = ", ".join(_set(_OF_CONNECTIONS)) or "the proxy and certificate settings"
        raise InputError(f"no connection can be made with {names}: {printable(error)}") from None


@cache
def _own_session() -> "httpx2.Client":
    import httpcore2

    # Before httpx2 is imported, which another thread does while OpenSSL reads the certificates.
    certificates = httpcore2.default_ssl_context()
    import httpx2

    session = httpx2.Client(verify=certificates)
    atexit.register(session.close)
    return session


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _set(prefixes: str | Iterable[str]) -> list[str]:
    """Names of the environment that begin so; of proxies either case counts."""
    wanted = prefixes if isinstance(prefixes, str) else tuple(prefixes)
    return sorted(name for name in os.environ if name.upper().startswith(wanted))
