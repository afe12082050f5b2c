"""What comes from sockets and other processes: parsed whole, or refused by name."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from headrace_core.errors import ConfigError, RequestError
from headrace_engine.weights import stream as stream_module
from headrace_engine.weights.broadcast import check_member, described
from headrace_engine.weights.extension import extended, extension_methods, load_extension
from headrace_engine.weights.messages import MAX_BYTES, TensorPlace, WeightsMessage
from headrace_engine.weights.part_limits import PartLimits
from headrace_engine.weights.plain_tensors import plain
from headrace_engine.weights.shared_memory import FOLDER, SharedWeights, read_shared
from headrace_engine.weights.stream import MAX_CLIENTS, MAX_STRANGERS, WeightStream
from headrace_engine.weights.stream_header import read_header
from headrace_engine.weights.updates import counted_up
from headrace_engine.weights.version import checked_version
from headrace_engine.weights.weight_sender import WeightSender
from headrace_engine.weights.worker import ModelWorker
from headrace_testing.waiting import wait_until

TENSOR = {"name": "w", "dtype": "float32", "shape": [2, 3], "offset": 0}

plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aZ/._ ", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("aZ/._ ", max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = st.sampled_from([*WeightsMessage.__dataclass_fields__, "other"])


@given(
    st.dictionaries(fields, plain_data | st.sampled_from(["shared_memory", "broadcast", [TENSOR]]))
)
def test_any_plain_data_is_a_message_or_refused(data: dict) -> None:
    try:
        message = WeightsMessage.parse(data)
    except RequestError:
        return
    assert all(0 <= one.offset <= MAX_BYTES for one in message.tensors)
    assert not message.given, "no plain data is a tensor"


@given(
    st.binary(max_size=64) | st.dictionaries(st.text("aZ/._ ", max_size=4), plain_data, max_size=3)
)
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


class AllGood:
    """A model that takes everything, and counts."""

    def __init__(self) -> None:
        self.values = 0

    def check_places(self, tensors: object) -> None: ...

    def check_values(self, name: str, tensor: torch.Tensor) -> None:
        self.values += 1


@pytest.fixture
def stream() -> Iterator[WeightStream]:
    stream = WeightStream(AllGood(), PartLimits(num_tensors=12, num_bytes=4000))
    yield stream
    stream.close()
    wait_until(lambda: not any("headrace-weights" in one.name for one in threading.enumerate()))


def sender(stream: WeightStream, token: str | None = None) -> WeightSender:
    return WeightSender(stream.host, stream.port, token or stream.token)


def tensors_of(stream: WeightStream) -> list[str]:
    return [name for part in stream.parts.take() for name, _ in part]


def test_no_more_than_the_model_takes_waits(stream: WeightStream) -> None:
    with sender(stream) as one:
        one.send({"a": torch.ones(900)})
        with pytest.raises(RequestError, match="must be at most 4000 together"):
            one.send({"b": torch.ones(200)})
    parts = stream.parts.take()
    with sender(stream) as one:
        one.send({"b": torch.ones(200)})
    stream.parts.give_back(parts)
    with sender(stream) as one, pytest.raises(RequestError, match="at most 4000"):
        one.send({"c": torch.ones(1)})
    assert tensors_of(stream) == ["a", "b"]
    with sender(stream) as one:
        one.send({"b": torch.ones(200)})
        with pytest.raises(RequestError, match="'b' comes twice: it waits"):
            one.send({"b": torch.ones(200)})
    with sender(stream) as one:
        one.send({"c": torch.ones(700)})  # what was refused takes no room


def test_no_more_names_than_the_model_has_wait(stream: WeightStream) -> None:
    """Of empty tensors, too, and empty parts are forgotten."""
    with sender(stream) as one:
        for index in range(3):
            one.send({})
            one.send({f"{index}.{name}": torch.ones(0) for name in "abcd"})
        with pytest.raises(RequestError, match=r"1 tensors, beside 12 .*: must be at most 12"):
            one.send({"more": torch.ones(0)})
    assert (stream.parts.num_tensors, len(stream.parts.take())) == (12, 3)
    with sender(stream) as one:
        one.send({"more": torch.ones(0)})


def headed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def place(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ABSURD = {
    "negative offsets": {"a": place([1], -4, 0)},
    "negative size": {"a": place([-1], 0, 4)},
    "overlapping": {"a": place([2], 0, 8), "b": place([2], 4, 12)},
    "a gap": {"a": place([1], 0, 4), "b": place([1], 8, 12)},
    "backwards": {"a": place([1], 4, 0)},
    "a product that overflows": {"a": place([1 << 33, 1 << 33], 0, 4)},
    "empty, and its strides overflow": {"a": place([0, 1 << 40, 1 << 40], 0, 0)},
    "empty, and a size overflows": {"a": place([0, 1 << 63], 0, 0)},
    "a size of many digits": {"a": place([int("9" * 4000)], 0, 4)},
    "offsets of many digits": {"a": place([1], int("9" * 4000), int("9" * 4000) + 4)},
    "floats": {"a": place([1.0], 0, 4)},
    "true": {"a": place([True], 0, 4)},
    "dimensions": {"a": place([1] * 65, 0, 4)},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "no object": {"a": 5},
    "more than fits": {"a": place([1 << 30], 0, 4 << 30)},
    "a name with NUL": {"a\0b": place([1], 0, 4)},
    "a name with a new line": {"a\nERROR b": place([1], 0, 4)},
    "half a character": b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "a long name": {"a" * 1001: place([1], 0, 4)},
    "no text": b"\xff\xfe{}",
    "digits": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("header", ABSURD.values(), ids=ABSURD)
def test_an_absurd_header_is_refused_and_the_listener_goes_on(
    stream: WeightStream, header: object
) -> None:
    with socket.create_connection((stream.host, stream.port), timeout=60) as connection:
        connection.sendall(stream.token.encode() + headed(header))
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answers:
            (line,) = answers.readlines()
    assert 20 < len(json.loads(line)["error"]) < 1000
    assert line.count(b"\n") == 1
    with sender(stream) as one:
        one.send({"good": torch.ones(2)})
    assert tensors_of(stream) == ["good"]


def test_what_a_check_raises_ends_its_connection_only(
    stream: WeightStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("a bug, with all that it knows")

    with sender(stream) as other:
        with monkeypatch.context() as patch:
            patch.setattr(AllGood, "check_places", wrong)
            with sender(stream) as one, pytest.raises(RequestError, match="the engine's log says"):
                one.send({"a": torch.ones(1)})
        assert "a bug" in caplog.text
        other.send({"b": torch.ones(1)})
    assert tensors_of(stream) == ["b"]


def test_strangers_hold_no_place(stream: WeightStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows the token is served at once, however many connect and say nothing."""
    strangers = [
        socket.create_connection((stream.host, stream.port), timeout=60)
        for _ in range(MAX_STRANGERS + 4)
    ]
    strangers[-1].sendall(stream.token.encode()[:-1])
    with sender(stream) as one:
        one.send({"a": torch.ones(1)})
    for stranger in strangers[:4]:
        assert stranger.recv(1) == b"", "the oldest were closed for those who came"
    monkeypatch.setattr(stream_module, "TOKEN_SECONDS", 0.05)
    late = socket.create_connection((stream.host, stream.port), timeout=60)
    assert late.recv(1) == b"", "nothing came in time"
    for stranger in (*strangers, late):
        stranger.close()
    assert tensors_of(stream) == ["a"]


