"""``memfit mcp``: its tools, called over stdio by the client of the package that it is built on."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit, validated

MACHINE = {"memory": "16GB"}
MODEL = {"model": "qwen3-8b-4bit", **MACHINE}


def session(talk: Callable[[Any], Any], folder: Path) -> Any:
    """Return what a coroutine says that gets a client of a started server."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    import anyio
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "memfit", "mcp"],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        cwd=folder,
    )

    async def run() -> Any:
        async with Client(stdio_client(server)) as client:
            return await talk(client)

    return anyio.run(run)


def called(tool: str, arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Return the structured answer of a tool, or the text of its error."""
    result = session(lambda client: client.call_tool(tool, arguments), folder)
    return (result.structured_content or {}), (result.content[0].text if result.is_error else "")


def test_three_tools_are_listed_with_what_each_argument_means(tmp_path: Path) -> None:
    tools = session(lambda client: client.list_tools(), tmp_path).tools
    assert [tool.name for tool in tools] == ["fits", "estimate", "admit"]
    for tool in tools:
        for name in tool.input_schema["properties"]:
            assert f"\n    {name}: " in tool.description.replace("\n        ", "\n    ")


def test_estimate_is_the_answer_of_the_command_line(memfit: Memfit, tmp_path: Path) -> None:
    answer, error = called("estimate", {**MODEL, "context": "4k"}, tmp_path)
    assert error == ""
    assert answer == memfit("qwen3-8b-4bit", "--memory=16GB", "--context=4k", "--json").json


def test_fits_has_the_first_models_and_says_how_many_there_are(tmp_path: Path) -> None:
    answer, error = called("fits", {**MACHINE, "most": 2}, tmp_path)
    assert (error, len(answer["models"])) == ("", 2)
    assert answer["left_out"] > 10


def test_admit_is_the_bound_of_a_server_with_one_more_client(
    memfit: Memfit, tmp_path: Path
) -> None:
    request = {**MODEL, "max_tokens": 256, "prompt_cache_size": 1}
    small, error = called("admit", {**request, "prompt_tokens": 500, "running": [1000]}, tmp_path)
    assert (error, small["admitted"]) == ("", True)
    plan = memfit(
        *("server", "qwen3-8b-4bit", "--memory=16GB", "--context=1000", "--max-tokens=256"),
        *("--clients=2", "--prompt-cache-size=1", "--json"),
    ).json
    assert validated(small["plan"]) == plan
    large, _ = called("admit", {**request, "prompt_tokens": 20_000, "running": [1000]}, tmp_path)
    assert large["admitted"] is False
    alone, _ = called("admit", {**request, "prompt_tokens": 1000, "running": []}, tmp_path)
    assert alone["plan"]["clients"] == 1


def test_admit_decides_nothing_without_a_machine_that_is_known(tmp_path: Path) -> None:
    answer, error = called(
        "admit",
        {"model": "qwen3-8b-4bit", "prompt_tokens": 1, "max_tokens": 1, "running": []},
        tmp_path,
    )
    assert error or answer["plan"]["device"] or answer["admitted"] is False


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "--output=stolen"}, "'--output=stolen'"),
        ({**MODEL, "memory": "16GB --output=stolen"}, "is not a size"),
        ({**MODEL, "quantize": "no\n--output=stolen"}, "--quantize"),
    ],
)
def test_no_argument_becomes_an_option(
    arguments: dict[str, Any], text: str, tmp_path: Path
) -> None:
    answer, error = called("estimate", arguments, tmp_path)
    assert (answer, text in error) == ({}, True)
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_answer_says_what_to_install(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    ran = memfit("mcp")
    assert (ran.code, ran.out) == (5, "")
    assert "install memfit[mcp]" in ran.err
