"""Several ranks on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

SMALL: dict[str, Any] = {**QWEN3_4B, "num_hidden_layers": 6, "vocab_size": 4096}
SAMPLES = Path(__file__).parents[2] / "sample_configs"
MOE = Path(__file__).parents[1] / "arch" / "cases" / "qwen3_moe.json"
HOSTS = [
    {"ssh": "big", "ips": ["10.0.0.1"], "memory": "64GB"},
    {"ssh": "small", "ips": ["10.0.0.2"], "device": "m4-pro-24"},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path, SMALL)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"backend": "ring", "hosts": HOSTS}))
    return path


@pytest.mark.parametrize(("name", "ranks"), [("hosts.json", 2), ("hosts-jaccl.json", 4)])
def test_a_sample_hostfile_is_read(memfit: Memfit, model: Path, name: str, ranks: int) -> None:
    answer = memfit("estimate", model, "--hosts", SAMPLES / "plans" / name, "--json").json
    assert len(answer["ranks"]["ranks"]) == ranks


def test_every_rank_has_its_share(memfit: Memfit, model: Path) -> None:
    one = memfit("estimate", model, "--device", "m4-pro-24", "--json").json
    two = memfit("estimate", model, "--device", "m4-pro-24", "--ranks", "2", "--json").json
    ranks = two["ranks"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert two["ranks"]["parallel"] == "tensor"
    assert two["peak_bytes"] == ranks[0]["peak_bytes"]
    assert two["needed_bytes"] == ranks[0]["needed_bytes"]
    assert ranks[0]["kv_bytes"] * 2 == one["components"]["kv"]["bytes"]
    assert "mlx.launch" in two["actions"][0]["commands"][0]
    assert "ranks" not in one


def test_one_rank_is_the_model_itself(memfit: Memfit, model: Path) -> None:
    one = memfit("estimate", model, "--json").json
    also = memfit("estimate", model, "--ranks", "1", "--json").json
    assert also["peak_bytes"] == one["peak_bytes"]


def test_unequal_machines_are_judged_by_the_split_of_the_printed_command(
    memfit: Memfit, hosts: Path
) -> None:
    arguments = ("estimate", MOE, "--hosts", hosts, "--parallel", "pipeline")
    answer = memfit(*arguments, "--json").json
    found, other = answer["ranks"], answer["ranks"]["other"]
    assert (found["even"], found["split"]) == (True, [3, 2])
    assert [rank["device"] for rank in found["ranks"]] == ["Mac with 64 GiB", "m4-pro-24"]
    assert answer["needed_bytes"] in [rank["needed_bytes"] for rank in found["ranks"]]
    assert answer["actions"][0]["commands"][0].endswith("--pipeline")
    assert (other["even"], sum(other["split"])) == (False, 5)

    def room(ranks: list[dict[str, int]]) -> int:
        return min(rank["working_set_bytes"] - rank["needed_bytes"] for rank in ranks)

    # As close as the search compares rooms.
    for n in range(1, 5):
        ranks = memfit(*arguments, "--split", f"{n},{5 - n}", "--json").json["ranks"]["ranks"]
        assert room(ranks) <= room(other["ranks"]) + 10**6
    text = memfit(*arguments).out
    assert "mlx_lm.server --pipeline" in text
    assert f"Python only: pipeline(group, {other['split']})" in text


def test_a_split_that_no_program_makes_has_no_command(memfit: Memfit, hosts: Path) -> None:
    arguments = ("estimate", MOE, "--hosts", hosts, "--parallel", "pipeline", "--split", "4,1")
    answer = memfit(*arguments, "--json").json
    assert answer["actions"][0]["commands"] == []
    assert (answer["ranks"]["other"]["even"], answer["ranks"]["other"]["split"]) == (True, [3, 2])
    assert "mlx.launch" not in memfit(*arguments).out
    served = ("plan", "server", *arguments[1:-2], "--context", "2k", "--json")
    assert memfit(*served, "--split", "4,1").json["commands"] == []
    even = memfit(*served).json
    assert even["commands"]
    assert all(each.startswith("mlx.launch ") for each in even["commands"])
    assert all(each.endswith(" --pipeline") for each in even["commands"])


def test_a_machine_that_needs_no_other_is_named(memfit: Memfit) -> None:
    sample = SAMPLES / "qwen3-next-80b-a3b-4bit.yaml"
    arguments = ("estimate", sample, "--device", "m3-ultra-96,m1-16", "--parallel", "pipeline")
    answer = memfit(*arguments, "--json")
    (alone,) = answer.json["ranks"]["alone"]
    one = memfit("estimate", sample, "--device", "m3-ultra-96", "--json").json
    assert (answer.code, answer.json["verdict"]) == (1, "exceeds")
    assert answer.json["exceeded"] == ["working_set"]
    assert (alone["device"], alone["verdict"]) == ("m3-ultra-96", one["verdict"])
    assert alone["needed_bytes"] == one["needed_bytes"]
    first, *_ = memfit(*arguments).out.split("\n\n")
    assert "m3-ultra-96 alone fits it" in " ".join(first.split())


@pytest.mark.parametrize("separator", ["again", "comma"])
@pytest.mark.parametrize(
    "option", [("--device", "m4-max-64", "m4-pro-24"), ("--memory", "64", "24")]
)
def test_machines_that_are_given_again_are_ranks(
    memfit: Memfit, model: Path, option: tuple[str, str, str], separator: str
) -> None:
    name, first, second = option
    given = (name, first, name, second) if separator == "again" else (name, f"{first},{second}")
    ranks = memfit("estimate", model, *given, "--json").json["ranks"]["ranks"]
    sizes = [rank["working_set_bytes"] for rank in ranks]
    assert sizes == [55_662_788_608, 19_069_665_280]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--ranks", "0"), 2, "--ranks 0: give from 1 to 64"),
        (("--ranks", "3"), 3, "attention heads: 32 do not divide among 3 ranks"),
        (("--ranks", "2", "--split", "3,3"), 2, "--split is of the layers of a pipeline"),
        (("--ranks", "2", "--parallel", "pipeline"), 3, "mlx-lm's class has no pipeline"),
        (("--parallel", "tensor"), 2, "--parallel needs --ranks N"),
        (("--device", "m4-pro-24,m4-pro-24", "--ranks", "4"), 2, "2 devices are named"),
        (("--device", "m4-pro-24,nothing"), 2, "nothing"),
        (("--ranks", "2", "--runtime", "mlx-swift-lm"), 3, "several ranks are described for"),
    ],
)
def test_what_cannot_run_says_why(
    memfit: Memfit, model: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    run = memfit("estimate", model, *arguments)
    assert run.code == code
    assert message in run.err
    assert run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("2,2", "--split 2,2: the sum is 4, the model has 5 layers"),
        ("5,0", "--split 5,0: every rank needs a layer"),
        ("1,2,2", "3 numbers for 2 ranks"),
        ("two", "'two': write the layers of each rank"),
    ],
)
def test_a_wrong_split_says_why(memfit: Memfit, split: str, message: str) -> None:
    run = memfit("estimate", MOE, "--ranks", "2", "--parallel", "pipeline", "--split", split)
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert message in run.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the hostfile is not JSON"),
        ("{}", "hosts: missing"),
        ('{"hosts": []}', "hosts: the list is empty"),
        ('[{"ips": []}]', "hosts[0].ssh: missing"),
        ('[{"ssh": "a", "device": "m4-pro-24"}, {"ssh": "b"}]', "host 'b' has no device"),
        ('[{"ssh": "a", "memory": "much"}]', "hosts[0].memory"),
        ('[{"ssh": "a", "memory": 24}]', "hosts[0].memory: expected a string, got 24"),
        *(
            (json.dumps([{"ssh": name, "memory": "24GB"}]), "hosts[0].ssh: ")
            for name in (
                "-oProxyCommand=touch x",
                "-l",
                "a b",
                "a;b",
                "a\n",
                "$(a)",
                "ä",
                "a" * 256,
            )
        ),
    ],
)
def test_a_wrong_hostfile_says_why(
    memfit: Memfit, tmp_path: Path, model: Path, content: str, message: str
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(content)
    run = memfit("estimate", model, "--hosts", path)
    assert (run.code, run.err.count("\n"), run.err.count(str(path))) == (2, 1, 1)
    assert message in run.err


def test_other_commands_answer_for_the_rank_with_the_least_room(
    memfit: Memfit, model: Path
) -> None:
    ranks = ("--device", "m4-pro-24", "--ranks", "2")
    needed = memfit("estimate", model, *ranks, "--json").json["needed_bytes"]
    compared = memfit("compare", model, model, *ranks, "--json").json
    assert {each["needed_bytes"] for each in compared["models"]} <= {needed}
    one = memfit("plan", "context", model, "--device", "m4-pro-24", "--json").json
    two = memfit("plan", "context", model, *ranks, "--json").json
    assert two["weights_bytes"] < one["weights_bytes"]
    assert memfit("plan", "server", model, *ranks, "--json").code == 0


def test_a_target_of_the_gate_names_ranks(memfit: Memfit, model: Path, tmp_path: Path) -> None:
    policy = tmp_path / "memfit.yaml"
    target = {
        "model": str(model),
        "device": "m4-pro-24",
        "ranks": 2,
        "workload": {"context": 4096},
        "limits": {"peak": "90%"},
    }
    policy.write_text(json.dumps({"schema": "memfit.policy/1", "targets": {"two": target}}))
    needed = memfit(
        "estimate", model, "--device", "m4-pro-24", "--ranks", "2", "--context", "4096", "--json"
    ).json["peak_bytes"]
    run = memfit("gate", "--policy", policy, "--format", "json")
    assert run.code == 0
    assert run.json["targets"][0]["figures"]["peak_bytes"] == needed


def test_machines_are_counted_and_the_command_is_given(memfit: Memfit, model: Path) -> None:
    plan = memfit("plan", "ranks", model, "--device", "m4-pro-24", "--json").json
    machines = [(each["machines"], each["parallel"]) for each in plan["choices"]]
    assert machines[:2] == [(1, None), (2, "tensor")]
    assert plan["least_machines"] == 1
    assert {each["machines"] for each in plan["impossible"] if each["parallel"] == "tensor"} == {
        3,
        6,
    }
    assert plan["choices"][1]["commands"][0].startswith("mlx.launch --hostfile hosts.json")


def test_ranks_run_the_converted_model(memfit: Memfit, model: Path) -> None:
    plan = memfit("plan", "ranks", model, "--memory", "16GB", "--quantize", "4", "--json").json
    for choice in plan["choices"]:
        convert, serve = choice["commands"]
        converted = convert.split("--mlx-path ")[1].split()[0]
        assert f"--model {converted} " in serve


def test_a_fleet_is_placed_by_best_fit(memfit: Memfit, model: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    content = {
        "schema": "memfit.fleet/1",
        "machines": [
            {"name": "large", "device": "m4-max-128"},
            {"name": "small", "device": "m4-pro-24", "count": 2},
        ],
        "models": [{"model": str(model), "context": "4k", "copies": 2}],
    }
    fleet.write_text(json.dumps(content))
    plan = memfit("plan", "ranks", "--fleet", fleet, "--json").json
    assert [each["machines"] for each in plan["placements"]] == [["small-1"], ["small-1"]]
    assert plan["placed"] == 2
    assert sum(each["machines"] for each in plan["left"]) == 3


def test_a_wrong_fleet_says_why(memfit: Memfit, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("schema: memfit.fleet/1\nmachines: []\nmodels: []\n")
    run = memfit("plan", "ranks", "--fleet", fleet)
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert "machines: 0 of them" in run.err


def test_plan_ranks_takes_a_list_of_machines(memfit: Memfit) -> None:
    named = "m3-ultra-96,m4-max-36"
    plan = memfit("plan", "ranks", "qwen3-next-80b-a3b-4bit", "--device", named, "--json").json
    on = [choice["on"] for choice in plan["choices"]]
    assert on == [["m3-ultra-96"], ["m4-max-36"], ["m3-ultra-96", "m4-max-36"]]
    big, small, both = plan["choices"]
    assert (big["verdict"], small["verdict"]) == ("fits", "exceeds")
    # Split evenly, as the printed command does it.
    assert both["commands"][-1].endswith(" --pipeline")
    assert both["weights_bytes"] < big["weights_bytes"] * 6 // 10
    assert plan["second_adds_tokens"] <= 0


def test_equal_machines_in_a_list_are_as_their_number(memfit: Memfit) -> None:
    model = ("plan", "ranks", "qwen3-next-80b-a3b-4bit", "--device")
    listed = memfit(*model, "m4-max-36,m4-max-36", "--json").json
    counted = memfit(*model, "m4-max-36", "--json").json
    two = [choice for choice in counted["choices"] if choice["machines"] == 2]
    assert [{**choice, "on": []} for choice in listed["choices"][1:]] == two


@pytest.mark.parametrize("given", ["--device=m4-max-64,m1-8", "--memory=64GB,32GB"])
def test_a_command_of_one_machine_refuses_several(memfit: Memfit, given: str) -> None:
    run = memfit("fits", given)
    assert (run.code, run.out) == (2, "")
    assert f"{given.partition('=')[0]}: give one machine" in run.err
