"""Headers: real ones are read without their data, broken ones give a one-line error."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memfit.estimators.base.dtypes import BITS
from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.checkpoint.safetensors import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_VALUES,
    read_header,
)
from tests.sparse import Shapes, write_safetensors


def write_raw(path: Path, header: bytes, data_bytes: int = 0) -> Path:
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_bytes)
    return path


def write_json(path: Path, header: object, data_bytes: int = 0) -> Path:
    return write_raw(path, json.dumps(header).encode(), data_bytes)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EMPTY_TWICE = b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


def qwen3_4b_shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Qwen3-4B in MLX's 4-bit layout at vocab 151,669: 904 tensors, 2,262,535,712 bytes."""

    def quantised(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        group = ("BF16", (rows, columns // 64))
        packed = ("U32", (rows, columns // 8))
        return {f"{name}.weight": packed, f"{name}.scales": group, f"{name}.biases": group}

    shapes = quantised("model.embed_tokens", 151_669, 2560)
    for layer in range(36):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", 4096, 2560),
            ("self_attn.k_proj", 1024, 2560),
            ("self_attn.v_proj", 1024, 2560),
            ("self_attn.o_proj", 2560, 4096),
            ("mlp.gate_proj", 9728, 2560),
            ("mlp.up_proj", 9728, 2560),
            ("mlp.down_proj", 2560, 9728),
        ):
            shapes |= quantised(f"{at}.{name}", rows, columns)
        for name, size in (
            ("self_attn.q_norm", 128),
            ("self_attn.k_norm", 128),
            ("input_layernorm", 2560),
            ("post_attention_layernorm", 2560),
        ):
            shapes[f"{at}.{name}.weight"] = ("BF16", (size,))
    shapes["model.norm.weight"] = ("BF16", (2560,))
    return shapes


def characters_read() -> int:
    """Return the bytes that this process has requested to read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="needs Linux's /proc/self/io")
def test_only_the_header_of_a_two_gigabyte_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, qwen3_4b_shapes(), {"format": "mlx"})
    before = characters_read()
    counting_itself = characters_read() - before
    before = characters_read()
    header = read_header(path)
    assert characters_read() - before - counting_itself == header.header_bytes
    assert header.header_bytes < 200_000
    assert header.file_bytes == path.stat().st_size == 2_262_535_712 + header.header_bytes


def test_tensors_of_a_real_layout_add_up_to_the_published_bytes(tmp_path: Path) -> None:
    # The figure of a published fine-tune of Qwen3-4B, vocabulary 151,669, 4 bits in groups of 64.
    write_safetensors(tmp_path / "model.safetensors", qwen3_4b_shapes(), {"format": "mlx"})
    header = read_header(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in header.tensors) == 2_262_535_712
    assert len(header.tensors) == 904
    assert header.metadata == {"format": "mlx"}
    assert header.tensors[0] == (
        "model.embed_tokens.weight",
        "U32",
        (151_669, 320),
        151_669 * 320 * 4,
    )


def test_mlx_and_the_header_agree_on_every_tensor(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    path = tmp_path / "model.safetensors"
    dtypes = (mx.bool_, mx.uint8, mx.int16, mx.bfloat16, mx.float32, mx.int64, mx.complex64)
    arrays = {str(dtype): mx.zeros((3, 5), dtype) for dtype in dtypes}
    mx.save_safetensors(str(path), {**arrays, "scalar": mx.array(1.0)}, {"format": "mlx"})
    header = read_header(path)
    loaded = mx.load(str(path))
    assert {t.name: (t.shape, t.nbytes) for t in header.tensors} == {
        name: (array.shape, array.nbytes) for name, array in loaded.items()
    }
    assert header.metadata == {"format": "mlx"}


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("F32", (2, 3)), "ü": ("BF16", (5,))})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        error_of(path)
    path.write_bytes(whole + b"\0")
    assert error_of(path) == "1 bytes at the end belong to no tensor"


@pytest.mark.parametrize(
    ("length", "fault"),
    [
        (0, "the header's length is 0"),
        (93, "the header should be 93 bytes, but the file has only 100"),
        (MAX_HEADER_BYTES + 1, "above the format's limit of 100000000"),
        (2**64 - 1, "above the format's limit of 100000000"),
    ],
)
def test_an_impossible_header_length_is_rejected(tmp_path: Path, length: int, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b" " * 92)
    assert fault in error_of(path)


def test_a_header_cut_inside_a_character_is_rejected(tmp_path: Path) -> None:
    text = '{"é'.encode()[:-1]
    assert error_of(write_raw(tmp_path / "m", text)) == "the header is not UTF-8 at byte 2"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"{", "the header is not JSON at character 1"),
        (b"[]", "the header is not a JSON object"),
        (b"null", "the header is not a JSON object"),
        (b"{} {}", "the header is not JSON at character 3"),
        (b"\xef\xbb\xbf{}", "the header is not JSON at character 0"),
        (EMPTY_TWICE, "the header has the name 'a' twice"),
        (b'{"a": {"dtype": 1, "dtype": 1}}', "the header has the name 'dtype' twice"),
        (b'{"a": ' + b"[" * 100_000, "the header is nested too deeply"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "the header has a number of thousands of digits"),
        (b'{"a": 1}', "tensor 'a': is not an object"),
        (b'{"a": {}}', "tensor 'a': data_offsets are not two ascending offsets"),
        (b'{"\\ud800": null}', "tensor '\\ud800': is not an object"),
        (b'{"a\\nb": null}', "tensor 'a\\nb': is not an object"),
    ],
)
def test_a_header_that_is_not_an_object_of_tensors_is_rejected(
    tmp_path: Path, text: bytes, fault: str
) -> None:
    assert error_of(write_raw(tmp_path / "m", text)).startswith(fault)


def test_a_header_with_too_many_values_is_rejected_before_parsing(tmp_path: Path) -> None:
    text = b'{"a": [' + b"," * MAX_VALUES + b"]}"
    assert (
        error_of(write_raw(tmp_path / "m", text)) == f"the header has more than {MAX_VALUES} values"
    )


@pytest.mark.parametrize("dtype", ["F12", "f32", "BFLOAT16", "", None, 32, ["F32"], {"F32": 1}])
def test_an_unknown_dtype_is_rejected_and_never_guessed(tmp_path: Path, dtype: object) -> None:
    path = write_json(tmp_path / "m", {"a": entry(dtype=dtype)}, 8)
    assert error_of(path).startswith("tensor 'a': unknown dtype ")


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ([-2], "shape has -2 where"),
        ([True, 2], "shape has True where"),
        ([2.0], "shape has 2.0 where"),
        ([10**30], "shape has 1000000000000000000000000000000 where"),
        ([0, 10**30], "shape has 1000000000000000000000000000000 where"),
        (["2"], "shape has '2' where"),
        ([[2]], "shape has a list where"),
        ([None], "shape has a NoneType where"),
        (None, "shape is not a list"),
        (2, "shape is not a list"),
        ("2", "shape is not a list"),
        ({"0": 2}, "shape is not a list"),
        ([1] * (MAX_DIMENSIONS + 1), "shape is not a list"),
        ([3], "8 bytes of data_offsets disagree with F32 x [3]"),
        ([2**62, 2**62], "8 bytes of data_offsets disagree"),
    ],
)
def test_an_invalid_shape_is_rejected(tmp_path: Path, shape: object, fault: str) -> None:
    path = write_json(tmp_path / "m", {"a": entry(shape=shape)}, 8)
    assert error_of(path).startswith(f"tensor 'a': {fault}")


@pytest.mark.parametrize(
    "offsets",
    [None, [], [0], [0, 8, 16], [8, 0], [-8, 0], [0.0, 8.0], [False, 8], [0, 10**30], "08", {}],
)
def test_invalid_offsets_are_rejected(tmp_path: Path, offsets: object) -> None:
    path = write_json(tmp_path / "m", {"a": entry(offsets=offsets)}, 8)
    assert error_of(path) == "tensor 'a': data_offsets are not two ascending offsets"


@pytest.mark.parametrize(
    ("second", "data_bytes", "fault"),
    [
        ((4, 12), 12, "tensor 'b': overlaps the tensor before it, at offset 4"),
        ((0, 8), 8, "tensor 'b': overlaps the tensor before it, at offset 0"),
        ((16, 24), 24, "tensor 'b': leaves a hole before it, at offset 16"),
        ((8, 16), 15, "the data should be 16 bytes, but the file has only 15 of them"),
        ((8, 16), 17, "1 bytes at the end belong to no tensor"),
    ],
)
def test_tensors_with_gaps_or_overlaps_are_rejected(
    tmp_path: Path, second: tuple[int, int], data_bytes: int, fault: str
) -> None:
    header = {"a": entry(), "b": entry(offsets=second)}
    assert error_of(write_json(tmp_path / "m", header, data_bytes)).startswith(fault)


def test_a_hole_before_the_first_tensor_is_rejected(tmp_path: Path) -> None:
    path = write_json(tmp_path / "m", {"a": entry(offsets=(8, 16))}, 16)
    assert error_of(path) == "tensor 'a': leaves a hole before it, at offset 8"


@pytest.mark.parametrize("metadata", [[], "mlx", {"format": 1}, {"format": None}, 0, False])
def test_metadata_that_is_not_an_object_of_strings_is_rejected(
    tmp_path: Path, metadata: object
) -> None:
    path = write_json(tmp_path / "m", {"__metadata__": metadata})
    assert error_of(path) == "__metadata__ is not an object of strings"


def test_a_name_with_half_a_surrogate_pair_is_rejected(tmp_path: Path) -> None:
    path = write_json(tmp_path / "m", {"\ud800": entry()}, 8)
    assert error_of(path) == "a tensor's name is not valid Unicode"


def test_a_header_may_list_tensors_in_any_order(tmp_path: Path) -> None:
    header = {"b": entry(offsets=(8, 16)), "empty": entry(shape=[0], offsets=(8, 8)), "a": entry()}
    path = write_json(tmp_path / "m", header, 16)
    assert [tensor.name for tensor in read_header(path).tensors] == ["b", "empty", "a"]


def test_an_empty_tensor_may_be_listed_after_the_data_that_it_lies_before(tmp_path: Path) -> None:
    header = {"a": entry(), "empty": entry(shape=[0], offsets=(0, 0))}
    assert len(read_header(write_json(tmp_path / "m", header, 8)).tensors) == 2


def test_a_scalar_has_one_element_and_no_dimension(tmp_path: Path) -> None:
    path = write_json(tmp_path / "m", {"a": entry(shape=[], offsets=(0, 4))}, 4)
    assert read_header(path).tensors == (("a", "F32", (), 4),)


def test_values_narrower_than_a_byte_must_fill_whole_bytes(tmp_path: Path) -> None:
    four = {"a": entry("F6_E2M3", [4], (0, 3))}
    assert read_header(write_json(tmp_path / "m", four, 3)).tensors[0].nbytes == 3
    three = {"a": entry("F6_E2M3", [3], (0, 3))}
    assert "disagree" in error_of(write_json(tmp_path / "m", three, 3))


def test_a_header_without_tensors_is_valid(tmp_path: Path) -> None:
    header = read_header(write_raw(tmp_path / "m", b'{"__metadata__":null}   '))
    assert (header.tensors, header.metadata) == ((), {})
    assert header.header_bytes == header.file_bytes == 32


def test_a_git_lfs_pointer_is_reported_as_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert error_of(path).startswith(
        "is a Git LFS pointer, not the file itself; run 'git lfs pull'"
    )


def test_a_file_that_is_not_regular_is_rejected_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert error_of(pipe) == "is not a regular file"
    assert error_of(tmp_path) == "is not a regular file"
    assert error_of(Path("/dev/zero")) == "is not a regular file"


def test_links_are_followed_and_broken_ones_reported(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "blob", {"a": ("U8", (1,))})
    for link, target in (("good", "blob"), ("dead", "gone"), ("loop", "loop")):
        (tmp_path / link).symlink_to(target)
    assert len(read_header(tmp_path / "good").tensors) == 1
    assert error_of(tmp_path / "dead") == "is a broken link"
    assert error_of(tmp_path / "loop") == "is a link that leads back to itself"
    assert error_of(tmp_path / "gone") == "no such file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {})
    path.chmod(0)
    assert error_of(path) == "permission denied; make it readable first"


SHAPES = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from([name for name, bits in BITS.items() if bits % 8 == 0]),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=8,
)


@given(SHAPES)
def test_a_written_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: Shapes
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    write_safetensors(path, shapes)
    header = read_header(path)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == shapes
    assert header.header_bytes + sum(t.nbytes for t in header.tensors) == header.file_bytes


NUMBERS = st.integers(-9, 99) | st.sampled_from([True, 2.5, 10**30, 2**63])
SHORT_TEXT = st.text(max_size=3)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*BITS, "F12", None]) | SHORT_TEXT,
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
    },
)
HEADERS = st.dictionaries(SHORT_TEXT | st.just("__metadata__"), ENTRIES | NUMBERS, max_size=4)
NEARLY_HEADERS = st.builds(
    lambda header, data: len(header).to_bytes(8, "little") + header + data,
    HEADERS.map(lambda header: json.dumps(header).encode()) | st.binary(),
    st.binary(max_size=40),
)


@given(st.binary() | NEARLY_HEADERS)
@example(b"\x02" + b"\0" * 7 + b"{}")
def test_arbitrary_bytes_give_a_header_or_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    path.write_bytes(content)
    header, message = None, "none"
    try:
        header = read_header(path)
    except CheckpointError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    if header is not None:
        tensor_bytes = sum(tensor.nbytes for tensor in header.tensors)
        assert header.header_bytes + tensor_bytes == header.file_bytes == len(content)


def test_the_digest_covers_the_header_and_not_the_data(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    path = write_raw(tmp_path / "a", text, data_bytes=2)
    before = read_header(path)
    path.write_bytes(path.read_bytes()[:-2] + b"\x03\x04")
    expected = hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()
    assert before.sha256 == read_header(path).sha256 == expected