def test_clients_are_counted(stream: WeightStream) -> None:
    with contextlib.ExitStack() as open_ones:
        clients = [open_ones.enter_context(sender(stream)) for _ in range(MAX_CLIENTS)]
        for index, one in enumerate(clients):
            one.send({f"t{index}": torch.ones(1)})
        with sender(stream) as more, pytest.raises(RequestError, match="8 connections send"):
            more.send({"more": torch.ones(1)})
        clients[3].send({"again": torch.ones(1)})
    assert len(tensors_of(stream)) == MAX_CLIENTS + 1


NO_WEIGHTS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse .*: must be dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "is sparse .*: must be dense"),
    "meta": (lambda: torch.empty(3, device="meta"), "device 'meta'"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized by torch",
    ),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "has dtype complex64: must be of float64"),
    "a list": (lambda: [1.0], "is a list: must be a torch tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "message"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_tensors_that_are_no_weights(stream: WeightStream, make: Any, message: str) -> None:
    """Refused by us, with what to give instead, by each of a trainer's ends."""
    tensor = make()
    with pytest.raises(RequestError, match=message):
        described({"w": tensor})
    with sender(stream) as one, pytest.raises(RequestError, match=message):
        one.send({"w": tensor})
    if FOLDER.is_dir():
        with SharedWeights() as shared, pytest.raises(RequestError, match=message):
            shared.write({"w": tensor})


def test_a_wrapped_tensor_says_what_to_give() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: object) -> None: ...

        def full_tensor(self) -> None: ...

    with pytest.raises(RequestError, match=r"is a Wrapped: must be .*: give its full_tensor\(\)"):
        plain("w", torch.ones(3).as_subclass(Wrapped))
    parameter = torch.nn.Parameter(torch.ones(3, 4).t())
    assert plain("w", parameter) is parameter


