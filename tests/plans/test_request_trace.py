"""Files of requests: what is read, what is rejected, and the percentiles."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest, read_request_trace
from memfit.estimators.plans.context.plan import distribution, percentile


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_csv_columns_are_found_by_name(tmp_path: Path) -> None:
    text = "id, completion_tokens, prompt_tokens\r\na, 5, 10\r\nb, 0, 7\r\n"
    assert read_request_trace(write(tmp_path, "t.csv", text)) == (
        TraceRequest(10, 5),
        TraceRequest(7, 0),
    )


def test_json_lines_are_read_and_other_keys_are_ignored(tmp_path: Path) -> None:
    text = '{"prompt_tokens": 10, "completion_tokens": 5, "model": "x"}\n\n'
    assert read_request_trace(write(tmp_path, "t.jsonl", text)) == (TraceRequest(10, 5),)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.txt", "", "a request trace is a .csv or a .jsonl file"),
        ("t.csv", "", "t.csv:1: the header must name prompt_tokens and completion_tokens"),
        ("t.csv", "prompt_tokens\n1\n", "t.csv:1: the header must name"),
        ("t.csv", "prompt_tokens,prompt_tokens,completion_tokens\n", "once each"),
        ("t.csv", "prompt_tokens,completion_tokens\n", ": no requests"),
        ("t.csv", "prompt_tokens,completion_tokens\n1\n", "t.csv:2: completion_tokens: 'None'"),
        ("t.csv", "prompt_tokens,completion_tokens\n1,2\n3,x\n", "t.csv:3: completion_tokens: 'x'"),
        ("t.csv", "prompt_tokens,completion_tokens\n-1,2\n", "t.csv:2: prompt_tokens: '-1'"),
        ("t.csv", "prompt_tokens,completion_tokens\n1.5,2\n", "'1.5' is not a number of tokens"),
        ("t.csv", "prompt_tokens,completion_tokens\n0,2\n", "a prompt has at least one token"),
        ("t.csv", "prompt_tokens,completion_tokens\n" + "9" * 30 + ",2\n", "is not a number"),
        ("t.csv", 'prompt_tokens,completion_tokens\n"1,2\n', "t.csv:2: unexpected end of data"),
        ("t.jsonl", "{", "t.jsonl:1: the row is not JSON"),
        ("t.jsonl", '{"a": 1, "a": 2}', "t.jsonl:1: the row has the name 'a' twice"),
        ("t.jsonl", "[1]", "t.jsonl:1: the row is not a JSON object"),
        ("t.jsonl", '{"prompt_tokens": true, "completion_tokens": 1}', "'True' is not a number"),
        ("t.jsonl", '{"prompt_tokens": 1e3, "completion_tokens": 1}', "'1000.0' is not a number"),
        ("t.jsonl", "[" * 100_000, "more than 10000 values"),
    ],
)
def test_an_unreadable_line_is_reported_with_file_and_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_request_trace(write(tmp_path, name, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_request_trace(path)


def test_a_missing_file_gives_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        read_request_trace(tmp_path / "none.csv")


def test_percentiles_use_the_nearest_rank() -> None:
    found = distribution(range(1, 201))
    assert (found.p50, found.p90, found.p95, found.p99) == (100, 180, 190, 198)
    assert (found.mean, found.largest) == (101, 200)


@given(st.lists(st.integers(0, 2**40), min_size=1), st.integers(1, 100))
def test_a_percentile_covers_its_share_of_requests(tokens: list[int], percent: int) -> None:
    ordered = sorted(tokens)
    found = percentile(ordered, percent)
    assert found in tokens
    assert 100 * sum(value <= found for value in ordered) >= percent * len(ordered)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_csv_and_json_lines_give_the_same(requests: list[tuple[int, int]]) -> None:
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = "".join(f"{prompt},{completion}\n" for prompt, completion in requests)
        table = write(Path(folder), "t.csv", f"prompt_tokens,completion_tokens\n{rows}")
        lines = (
            json.dumps({"prompt_tokens": prompt, "completion_tokens": completion})
            for prompt, completion in requests
        )
        other = write(Path(folder), "t.jsonl", "\n".join(lines))
        assert (
            read_request_trace(table)
            == read_request_trace(other)
            == tuple(TraceRequest(*request) for request in requests)
        )
