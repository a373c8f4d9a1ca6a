"""`--image` and `--video` on the commands: tokens, the runtime, and what is refused."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit

SAMPLES = Path(__file__).parents[2] / "sample_configs"
MODEL = "qwen3-vl-4b"


def test_an_image_adds_its_tokens_and_the_work_of_the_tower(memfit: Memfit) -> None:
    text = memfit("estimate", MODEL, "--runtime", "mlx-vlm", "--json").json
    seen = memfit("estimate", MODEL, "--image", "640x480", "--json").json
    # 640 by 480 pixels are 20 by 15 squares of 32, between two tokens of the template.
    assert seen["workload"]["images"]["tokens"] == 302
    assert seen["workload"]["prompt_tokens"] == text["workload"]["prompt_tokens"] + 302
    assert seen["runtime"]["name"] == "mlx-vlm"
    assert seen["peak_bytes"] > text["peak_bytes"]
    assert seen["components"]["workspace"]["basis"] == "bound"
    assert any("640x480: 302 of the prompt's tokens" in line for line in seen["assumptions"])
    assert any("the processor's files are missing" in line for line in seen["assumptions"])


@pytest.mark.exhaustive
def test_every_command_counts_images_alike(memfit: Memfit, tmp_path: Path) -> None:
    asked = (MODEL, "--image", "1024x768x2", "--memory", "32GB", "--json")
    estimate = memfit("estimate", *asked, "--context", "2k").json
    matrix = memfit("compare", *asked, "--matrix", "context=2k").json["matrix"]
    assert matrix["cells"][0]["peak_bytes"] == estimate["peak_bytes"]
    context = memfit("plan", "context", *asked, "--context", "2k").json
    assert context["workload"] == estimate["workload"]
    assert context["images"] == estimate["images"]
    policy = tmp_path / "memfit.yaml"
    policy.write_text(
        f"schema: memfit.policy/1\ntargets:\n  chat:\n    path: {SAMPLES / MODEL}.yaml\n"
        "    memory: 32GB\n    workload: {context: 2k, image: [1024x768x2]}\n"
        "    limits: {peak: 90%}\n"
    )
    (target,) = memfit("gate", "--policy", policy, "--format", "json").json["targets"]
    assert target["figures"]["peak_bytes"] == estimate["peak_bytes"]


@pytest.mark.exhaustive
def test_fits_leaves_out_models_that_take_no_images(memfit: Memfit) -> None:
    found = memfit("fits", "--memory", "16GB", "--image", "640x480", "--json").json
    names = {row["name"] for row in (*found["models"], *found["not_sized"])}
    assert "gemma-3-4b" in names
    assert "qwen3-0.6b" in found["without_images"]
    assert names.isdisjoint(found["without_images"])
    (row,) = (row for row in found["models"] if row["name"] == "qwen3-vl-4b")
    # The estimate with these settings says the same.
    settings = ("--quantize", str(row["weight_bits"])) if row["weight_bits"] else ()
    step = ("--prefill-step", str(row["prefill_step"]))
    about = ("estimate", "qwen3-vl-4b", "--memory", "16GB", "--image", "640x480")
    assert row["images"] == memfit(*about, *settings, *step, "--json").json["images"]


def test_plan_server_with_images_is_for_mlx_vlm_server(memfit: Memfit) -> None:
    server = ("plan", "server", MODEL, "--memory", "32GB", "--context", "1k")
    seen = (*server, "--image", "640x480", "--clients", "4")
    found = memfit(*seen, "--vision-cache-size", "3", "--json").json
    assert found["server"] == "mlx_vlm.server"
    assert "--max-num-seqs 4 --vision-cache-size 3" in found["commands"][-1]
    for arguments, problem in (
        (
            (*seen, "--prompt-cache-size", "2"),
            "--prompt-cache-size is for mlx_lm.server, which takes no",
        ),
        ((*server, "--max-num-seqs", "2"), "--max-num-seqs is for mlx_vlm.server; leave it out"),
        ((*seen, "--vision-cache-size", "0"), "--vision-cache-size 0: give from 1 to 1024"),
    ):
        run = memfit(*arguments)
        assert (run.code, run.out) == (2, "")
        assert problem in run.err


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("qwen3-4b-4bit",), 2, "a model of type qwen3 without a vision tower takes no images"),
        ((MODEL, "--runtime", "mlx-lm"), 3, "mlx-lm: what it does with images is not described"),
        ((MODEL, "--image", "0x9"), 2, "--image: 0x9 pixels: a side has from 1 to 65536 of them"),
        ((MODEL, "--image", "20x9000"), 2, "takes no side above 200 times the other"),
        ((MODEL, "--video", "4x10x10"), 2, "takes frames of at least 32 pixels a side"),
        (("gemma-3-4b", "--video", "4x99x99"), 3, "processor of this model takes no videos"),
        (("gemma-3n-e4b",), 3, "its config has no vision tower"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    arguments: tuple[str, ...], code: int, problem: str, memfit: Memfit
) -> None:
    run = memfit("estimate", *arguments, "--image", "640x480")
    assert run.code == code
    assert problem in run.err
    assert run.err.count("\n") == 1
    assert not run.out
