"""``memfit mcp``: three questions as tools of the Model Context Protocol, over stdio.

Each call runs this command line with --json in a process of its own: nothing that it prints gets
into the protocol, and no model's file ends the server. The ``mcp`` package has the protocol.
"""

import json
import os
import sys
from typing import Any

from memfit.estimators.base.errors import MachineError
from memfit.estimators.base.version import __version__

_LONGEST_SECONDS = 300
_INSTRUCTIONS = (
    "memfit computes the memory that a language model needs, from its config and the headers of its"
    " weight files. Nothing is downloaded but headers, and no code of a repository runs. Sizes are"
    " bytes. A refusal says why: do not replace it by a guess."
)


def mcp() -> None:
    """Answer fits, estimate and admit as an MCP server over stdio."""
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise MachineError(
            "the package mcp is not installed here; install memfit[mcp], such as with"
            " uvx --from 'memfit[mcp]' memfit mcp"
        ) from None
    server = MCPServer("memfit", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    for tool in (fits, estimate, admit):
        server.tool()(tool)
    server.run()


async def fits(
    memory: str = "", device: str = "", context: str = "", most: int = 10
) -> dict[str, Any]:
    """List models that fit a machine, with their weight bits, peak and longest context.

    Args:
        memory: A Mac that is sold with this memory, such as 32GB.
        device: In place of memory a machine such as m4-max-64 or rtx-4090, or host for this one.
        context: Tokens of the prompt, such as 32k.
        most: Models to return; `left_out` says how many more there are.
    """
    answer = await _answer("fits", memory=memory, device=device, context=context)
    models = answer.pop("models")
    return {**answer, "models": models[: max(0, most)], "left_out": max(0, len(models) - most)}


async def estimate(
    model: str,
    memory: str = "",
    device: str = "",
    context: str = "",
    quantize: str = "",
    kv_bits: str = "",
    batch: int = 1,
    runtime: str = "",
) -> dict[str, Any]:
    """Return the peak memory of a model, whether it fits, and the commands or settings that fit.

    `verdict` is fits, tight, exceeds, unknown or does_not_load; `actions` are what to do, the
    cheapest first. A component whose basis is bound is an upper bound.

    Args:
        model: org/name on the Hub, a local directory or file, or a name such as qwen3-8b-4bit.
        memory: A Mac that is sold with this memory, such as 32GB.
        device: In place of memory a machine such as m4-max-64 or rtx-4090, or host for this one.
        context: Tokens of the prompt, such as 32k.
        quantize: Size the model as mlx_lm.convert quantises it: 4, 8, mxfp4 ...
        kv_bits: Bits of the KV cache.
        batch: Sequences that run together.
        runtime: mlx-lm by default, llama.cpp for GGUF; vllm and others.
    """
    return await _answer(
        "estimate",
        model=model,
        memory=memory,
        device=device,
        context=context,
        quantize=quantize,
        kv_bits=kv_bits,
        batch=str(batch),
        runtime=runtime,
    )


async def admit(
    model: str,
    prompt_tokens: int,
    max_tokens: int,
    running: list[int],
    memory: str = "",
    device: str = "",
    quantize: str = "",
    prompt_cache_size: int = 10,
) -> dict[str, Any]:
    """Say whether mlx_lm.server may take one more request beside those that it is answering.

    The answer is an upper bound for all of them at any time: every request counts as long as the
    longest, and the server's prompt cache as full. `admitted` false means not decided or no; the
    plan has the flags with which the requests fit. It does not look at a running server.

    Args:
        model: org/name on the Hub, a local directory or file, or a name such as qwen3-8b-4bit.
        prompt_tokens: Tokens of the new request's prompt.
        max_tokens: Tokens that a request generates at most.
        running: Tokens of the prompts that the server is answering now.
        memory: A Mac that is sold with this memory, such as 32GB.
        device: In place of memory a machine such as m4-max-64, or host for this one.
        quantize: Size the model as mlx_lm.convert quantises it: 4, 8, mxfp4 ...
        prompt_cache_size: The server's --prompt-cache-size.
    """
    plan = await _answer(
        "server",
        model=model,
        memory=memory,
        device=device,
        quantize=quantize,
        context=str(max(prompt_tokens, *running, 1)),
        max_tokens=str(max_tokens),
        clients=str(len(running) + 1),
        prompt_cache_size=str(prompt_cache_size),
    )
    return {"admitted": plan["verdict"] in ("fits", "tight"), "plan": plan}


async def _answer(command: str, **options: str) -> dict[str, Any]:
    """Return the JSON of a command; an option without a text is left out.

    Raises:
        ToolError: for what the command refuses, with its message.
    """
    from anyio import fail_after, run_process
    from mcp.server.mcpserver.exceptions import ToolError

    # With "=", so that no value is read as an option.
    given = [f"--{name.replace('_', '-')}={text}" for name, text in options.items() if text]
    words = [sys.executable, "-m", "memfit", command, *given, "--json"]
    try:
        with fail_after(_LONGEST_SECONDS):
            # The working directory may be a model's: no module in it replaces a library.
            done = await run_process(words, check=False, env={**os.environ, "PYTHONSAFEPATH": "1"})
    except TimeoutError:
        raise ToolError(f"no answer within {_LONGEST_SECONDS} seconds") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ToolError(done.stderr.decode(errors="replace")[-2000:]) from None
    if "slug" in answer:
        raise ToolError(f"{answer['slug']}: {answer['message']}")
    return answer
