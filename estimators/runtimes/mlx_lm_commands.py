"""Commands of mlx-lm's programs, with flags that their argument parsers have.

Source: mlx_lm/generate.py, server.py and convert.py.
"""

import shlex

from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.workload import ServerSettings, Workload

STDIN = "-"
HOSTFILE = "hosts.json"
"""The name of mlx.launch's hostfile in commands."""
SERVER_KEEPS = 10
"""Prompt caches that mlx_lm.server keeps by default (server.py, --prompt-cache-size)."""


def option(name: str, value: str) -> list[str]:
    """Return the arguments of an option; a value that starts with a dash needs NAME=VALUE."""
    return [f"{name}={value}"] if value.startswith("-") and value != STDIN else [name, value]


def settings_flags(workload: Workload) -> list[str]:
    """Return the flags that mlx_lm.generate and mlx_lm.server share."""
    flags = ["--prefill-step-size", str(workload.prefill_step)]
    if workload.kv_bits:
        flags += ["--kv-bits", str(workload.kv_bits)]
        flags += ["--kv-group-size", str(workload.kv_group_size)]
        flags += ["--quantized-kv-start", str(workload.quantized_kv_start)]
    return flags


def server_command(model: str, workload: Workload, settings: ServerSettings) -> str:
    """Return the command that serves with these settings, and the KV cache of the workload."""
    run = replace(workload, prefill_step=settings.prefill_step)
    command = ["mlx_lm.server", *option("--model", model), *settings_flags(run)]
    command += ["--prompt-concurrency", str(settings.prompt_concurrency)]
    command += ["--decode-concurrency", str(settings.decode_concurrency)]
    command += ["--prompt-cache-size", str(settings.prompt_cache_size)]
    if settings.prompt_cache_bytes is not None:
        command += ["--prompt-cache-bytes", str(settings.prompt_cache_bytes)]
    return shlex.join(command)


def image_server_command(model: str, settings: ServerSettings) -> str:
    """Return the command of mlx_vlm.server (mlx_vlm/server/cli.py)."""
    command = ["mlx_vlm.server", *option("--model", model)]
    command += ["--prefill-step-size", str(settings.prefill_step)]
    if settings.max_num_seqs is not None:
        command += ["--max-num-seqs", str(settings.max_num_seqs)]
    command += ["--vision-cache-size", str(settings.vision_cache_size)]
    return shlex.join(command)


def together(workload: Workload, kept_caches: int) -> ServerSettings:
    """Return the settings that prefill and decode as many requests together as the workload."""
    return ServerSettings(
        prefill_step=workload.prefill_step,
        prompt_concurrency=min(workload.batch, workload.prefill_batch),
        decode_concurrency=workload.most_decoding,
        prompt_cache_size=kept_caches,
    )


def launched(command: str, rank: Rank | None) -> str:
    """Return a command of an mlx-lm program as mlx.launch starts it on the hosts of a file.

    >>> launched("mlx_lm.server --model org/name", Rank(0, 2, "pipeline"))
    'mlx.launch --hostfile hosts.json -- mlx_lm.server --model org/name --pipeline'
    """
    if rank is None:
        return command
    pipeline = " --pipeline" if rank.parallel == "pipeline" else ""
    return f"mlx.launch --hostfile {HOSTFILE} -- {command}{pipeline}"


def generate_command(model: str, workload: Workload, prompt: str) -> str:
    """Return the command that generates from one prompt.

    ``--max-tokens`` is left out when it is 0, which mlx-lm rejects.
    """
    command = ["mlx_lm.generate", *option("--model", model)]
    if workload.max_tokens:
        command += ["--max-tokens", str(workload.max_tokens)]
    command += [*option("--prompt", prompt), *settings_flags(workload)]
    if workload.max_kv_size is not None:
        command += ["--max-kv-size", str(workload.max_kv_size)]
    return shlex.join(command)


def convert_command(
    model: str, directory: str, quantization: Quantization, program: str = "mlx_lm.convert"
) -> str:
    """Return the command that quantises a model into a directory."""
    command = [program, *option("--hf-path", model), *option("--mlx-path", directory)]
    command += ["-q", "--q-bits", str(quantization.bits)]
    if quantization.mode != "affine":
        command += ["--q-mode", quantization.mode]
    elif quantization.group_size != 64:
        command += ["--q-group-size", str(quantization.group_size)]
    return shlex.join(command)


def draft_flags(model: str, tokens: int, *, is_head: bool = False) -> str:
    """Return the text that adds a draft model to a command of mlx-lm, or a head to mlx-vlm's.

    A block is what is drafted and the token before it.

    >>> draft_flags("org/small", 3)
    ' --draft-model org/small --num-draft-tokens 3'
    >>> draft_flags("org/head", 3, is_head=True)
    ' --draft-model org/head --draft-block-size 4'
    """
    many = ("--draft-block-size", tokens + 1) if is_head else ("--num-draft-tokens", tokens)
    return " " + shlex.join([*option("--draft-model", model), *map(str, many)])
