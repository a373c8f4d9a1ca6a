"""Every fault of the Hub gives a one-line error, after a limited number of attempts."""

import socket
import time

import pytest

from memfit.estimators.base.errors import CheckpointError, MemfitError, UnreachableError
from tests.hub.conftest import NAME, Reader
from tests.hub.server import TOKEN, FakeHub, Fault

PATIENCE_SECONDS = 60  # far below what the server asks for, far above what a busy machine takes

SHARD = "model-00002-of-00003"


def fault_of(read: Reader, kind: type[MemfitError], name: str = NAME) -> str:
    with pytest.raises(kind) as caught:
        read(name, timeout=0.3)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert line.startswith(NAME)
    assert TOKEN not in line
    return line


def asked(hub: FakeHub, part: str) -> int:
    return sum(part in made.path for made in hub.made)


def test_a_missing_repository_may_be_private(read: Reader, hub: FakeHub) -> None:
    del hub.repos[NAME]
    line = fault_of(read, UnreachableError)
    assert "no such repository" in line
    assert "HF_TOKEN" in line


def test_a_signed_in_user_gets_a_missing_repository_error(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    del hub.repos[NAME]
    assert "check the name" in fault_of(read, CheckpointError)


def test_a_private_repository_needs_a_token(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].private = True
    assert "a private one" in fault_of(read, UnreachableError)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read().shards == 3


def test_a_gated_repository_gives_the_address_of_its_terms(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].gated = True
    line = fault_of(read, UnreachableError)
    assert f"accept its terms on {hub.endpoint}/{NAME}" in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read().shards == 3


@pytest.mark.parametrize("token", ["hf_expired", "hf_nö", "hf_two\nlines"])
def test_a_rejected_token_is_never_printed(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(MemfitError, match="token") as caught:
        read()
    assert token[3:] not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_wrong_revision_is_bad_input(read: Reader) -> None:
    line = fault_of(read, CheckpointError, f"{NAME}@v9")
    assert "has no such revision" in line


def test_denied_access_is_not_retried(read: Reader, hub: FakeHub) -> None:
    headers = {"X-Error-Message": "Your token lacks\r\n a permission"[:16]}
    hub.faults = [Fault("/api/models", "status", 403, headers)]
    line = fault_of(read, UnreachableError)
    assert "access is refused (403: Your token lacks)" in line
    assert asked(hub, "/api/models") == 1


@pytest.mark.parametrize("status", [400, 410, 418, 451])
def test_any_other_http_error_gives_its_status(read: Reader, hub: FakeHub, status: int) -> None:
    hub.faults = [Fault("/api/models", "status", status)]
    assert f"answered {status}" in fault_of(read, UnreachableError)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("where", ["/api/models", SHARD])
def test_a_temporary_fault_is_retried(read: Reader, hub: FakeHub, where: str, status: int) -> None:
    hub.faults = [Fault(where, "status", status, {"Retry-After": "0"}, times=2)]
    assert read().shards == 3


def test_a_permanent_fault_ends_after_three_attempts(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/api/models", "status", 503, {"Retry-After": "0"})]
    line = fault_of(read, UnreachableError)
    assert "answered 503, 3 times" in line
    assert asked(hub, "/api/models") == 3


def test_a_short_retry_after_is_respected(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/api/models", "status", 429, {"Retry-After": "1"}, times=1)]
    started = time.monotonic()
    assert read().shards == 3
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "3600"},
        {"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"},
        {"RateLimit": '"api";r=0;t=287'},
        {"Retry-After": "9" * 5000},
    ],
)
def test_a_long_retry_after_is_reported_without_waiting(
    read: Reader, hub: FakeHub, headers: dict[str, str]
) -> None:
    hub.faults = [Fault("/api/models", "status", 429, headers)]
    started = time.monotonic()
    assert "it asks to wait" in fault_of(read, UnreachableError)
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert asked(hub, "/api/models") == 1


def test_a_silent_server_times_out(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/api/models", "stall")]
    started = time.monotonic()
    assert "did not answer within 0.3 s, 3 times" in fault_of(read, UnreachableError)
    assert time.monotonic() - started < PATIENCE_SECONDS


@pytest.mark.parametrize("kind", ["drip", "continue"])
@pytest.mark.parametrize("where", ["/api/models", SHARD])
def test_headers_without_an_end_are_given_up(
    read: Reader, hub: FakeHub, where: str, kind: str
) -> None:
    hub.faults = [Fault(where, kind)]
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:[0-9]+ took longer than 0\.3 s$"):
        read(timeout=0.2, longest=0.3)
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert asked(hub, where) == 1


def test_attempts_and_pauses_share_one_deadline(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/api/models", "status", 503, {"Retry-After": "5"})]
    with pytest.raises(UnreachableError, match="answered 503"):
        read(longest=1)
    assert asked(hub, "/api/models") == 1


def test_a_closed_port_is_unreachable(read: Reader, hub: FakeHub) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        hub.endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert "cannot be reached" in fault_of(read, UnreachableError)


@pytest.mark.parametrize("endpoint", ["", "huggingface.co", "ftp://host", "http://[", "http://"])
def test_an_invalid_endpoint_is_reported(read: Reader, hub: FakeHub, endpoint: str) -> None:
    hub.endpoint = endpoint
    fault_of(read, UnreachableError)


@pytest.mark.parametrize("kind", ["drop", "short"])
@pytest.mark.parametrize("where", ["config.json", SHARD, "/api/models"])
def test_a_truncated_response_is_fetched_again(
    read: Reader, hub: FakeHub, where: str, kind: str
) -> None:
    hub.faults = [Fault(where, kind, times=1)]
    assert read().shards == 3


def test_a_connection_reset_is_retried_and_then_reported(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("index.json", "reset", times=1)]
    assert read().shards == 3
    hub.faults = [Fault("/resolve/", "drop")]
    read.cache.clear()
    assert "cannot be reached" in fault_of(read, UnreachableError)


def test_a_response_that_ignores_range_is_closed_after_the_header(
    read: Reader, hub: FakeHub
) -> None:
    hub.faults = [Fault("", "no-range")]
    checkpoint = read()
    assert checkpoint.file_bytes > 1_700_000_000
    weights = [request for request in read.reports.requests if "//model" in request.url]
    assert {request.status for request in weights if request.nbytes} == {200}
    assert sum(request.nbytes for request in weights) <= checkpoint.header_bytes + 3 * 128_000


def test_a_length_other_than_the_listed_one_is_rejected(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault(SHARD, "other-length")]
    assert f"{SHARD}.safetensors: its length is" in fault_of(read, UnreachableError)


def test_a_login_portal_is_not_mistaken_for_the_hub(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/api/models", "garbage")]
    assert "is not a listing" in fault_of(read, UnreachableError)


@pytest.mark.parametrize("where", ["config.json", "index.json"])
def test_content_that_differs_from_the_listing_is_rejected(
    read: Reader, hub: FakeHub, where: str
) -> None:
    hub.faults = [Fault(where, "garbage")]
    assert "is not the file that the Hub lists" in fault_of(read, UnreachableError)


def test_an_invalid_header_is_bad_input(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault(f"//{SHARD}", "garbage")]
    line = fault_of(read, CheckpointError)
    assert f"{NAME}/{SHARD}-of" not in line
    assert f"{SHARD}.safetensors: the header's length is" in line


def test_the_token_does_not_go_to_another_host(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    read()
    at_hub = [made for made in hub.made if made.host == "hub"]
    elsewhere = [made for made in hub.made if made.host == "files"]
    assert len(elsewhere) == 3
    assert all(made.headers["authorization"] == f"Bearer {TOKEN}" for made in at_hub)
    assert not any("authorization" in made.headers for made in elsewhere)


def test_the_token_does_not_come_back_after_another_host(
    read: Reader, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    back = {"location": f"{hub.endpoint}/stolen"}
    hub.faults = [Fault("signature=", "redirect", headers=back)]
    fault_of(read, MemfitError)
    stolen = [made for made in hub.made if made.path == "/stolen"]
    assert stolen
    assert not any("authorization" in made.headers for made in stolen)


def test_endless_redirects_are_stopped(read: Reader, hub: FakeHub) -> None:
    hub.faults = [Fault("/resolve/", "redirect", headers={"location": "?again"})]
    assert "redirects more than 5 times" in fault_of(read, UnreachableError)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://[", "gopher://x", ""])
def test_a_redirect_to_an_invalid_address_is_rejected(
    read: Reader, hub: FakeHub, location: str
) -> None:
    hub.faults = [Fault("/resolve/", "redirect", headers={"location": location})]
    fault_of(read, UnreachableError)
