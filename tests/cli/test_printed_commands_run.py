"""Printed commands, run on the CPU: none takes more than is printed beside it.

A question is a small model, a workload and a budget in which some settings have to change. All
commands of its answer run as they are printed, with prompts of the length that they are for. What
is printed is compared without the margin, which is larger than these models, and with the stated
error of its workspace. Only a port, a number of steps, and the user's own files are added.
"""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from memfit.estimators.base.images import ImageSize
from memfit.estimators.base.workload import Recipe, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.arrivals import ServedRequest
from memfit.estimators.plans.train.plan import plan_train
from memfit.estimators.plans.train.question import TrainQuestion
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import Draft
from memfit.estimators.results.advice import Action
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.resolved import resolved
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.sized_model import SizedModel, error_bytes_of
from memfit.probes.training_data import read_training_data
from tests.checkpoints import RECIPES, save_checkpoint
from tests.generated.commands import read_back
from tests.plans.test_real_server import Server
from tests.printed import Parsers
from tests.probes.test_vision_runner import draw_image, save_seeing

pytest.importorskip("mlx_lm", reason="the programs are mlx-lm's")

PROGRAM = Path(__file__).with_name("measured_program.py")
PATIENCE_SECONDS = 300
MEGABYTE = 10**6
POSITIONS = 1000


class Question(NamedTuple):
    model: str
    megabytes: int
    """What fits in the working set."""
    workload: Workload
    draft: str = ""

    @property
    def name(self) -> str:
        """The parts of a test's name."""
        kv_bits, batch, reply = self.workload.kv_bits, self.workload.batch, self.workload.max_tokens
        parts = {"kv-bits": kv_bits, "batch": batch > 1, "open": not reply, self.draft: self.draft}
        return "-".join([self.model, str(self.megabytes), *(name for name in parts if parts[name])])


def text(prompt: int, reply: int = 20, **settings: Any) -> Workload:
    return Workload(prompt_tokens=prompt, max_tokens=reply, **settings)