@pytest.mark.skipif(not FOLDER.is_dir(), reason="shared memory is there on Linux")
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "device", "other user's"])
def test_segments_that_are_none(kind: str, request: pytest.FixtureRequest) -> None:
    """None of them is opened: a FIFO would have the engine wait for its other end."""
    path = FOLDER / f"headrace-weights-test-{os.getpid()}"
    good = FOLDER / f"{path.name}-good"
    made = {
        "fifo": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
        "link": lambda: path.symlink_to(good),
        "device": lambda: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
        "other user's": lambda: (path.write_bytes(bytes(64)), os.chown(path, 12345, -1)),
    }
    good.write_bytes(bytes(64))
    request.addfinalizer(good.unlink)
    request.addfinalizer(lambda: path.rmdir() if kind == "folder" else path.unlink(True))
    try:
        made[kind]()
    except PermissionError:
        pytest.skip("only root makes these")
    place = TensorPlace("w", "float32", (2,))
    message = "the engine's own user" if kind == "other user's" else "must be a segment; a link"
    with pytest.raises(RequestError, match=message):
        list(read_shared(path.name, [place]))
    assert [name for name, _ in read_shared(good.name, [place])] == ["w"]


def test_limits_of_a_part() -> None:
    limits = PartLimits(num_tensors=3, num_bytes=100)
    limits.check([TensorPlace(name, "float32", (2, 3)) for name in "abc"])
    for tensors, message in (
        ([TensorPlace("a", "bool", (1,))] * 2, "'a' comes twice in one part"),
        ([TensorPlace("a", "float32", (26,))], "104 bytes in one part: must be at most 100"),
    ):
        with pytest.raises(RequestError, match=message):
            limits.check(tensors)
    limits.check_count(3)
    with pytest.raises(RequestError, match="4 in one part: must be at most 3"):
        limits.check_count(4)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a\0b",
        "host\n",
        "host name",
        "-h",
        "http://host",
        "h" * 256,
        "\u2024",
        None,
        7,
        "::1%\0",
    ],
)
def test_addresses_of_a_group(address: object) -> None:
    with pytest.raises(RequestError, match="must be a host's name or address") as caught:
        check_member(address, 1, 1, 2)
    assert caught.value.param == "master_address"
    assert str(caught.value).isprintable()
    for good in ("127.0.0.1", "::1", "fe80::1%eth0", "node-3.cluster", "localhost"):
        check_member(good, 1, 1, 2)


@pytest.mark.parametrize("version", ["", "a\0", "a\nb", "\x1b[2J", "v" * 129, "\ud800", 3])
def test_names_of_versions(version: object) -> None:
    with pytest.raises(RequestError, match="must be 1 to 128 printable characters"):
        checked_version(version)
    with pytest.raises(RequestError, match="printable"):
        WeightsMessage.parse({"source": None, "version": version})


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
