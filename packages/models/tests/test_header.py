from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_models.formats.header import ITEM_BYTES, read_header
from headrace_models.formats.index import INDEX, SINGLE, checkpoint_files, checkpoint_headers
from headrace_models.formats.safetensors import SafetensorsFormat

pytestmark = pytest.mark.req("SEC-22")


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def tensor(dtype: str = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = {entry.name: entry for entry in read_header(tmp_path / "x.safetensors")}
    assert entries["a"].shape == (3, 5)
    assert entries["a"].dtype == "F32"
    assert entries["b"].num_bytes == 14
    assert sum(entry.num_bytes for entry in entries.values()) == 74


def test_tensors_without_elements(tmp_path: Path) -> None:
    """The format allows them; they lie where their neighbours begin and end."""
    tensors = {"a": torch.ones(3), "b": torch.ones(0), "c": torch.ones(2, 0, 4), "d": torch.ones(1)}
    save_file(tensors, tmp_path / SINGLE)
    found = {name: each for name, each, _ in SafetensorsFormat(LoadConfig()).tensors(tmp_path)}
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "a": (3,), "b": (0,), "c": (2, 0, 4), "d": (1,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"not json", b"", "no JSON"),
        (b"[1]", b"", "no JSON object"),
        (b"[" * 100_000, b"", "no JSON"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        ({"a": 1}, b"", "'a'.*exactly dtype"),
        ({"a": {**tensor(), "more": 1}}, b"\0" * 8, "exactly dtype"),
        ({"a": tensor(dtype="F5")}, b"\0" * 8, "dtype 'F5'"),
        ({"a": {**tensor(), "dtype": ["F32"]}}, b"\0" * 8, "dtype"),
        ({"a": tensor(shape=[-2])}, b"\0" * 8, r"shape \[-2\]"),
        ({"a": tensor(shape=[True, 2])}, b"\0" * 8, "shape"),
        ({"a": tensor(shape=[0], end=8)}, b"\0" * 8, "takes 0 bytes"),
        ({"a": tensor(shape=[0, 2**60], end=0)}, b"", "each below"),
        ({"a": tensor(shape=[2.0])}, b"\0" * 8, "shape"),
        ({"a": tensor(shape=[1] * 9, end=4)}, b"\0" * 4, "at most 8"),
        ({"a": tensor(shape=[2**47, 2**47])}, b"\0" * 8, "span 8"),
        ({"a": tensor(start=8, end=0)}, b"\0" * 8, "data_offsets"),
        ({"a": tensor(start=-8, end=0)}, b"\0" * 8, "data_offsets"),
        ({"a": tensor(end=2**63)}, b"\0" * 8, "data_offsets span"),
        ({"a": tensor()}, b"\0" * 7, "truncated"),
        ({"a": tensor()}, b"\0" * 9, "the file has"),
        ({"a": tensor(start=8, end=16)}, b"\0" * 16, "gap"),
        ({"a": tensor(), "b": tensor(start=4, end=12)}, b"\0" * 12, "overlaps"),
        ({"a": tensor(), "b": tensor()}, b"\0" * 8, "overlaps"),
    ],
)  # fmt: skip
@pytest.mark.req("REL-13")
def test_lying_headers(tmp_path: Path, header: object, data: bytes, words: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(WeightsError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100, 3])
def test_header_length_beyond_the_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(WeightsError):
        read_header(write(tmp_path / "bad.safetensors", {}, length=length))


@pytest.mark.parametrize("size", range(9))
def test_files_of_a_few_bytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"\x01" * size)
    with pytest.raises(WeightsError):
        read_header(path)


numbers = st.integers(-3, 40) | st.integers() | st.floats() | st.booleans() | st.none()
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEM_BYTES, "X", 3]),
        "shape": st.lists(numbers, max_size=4) | numbers,
        "data_offsets": st.lists(numbers, max_size=3) | numbers,
    }
)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    header=st.dictionaries(st.text(max_size=3), entries | numbers, max_size=4),
    data=st.binary(max_size=60),
)
def test_generated_headers_are_read_whole_or_refused(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    path = write(tmp_path / "any.safetensors", header, data)
    size = path.stat().st_size
    try:
        found = read_header(path)
    except WeightsError:
        return
    assert sum(entry.num_bytes for entry in found) == len(data)
    end = size - len(data)
    for entry in found:
        assert entry.offset == end
        end += entry.num_bytes
    assert end == size


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(place=st.integers(0, 400), value=st.integers(0, 255))
@pytest.mark.req("F8")
def test_a_changed_byte_is_harmless_or_refused(tmp_path: Path, place: int, value: int) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(7)}, path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)
    try:
        found = read_header(path)
    except WeightsError:
        return
    assert all(entry.offset + entry.num_bytes <= len(content) for entry in found)


class TestIndex:
    def sharded(self, folder: Path, **weight_map: object) -> Path:
        save_file({"a": torch.ones(2)}, folder / "one.safetensors")
        save_file({"b": torch.ones(2)}, folder / "two.safetensors")
        names = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        return folder

    def test_files_in_order(self, tmp_path: Path) -> None:
        self.sharded(tmp_path)
        assert [path.name for path in checkpoint_files(tmp_path)] == [
            "one.safetensors",
            "two.safetensors",
        ]
        assert len(checkpoint_headers(tmp_path)) == 2

    @pytest.mark.req("SEC-21")
    @pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "", "..", 3, "a/b"])
    def test_files_elsewhere(self, tmp_path: Path, name: object) -> None:
        with pytest.raises(WeightsError, match=r"'a'.*not a plain file name"):
            checkpoint_files(self.sharded(tmp_path, a=name))

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"'a'.*'three\.safetensors' is missing"):
            checkpoint_files(self.sharded(tmp_path, a="three.safetensors"))

    def test_name_that_no_file_can_have(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"'a'.*'xxx.* is missing"):
            checkpoint_files(self.sharded(tmp_path, a="x" * 300))

    def test_tensor_that_is_not_where_the_index_says(self, tmp_path: Path) -> None:
        self.sharded(tmp_path, a="two.safetensors", b="two.safetensors")
        with pytest.raises(WeightsError, match=r"two\.safetensors.*'a'"):
            checkpoint_headers(tmp_path)

    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000]
    )
    def test_unreadable_index(self, tmp_path: Path, text: str) -> None:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(WeightsError, match="unreadable index"):
            checkpoint_files(tmp_path)

    def test_original_layout_beside_ours_is_not_read(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
        save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
        assert [path.name for path in checkpoint_files(tmp_path)] == ["weights.safetensors"]