KV8 = {"kv_bits": 8, "quantized_kv_start": 0}
QUESTIONS = [
    Question("dense", 4, text(600)),
    Question("dense", 6, text(600)),
    Question("dense", 6, text(600, **KV8)),
    Question("dense", 8, text(600)),
    Question("dense", 12, text(600)),
    Question("dense", 12, text(600, **KV8)),
    Question("dense", 20, text(300, batch=3)),
    Question("dense-4bit", 4, text(600)),
    Question("dense-4bit", 6, text(600)),
    Question("sliding", 5, text(600)),
    Question("sliding", 8, text(600)),
    Question("sliding", 12, text(600)),
    Question("sliding", 20, text(300, batch=3)),
    Question("hybrid", 6, text(600)),
    Question("hybrid", 8, text(600)),
    Question("hybrid", 20, text(600, **KV8)),
    Question("hybrid", 30, text(300, batch=3)),
    Question("state", 6, text(600)),
    Question("state", 20, text(600)),
    Question("moe", 5, text(300)),
    Question("moe", 6, text(300)),
    Question("moe", 8, text(300)),
    Question("dense", 12, text(600, reply=0)),
    Question("dense", 8, text(300), draft="dense-4bit"),
    Question("dense", 20, text(300), draft="dense-4bit"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_the_commands_of_an_answer_take_no_more_than_printed(
    question: Question, checkpoints: Path, tmp_path: Path
) -> None:
    model, draft = (checkpoint(checkpoints, each) for each in (question.model, question.draft))
    asked = sized(question, model, draft)
    ran = 0
    for action in estimate(asked, question.workload).actions:
        if "memory_bytes" in action.settings:
            continue  # another machine
        for command in action.commands:
            check(command, action, question, tmp_path)
            ran += 1
    assert ran >= 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("printed")


def checkpoint(directory: Path, name: str) -> Path | None:
    """Return a recipe's checkpoint, for prompts that run in seconds; None without a name."""
    if name and not (directory / name).exists():
        changes = {"max_position_embeddings": POSITIONS}
        save_checkpoint(directory / name, replace(RECIPES[name], changes=changes))
    return directory / name if name else None


def sized(question: Question, model: Path | None, draft: Path | str | None) -> SizedModel:
    device = Device("this host", "cpu", 2**34, question.megabytes * MEGABYTE, None, "flag")
    drafted = Draft(str(draft)) if draft else None
    return Catalog().sized(str(model), device=device, draft=drafted, margin_bytes=0)


def check(command: str, action: Action, question: Question, directory: Path) -> None:
    """Run a command with the longest prompt that it is printed for."""
    program, options = command.partition(" ")[0], Parsers().options(command)
    if program == "mlx_lm.convert":
        peak, _ = measured(command, directory)
        assert peak <= question.megabytes * MEGABYTE
        return
    model = sized(question, directory / options["model"], options["draft_model"])
    run = read_back(question.workload, options)
    if program == "mlx_lm.generate":
        longer = action.context_tokens if action.goal == "longer_prompt" else None
        run = structs.replace(run, prompt_tokens=longer or run.prompt_tokens)
        printed = model.requirement(run).peak_bytes
        assert longer or printed == action.needed_bytes
        error = error_bytes_of(model, run)
        peak = generated(command, run.prompt_tokens, run.max_tokens, directory)
    else:
        assert action.server
        clients, longer = run.batch, action.server.context_tokens
        run = structs.replace(run, prompt_tokens=longer or run.prompt_tokens, batch=1)
        moment = ServerBound(model, run, clients).moment(action.server.settings)
        printed, error = moment.needed_bytes, moment.prefill_error_bytes
        server = action.server
        assert printed == (server.context_needed_bytes if longer else server.needed_bytes)
        kept = server.settings.prompt_cache_size
        peak = served(
            command, ServedRequest(run.prompt_tokens, run.max_tokens), clients, kept, directory
        )
    assert peak <= printed + error
    assert printed <= question.megabytes * MEGABYTE


def generated(command: str, tokens: int, reply: int, directory: Path) -> int:
    """Return the peak bytes of a run with a prompt of some tokens, a digit each."""
    prompt = "7" * tokens
    peak, output = measured(command, directory, prompt)
    found = re.search(r"Prompt: (\d+) tokens", output)
    assert found
    if over := int(found[1]) - tokens:  # of the chat template
        peak, output = measured(command, directory, prompt[over:])
    assert f"Prompt: {tokens} tokens" in output
    assert f"Generation: {reply} tokens" in output
    return peak


def measured(command: str, directory: Path, given: str = "") -> tuple[int, str]:
    """Return the peak bytes of a program and its output."""
    with started(command, directory, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        output, _ = process.communicate(given, timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, command
    return int((directory / "peak").read_text()), output


@contextmanager
def started(command: str, directory: Path, **pipes: Any) -> Iterator["subprocess.Popen[str]"]:
    arguments = [sys.executable, "-u", str(PROGRAM), "peak", *shlex.split(command)]
    with subprocess.Popen(arguments, cwd=directory, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def served(command: str, request: ServedRequest, clients: int, kept: int, directory: Path) -> int:
    """Return the peak bytes of a server with one more request than it keeps, and a conversation."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tokens, reply = request.prompt_tokens, request.max_tokens
    with (
        started(f"{command} --port {port}", directory, stderr=subprocess.DEVNULL) as process,
        ThreadPoolExecutor(clients) as pool,
    ):
        server = Server(process, port)
        server.wait()
        for found in pool.map(
            partial(server.complete, (tokens, reply)), range(min(kept, 4) + clients)
        ):
            assert found == request
        # Digits of the same seed begin with the same ones.
        for length in (tokens // 2, tokens * 3 // 4, tokens):
            server.complete((length, reply), seed=-1)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)
    return int((directory / "peak").read_text())


RECIPES_OF_TRAINING = (
    (8, Recipe(num_layers=-1, batch_size=4, max_seq_length=257)),
    (8, Recipe(num_layers=2, batch_size=4, max_seq_length=257, fine_tune_type="dora", rank=4)),
    (40, Recipe(num_layers=1, batch_size=2, max_seq_length=129, fine_tune_type="full")),
    (40, Recipe(num_layers=3, max_seq_length=129, grad_checkpoint=True, optimizer="adafactor")),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("megabytes", "recipe"),
    RECIPES_OF_TRAINING,
    ids=["lora", "dora", "full", "checkpointed"],
)
def test_training_takes_no_more_than_printed(
    megabytes: int, recipe: Recipe, checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoint(checkpoints, "dense")
    assert model
    data = write_examples(tmp_path / "data", recipe.max_seq_length + 9)
    asked = sized(Question("dense", megabytes, text(1)), model, None)
    examples = read_training_data(data, model, asked.checkpoint.config, mask_prompt=False)
    plan = plan_train(asked, TrainQuestion(recipe=recipe, data=examples))
    runs = [(plan.needed_bytes, plan.commands)]
    runs += [(action.peak_bytes, action.commands) for action in plan.actions]
    for number, (printed, commands) in enumerate(runs):
        directory = tmp_path / str(number)
        directory.mkdir()
        for command in commands[:-1]:
            subprocess.run(command, shell=True, cwd=directory, check=True)
        # Every later step is like the second one: the thousand by default take no more.
        peak, _ = measured(f"{commands[-1]} --iters 5", directory)
        # A traced step is within 5 % of a real one (tests/trace/test_training.py).
        assert 100 * peak <= 105 * printed
    assert plan.actions or plan.verdict != "exceeds"


def write_examples(directory: Path, tokens: int) -> Path:
    """Write training and validation sets of equally long examples, a digit a token."""
    directory.mkdir()
    for name, count in (("train", 12), ("valid", 4)):
        line = json.dumps({"text": "7" * tokens})
        (directory / f"{name}.jsonl").write_text(f"{line}\n" * count)
    return directory


@pytest.mark.parametrize(
    ("width", "settings"),
    [
        (32, {}),
        pytest.param(160, {}, marks=pytest.mark.exhaustive),
        pytest.param(96, {"prefill_step": 64}, marks=pytest.mark.exhaustive),
    ],
    ids=["small", "large", "small-steps"],
)
def test_a_prompt_with_an_image_takes_no_more_than_printed(
    width: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("mlx_vlm")
    model = save_seeing(tmp_path / "seeing", has_code=False)
    image = draw_image(tmp_path / "image.png", width)
    asked = sized(Question("seeing", 200, text(1)), model, None)
    written = "Every byte has a reason."
    workload = WorkloadQuestion(
        prompt_tokens=len(written), max_tokens=5, image=(ImageSize(width, width),), **settings
    )
    target = resolved(asked, workload, keeps_runtime=False)
    asked, run = target.sized, target.workload
    answer = estimate(asked, run)
    action = answer.actions[0]
    [command] = action.commands
    command = command.replace("FILE", shlex.quote(str(image)))
    peak, output = measured(f"{command} --verbose --prompt {shlex.quote(written)}", tmp_path)
    assert f"Prompt: {run.prompt_tokens} tokens" in output
    assert peak <= action.needed_bytes + error_bytes_of(asked, run)
