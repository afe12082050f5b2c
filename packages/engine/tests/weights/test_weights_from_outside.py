"""What comes from sockets and other processes: parsed whole, or refused by name."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from headrace_core.errors import ConfigError, RequestError
from headrace_engine.weights.extension import extended, extension_methods, load_extension
from headrace_engine.weights.messages import MAX_BYTES, TensorPlace, WeightsMessage
from headrace_engine.weights.shared_memory import FOLDER, SharedWeights, read_shared
from headrace_engine.weights.stream import WeightSender, WeightStream, read_header
from headrace_engine.weights.updates import counted_up
from headrace_engine.weights.worker import ModelWorker

TENSOR = {"name": "w", "dtype": "float32", "shape": [2, 3], "offset": 0}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aZ/._ ", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("aZ/._ ", max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = st.sampled_from([*WeightsMessage.__dataclass_fields__, "other"])


@given(st.dictionaries(fields, plain | st.sampled_from(["shared_memory", "broadcast", [TENSOR]])))
def test_any_plain_data_is_a_message_or_refused(data: dict) -> None:
    try:
        message = WeightsMessage.parse(data)
    except RequestError:
        return
    assert all(0 <= one.offset <= MAX_BYTES for one in message.tensors)
    assert not message.given, "no plain data is a tensor"


@given(st.binary(max_size=64) | st.dictionaries(st.text("aZ/._ ", max_size=4), plain, max_size=3))
def test_any_header_is_read_or_refused(header) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    try:
        tensors = read_header(data)
    except RequestError:
        return
    assert all(one.num_bytes <= MAX_BYTES for one in tensors)


def test_a_header_of_the_format() -> None:
    data = save({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2)}, {"by": "x"})
    length = int.from_bytes(data[:8], "little")
    assert {(t.name, t.dtype, t.shape) for t in read_header(data[8 : 8 + length])} == {
        ("a", "bfloat16", (3,)),
        ("b", "float32", (2, 2)),
    }


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).float(),
        torch.zeros(0, 4),
        torch.tensor(1.5),
        torch.arange(8).view(4, 2).t(),  # not contiguous
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ],
    ids=["matrix", "empty", "number", "transposed", "float8", "bool"],
)
@pytest.mark.skipif(not FOLDER.is_dir(), reason="shared memory is there on Linux")
def test_shared_memory_and_back(tensor: torch.Tensor) -> None:
    with SharedWeights() as shared:
        told = json.loads(json.dumps(shared.write({"before": torch.ones(7), "w": tensor})))
        message = WeightsMessage.parse(told)
        found = dict(read_shared(message.shared_memory, message.tensors))
        assert torch.equal(found["w"].float(), tensor.float())
        assert found["w"].dtype == tensor.dtype
        assert os.stat(FOLDER / shared.name).st_mode & 0o077 == 0, "for its user alone"
        name = shared.name
    assert not (FOLDER / name).exists()


@pytest.mark.skipif(not FOLDER.is_dir(), reason="shared memory is there on Linux")
def test_a_segment_that_is_cut_off_while_it_is_read() -> None:
    with SharedWeights() as shared:
        told = shared.write({"a": torch.ones(64), "b": torch.ones(4096)})
        reading = read_shared(shared.name, WeightsMessage.parse(told).tensors)
        assert next(reading)[0] == "a"
        os.truncate(FOLDER / shared.name, 256)
        with pytest.raises(RequestError, match="cut off meanwhile"):
            next(reading)


def test_no_more_than_the_model_takes_waits() -> None:
    stream = WeightStream(lambda name, shape, dtype: None, max_bytes=4000)
    try:
        with WeightSender(stream.host, stream.port, stream.token) as sender:
            sender.send({"a": torch.ones(900)})
            with pytest.raises(RequestError, match="must be at most 4000 together"):
                sender.send({"b": torch.ones(200)})
        assert [name for name, _ in stream.take()] == ["a"]
        with WeightSender(stream.host, stream.port, stream.token) as sender:
            sender.send({"b": torch.ones(200)})
    finally:
        stream.close()
    assert stream.take() == []
    assert "headrace-weights" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("version", "after"), [("0", "1"), ("step-9", "step-10"), ("main", "main.1"), ("a.1", "a.2")]
)
def test_a_version_counted_up(version: str, after: str) -> None:
    assert counted_up(version) == after


class Good:
    def twice(self, x: int) -> int:
        return 2 * x

    def _own(self) -> None: ...


class Bad:
    def execute(self) -> None: ...


def test_a_worker_extension() -> None:
    assert load_extension("") is None
    for spelling in (f"{__name__}:Good", f"{__name__}.Good"):
        assert load_extension(spelling) is Good
    assert extension_methods(Good) == {"twice"}
    assert issubclass(extended(ModelWorker, Good), ModelWorker)
    with pytest.raises(ConfigError, match="execute: must have other names"):
        extended(ModelWorker, Bad)
    for name, message in {
        "nowhere_at_all:X": "cannot be imported",
        "json:nothing": "cannot be imported",
        "json:dumps": "must be a class",
        "X": "package.module:Class",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load_extension(name)
        assert caught.value.field == "parallel.worker_extension_cls"


def test_places_are_numbers() -> None:
    assert TensorPlace("w", "float32", (2, 3)).num_bytes == 24
    with pytest.raises(RequestError, match=r"shape of tensor 'w' .* must be of at most"):
        WeightsMessage.parse(
            {"source": "broadcast", "tensors": [{**TENSOR, "shape": [1 << 30, 1 << 30]}]}
        )
