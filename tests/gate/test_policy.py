"""Policies: all mistakes are reported together, with path and line."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.dtypes import FLOAT_MODES, Quantization
from memfit.estimators.base.errors import InputError, PolicyError
from memfit.estimators.base.workload import Recipe
from memfit.estimators.gate.figures import OtherRuns
from memfit.estimators.gate.limits import LIMITS
from memfit.estimators.gate.policy import Policy, read_policy
from memfit.estimators.gate.policy_file import LimitKeys, TargetKeys, WorkloadKeys
from memfit.estimators.runtimes.registry import get_runtime

SCHEMA = Path(__file__).parents[2] / "docs" / "schema" / "policy.schema.json"
HEAD = "schema: memfit.policy/1\ntargets:\n"
TARGET = """\
  chat:
    model: models/chat
    device: m4-pro-24
    workload: {context: 4k}
    limits:
      peak: 90%
"""


def read(directory: Path, text: str) -> Policy:
    path = directory / "memfit.yaml"
    path.write_text(text, encoding="utf-8")
    return read_policy(path)


def mistakes(directory: Path, text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(PolicyError) as caught:
        read(directory, text)
    found = caught.value.mistakes
    assert {mistake.file for mistake in found} == {str(directory / "memfit.yaml")}
    return [(mistake.line, mistake.key, mistake.text) for mistake in found]


def test_a_target_has_its_own_values_and_the_defaults_of_its_runtime(tmp_path: Path) -> None:
    target = read(tmp_path, HEAD + TARGET).targets[0]
    assert (target.name, target.line, target.question.reference) == ("chat", 3, "models/chat")
    assert target.device.name == "m4-pro-24"
    assert target.question.workload.prompt_tokens == 4096
    assert target.question.runtime is None
    assert [
        (work.prefill_step, work.kv_group_size, work.quantized_kv_start, work.kv_bits)
        for work in map(target.question.workload.under, map(get_runtime, ("mlx-lm", "llama.cpp")))
    ] == [(2048, 64, 5000, None), (512, 32, 0, None)]
    assert [(limit.rule.key, limit.line) for limit in target.limits] == [("peak", 8)]


def named(of_growth: bool) -> str:
    """Return every limit with an amount of its unit, as YAML."""
    amounts = {"bytes": "12.5%", "tokens": "32k", "experts": "50%"}
    amounts |= {"buffers": "400000", "milliseconds": "10s", "misses per 1000 tokens": "2.5"}
    rules = [rule for rule in LIMITS.values() if rule.kind.is_growth is of_growth]
    return ", ".join(f"{rule.key.split('.')[-1]}: {amounts[rule.kind.unit]}" for rule in rules)


def test_every_key_is_read(tmp_path: Path) -> None:
    target = read(
        tmp_path,
        HEAD
        + """\
  all:
    quantize: 4
    margin: 2GB
    memory: 32GB
    os_regime: macos-15
    runtime: mlx-lm
    routing: routing.json
    stored_bits: 8
    training: {fine_tune_type: dora, batch_size: 2, keys: [self_attn.q_proj]}
    workload: {prompt_tokens: 1k, max_tokens: 64, batch: 2, prefill_step: 512, kv_bits: 8,
               kv_group_size: 32, quantized_kv_start: 0, max_kv_size: 8k}
    limits: {basis: exact,
"""
        + f"             {named(False)}, growth: {{{named(True)}}}}}\n",
    ).targets[0]
    work = target.question.workload
    assert (work.prompt_tokens, work.max_tokens, work.batch, work.prefill_step) == (
        1024,
        64,
        2,
        512,
    )
    assert (work.kv_bits, work.kv_group_size) == (8, 32)
    assert (work.quantized_kv_start, work.max_kv_size) == (0, 8192)
    assert target.device.working_set_bytes != 26_800_603_136  # macOS 26's
    assert {limit.rule.key for limit in target.limits} == set(LIMITS)
    assert target.basis is not None
    assert (target.basis.least, target.question.reference) == ("exact", "")
    assert (target.question.quantize, target.margin_bytes) == (Quantization(4, 64), 2 * 10**9)
    assert target.others == OtherRuns(Path("routing.json"), restores=True, stored_bits=8)
    assert target.training == Recipe(
        fine_tune_type="dora", batch_size=2, keys=("self_attn.q_proj",)
    )


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_a_mode_of_floating_point_numbers_is_a_format(mode: str, tmp_path: Path) -> None:
    target = read(tmp_path, f"{HEAD}{TARGET}    quantize: {mode}\n").targets[0]
    assert target.question.quantize == Quantization(*FLOAT_MODES[mode], mode)


def test_eight_mistakes_are_reported_together_in_file_order(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        """\
schema: memfit.policy/1
targets:
  chat:
    model: 7
    device: m9-max-64
    workload:
      context: 4k
      batch: 0
      kv_bits: 7
    limits:
      peak: 90
      contekst: 4k
  chat:
    model: again
  code:
    device: m4-max-64
    memory: 64GB
    workload: {context: 4k}
    limits: {}
""",
    )
    assert [(line, key) for line, key, _ in found] == [
        (4, "targets.chat.model"),
        (5, "targets.chat.device"),
        (8, "targets.chat.workload.batch"),
        (9, "targets.chat.workload.kv_bits"),
        (11, "targets.chat.limits.peak"),
        (12, "targets.chat.limits.contekst"),
        (13, "targets.chat"),
        (17, "targets.code.memory"),
        (19, "targets.code.limits"),
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", (1, "", "expected a mapping")),
        ("targets: {}\n", (1, "", "expected memfit.policy/1")),
        (HEAD.replace("/1", "/2") + TARGET, (1, "schema", "expected memfit.policy/1")),
        (HEAD, (2, "targets", "expected a mapping")),
        ("schema: memfit.policy/1\ntargets: {}\n", (2, "targets", "name at least one target")),
        (HEAD + "  a b: {}\n", (3, "targets.a b", "a target's name")),
        (HEAD + "  chat: []\n", (3, "targets.chat", "expected a mapping")),
        (HEAD + TARGET.replace("m4-pro-24", "m4-pro-25"), (5, "targets.chat.device", "was sold")),
        (
            HEAD + TARGET.replace("device: m4-pro-24", "memory: 64"),
            (5, "targets.chat.memory", "64"),
        ),
        (HEAD + TARGET.replace("{context: 4k}", "{}"), (6, "targets.chat.workload", "give either")),
        (
            HEAD + TARGET.replace("{context: 4k}", "{context: 4k, max_tokens: 4}"),
            (6, "targets.chat.workload.max_tokens", "excludes"),
        ),
        (
            HEAD + TARGET.replace("{context: 4k}", "{context: 1k, kv_group_size: 48}"),
            (6, "targets.chat.workload.kv_group_size", "KV group size"),
        ),
        *(
            (
                f"{HEAD}{TARGET}    quantize: {value}\n",
                (9, "targets.chat.quantize", "expected bits such as 4, or mxfp4, nvfp4, mxfp8"),
            )
            for value in ("fp4", "true", "4.5", "[4]", "affine")
        ),
        (HEAD + TARGET + "    quantize: 7\n", (9, "targets.chat.quantize", "no such format")),
        (HEAD + TARGET + "    margin: 2\n", (9, "targets.chat.margin", "a size such as 24GB")),
        (HEAD + TARGET.replace("90%", "-1%"), (8, "targets.chat.limits.peak", "90% or 16GB")),
        (HEAD + TARGET.replace("90%", "16G"), (8, "targets.chat.limits.peak", "16G")),
        (HEAD + TARGET.replace("90%", "yes"), (8, "targets.chat.limits.peak", "not a size")),
        *(
            (HEAD + TARGET.replace("90%", limit), (8, "targets.chat.limits.peak", "limits nothing"))
            for limit in ("100.001%", "999999%", "24.0001GiB", "999TB")
        ),
        *(
            (
                HEAD + TARGET.replace("peak: 90%", f"growth: {{{key}: {limit}}}"),
                (8, f"targets.chat.limits.growth.{key}", "limits nothing"),
            )
            for key in ("peak", "weights", "kv_per_token")
            for limit in ("1000.001%", "999999%", "999TB")
        ),
        (
            HEAD + TARGET.replace("peak: 90%", "basis: bound"),
            (7, "targets.chat.limits", "can break"),
        ),
        (
            HEAD + TARGET.replace("peak: 90%", "basis: sure"),
            (8, "targets.chat.limits.basis", "sure"),
        ),
        (HEAD + TARGET.replace("peak: 90%", "context: 0"), (8, "targets.chat.limits.context", "0")),
        (
            HEAD + TARGET.replace("peak: 90%", "expert_capacity: 8GB"),
            (8, "targets.chat.limits.expert_capacity", "64 or 50%"),
        ),
        (
            HEAD + TARGET.replace("peak: 90%", "growth: {}"),
            (7, "targets.chat.limits", "at least one limit"),
        ),
        (
            HEAD + TARGET.replace("peak:", "training_peak:"),
            (3, "targets.chat", "limits.training_peak needs training, a recipe of mlx_lm.lora"),
        ),
        *(
            (HEAD + TARGET + f"    training: {recipe}\n", (9, "targets.chat.training", words))
            for recipe, words in (
                ("{}", "nothing limits it: add limits.training_peak"),
                ("lora.yaml", "nothing limits it"),
            )
        ),
        *(
            (
                HEAD + TARGET.replace("peak:", "training_peak:") + f"    training: {recipe}\n",
                (9, "targets.chat.training", words),
            )
            for recipe, words in (
                ("lora.yaml", "expected a mapping such as {batch_size: 1}"),
                ("{batch_size: 0}", "batch_size: expected"),
                ("{optimizer: lion}", "optimizer: 'lion' is not one of the values"),
                ("{learning_rate: 1}", "learning_rate: unknown key"),
            )
        ),
        (
            HEAD + TARGET.replace("m4-pro-24", "rtx-4090").replace("peak:", "wired_limit:"),
            (8, "targets.chat.limits.wired_limit", "setting of Macs"),
        ),
    ],
)
def test_a_mistake_is_reported_with_line_and_key(
    tmp_path: Path, text: str, mistake: tuple[int, str, str]
) -> None:
    line, key, word = mistake
    found = mistakes(tmp_path, text)
    assert any(
        (line, key) == (found_line, found_key) and word in found_text
        for found_line, found_key, found_text in found
    ), found


def test_an_unknown_device_is_reported_with_suggestions(tmp_path: Path) -> None:
    ((line, key, text),) = mistakes(tmp_path, HEAD + TARGET.replace("m4-pro-24", "m4-pro-ultra"))
    assert (line, key) == (5, "targets.chat.device")
    assert "unknown machine 'm4-pro-ultra'" in text
    assert "m4-pro-24" in text


def test_the_schema_for_editors_accepts_the_policy_and_rejects_what_the_reader_does() -> None:
    check = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert check.is_valid(yaml.safe_load(HEAD + TARGET))
    changes: tuple[dict[str, Any], ...] = (
        {"memory": "16GB"},
        {"runtime": "other"},
        {"limits": {}},
        {"other": 1},
    )
    for change in changes:
        document = yaml.safe_load(HEAD + TARGET)
        document["targets"]["chat"] |= change
        assert not check.is_valid(document), change


KEYS = [name for kind in (TargetKeys, WorkloadKeys, LimitKeys) for name in kind.__struct_fields__]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["m4-pro-24", "4k", "90%", "16GB", "exact"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "x"]), inner)
    ),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_any_document_is_a_policy_or_a_list_of_mistakes(
    tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any
) -> None:
    document = {"schema": "memfit.policy/1", "targets": {"a": one, "b": other}}
    text = yaml.safe_dump(document, allow_unicode=True)
    lines: tuple[str, ...] = ()
    try:
        assert read(tmp_path_factory.getbasetemp(), text).targets
    except InputError as error:
        lines = error.lines
    assert all(len(line.splitlines()) == 1 for line in lines)
