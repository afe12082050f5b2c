"""The connector ``p2p``: engines that give blocks to each other, and strangers that ask."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.p2p import fetcher
from headrace_distributed.kv_connectors.p2p.arena import ALIGNMENT, Arena
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_distributed.kv_connectors.p2p.store import BlockStore, NoRoom
from headrace_testing.engine.kv_connectors import (
    BLOCK_BYTES,
    KVConnectorConformance,
    content_of,
    key_of,
    load,
)
from headrace_testing.waiting import wait_until

KEYS = {n: key_of(str(n)) for n in range(300)}


def made(role: str = "kv_both", **extra: Any) -> P2PConnector:
    own = {name: extra.pop(name) for name in list(extra) if name.startswith(("kv_", "engine"))}
    stated = {"kv_role": role, "kv_port": 0, "kv_buffer_size": 1 << 20}
    return P2PConnector({**stated, **own, "kv_connector_extra_config": extra})


@contextmanager
def closing(*connectors: KVConnector) -> Iterator[Any]:
    try:
        yield connectors[0] if len(connectors) == 1 else connectors
    finally:
        for connector in connectors:
            connector.close()


def fetch(
    taker: KVConnector, params: Any, *numbers: int, size: int = BLOCK_BYTES, name: str = "r"
) -> list[int]:
    """Have blocks fetched; those that came."""
    blocks = {KEYS[n]: size for n in numbers}
    wait_until(lambda: not taker.fetch(name, blocks, params), 20)
    return [n for n in numbers if load(taker, KEYS[n], size) == content_of(n, size)]


def save(connector: KVConnector, *numbers: int, size: int = BLOCK_BYTES) -> None:
    for n in numbers:
        connector.save(KEYS[n], memoryview(content_of(n, size)))


class TestP2P(KVConnectorConformance):
    def connected(self) -> Any:
        return closing(made())


def test_blocks_go_from_one_engine_to_another() -> None:
    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, *range(5))
        assert fetch(taker, giver.address(), 0, 1, 2, 7) == [0, 1, 2]
        assert not taker.contains(KEYS[0]), "what was loaded is in the cache now"
        assert fetch(taker, giver.address(), 3, 4) == [3, 4]
        assert taker.address() == {}


def test_more_blocks_than_one_question_holds() -> None:
    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, *range(300))
        assert fetch(taker, giver.address(), *range(300)) == list(range(300))


def test_peers_are_asked_one_after_the_other() -> None:
    with closing(made("kv_producer"), made("kv_producer")) as givers:
        save(givers[0], 1, 2)
        save(givers[1], 3)
        peers = [f"127.0.0.1:{one.address()['remote_port']}" for one in givers]
        with closing(made("kv_consumer", peers=peers)) as taker:
            assert fetch(taker, {}, 1, 2, 3, 4) == [1, 2, 3]


def test_a_block_of_another_size_is_not_sent() -> None:
    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, 1)
        assert fetch(taker, giver.address(), 1, size=BLOCK_BYTES * 2) == []


def test_a_request_names_no_address_that_is_not_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with closing(made("kv_producer"), made("kv_consumer", peers=["127.0.0.1:1"])) as (giver, taker):
        save(giver, 1)
        assert fetch(taker, giver.address(), 1) == []
        assert "none of the peers" in caplog.text
    with closing(made("kv_consumer")) as taker:
        assert not taker.fetch("r", {KEYS[1]: 9}, {"remote_host": "10.0.0.1", "remote_port": 80})


def test_another_engine_at_the_same_address_is_not_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(made("kv_producer", engine_id="b"), made("kv_consumer")) as (giver, taker):
        save(giver, 1)
        assert fetch(taker, {**giver.address(), "remote_engine_id": "a"}, 1) == []
        assert "the engine there is 'b', not 'a'" in caplog.text


def test_who_is_away_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(made("kv_consumer")) as taker, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = {"remote_host": "127.0.0.1", "remote_port": nobody.getsockname()[1]}
        assert fetch(taker, away, 1) == []
        asked: list[object] = []
        monkeypatch.setattr(fetcher.Peers, "fetch", lambda *args: asked.append(args))
        assert fetch(taker, away, 1) == []
        assert not asked


def test_a_giver_that_comes_back_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "REST_SECONDS", 0.0)
    with closing(made("kv_consumer")) as taker:
        with closing(made("kv_producer")) as giver:
            save(giver, 1, 2)
            where = {k: v for k, v in giver.address().items() if k != "remote_engine_id"}
            assert fetch(taker, where, 1) == [1]
        assert fetch(taker, where, 2) == []
        with closing(made("kv_producer", kv_port=where["remote_port"])) as giver:
            save(giver, 2)
            assert fetch(taker, where, 2) == [2]


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(secrets.token_hex(16).encode() + b"\n")
    return path


def test_a_secret(secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    other.write_text("x" * 32)
    with closing(made("kv_producer", secret_file=str(secret_file))) as giver:
        save(giver, 1)
        with closing(made("kv_consumer", secret_file=str(secret_file))) as taker:
            assert fetch(taker, giver.address(), 1) == [1]
        for changes in ({}, {"secret_file": str(other)}):
            with closing(made("kv_consumer", **changes)) as stranger:
                assert fetch(stranger, giver.address(), 1) == []
        assert "its secret may be another" in caplog.text
        assert "asked for blocks: it has another secret" in caplog.text
    wary = made("kv_consumer", secret_file=str(secret_file))
    with closing(made("kv_producer"), wary) as (giver, _):  # who gives without it is not believed
        save(giver, 1)
        assert fetch(wary, giver.address(), 1) == []


def test_who_only_echoes_is_not_believed(
    secret_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger at a giver's address, who takes any proof and has none."""

    def pretend(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HRKV\x02" + bytes(32))
            proof = connection.recv(69, socket.MSG_WAITALL)[-32:]
            connection.sendall(proof)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=pretend, args=(listening,), daemon=True).start()
        where = {"remote_host": "127.0.0.1", "remote_port": listening.getsockname()[1]}
        with closing(made("kv_consumer", secret_file=str(secret_file))) as taker:
            assert fetch(taker, where, 1) == []
        assert "it has another secret" in caplog.text


class Between:
    """Passes bytes on between an engine that asks and one that gives, and changes the answers."""

    def __init__(self, port: int, change: Callable[[bytes, int], bytes | None]) -> None:
        self._port, self._change = port, change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.where = {"remote_host": "127.0.0.1", "remote_port": self._listening.getsockname()[1]}
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *reason: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # it closed meanwhile: who asked learns so in the same way
                client.close()
                continue
            for source, sink, change in (
                (client, server, lambda data, _: data),
                (server, client, self._change),
            ):
                threading.Thread(
                    target=self._pump, args=(source, sink, change), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, change: Any) -> None:
        passed = 0
        while True:
            try:
                data = source.recv(1 << 16)
                passed += len(data)
                changed = change(data, passed) if data else None
                if changed is None:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(changed)
            except OSError:
                return


def _flip(data: bytes, passed: int) -> bytes:
    """Change a byte within the first block."""
    start = passed - len(data)
    at = 300 - start
    if 0 <= at < len(data):
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data


def _cut(data: bytes, passed: int) -> bytes | None:
    return data if passed < 400 else None


def _silent(data: bytes, passed: int) -> bytes:
    return data if passed < 140 else b""


@pytest.mark.parametrize("change", [_flip, _cut, _silent])
def test_what_is_damaged_cut_off_or_late_is_not_there(
    change: Callable[[bytes, int], bytes | None],
) -> None:
    with closing(made("kv_producer"), made("kv_consumer", fetch_timeout=1.0)) as (giver, taker):
        save(giver, *range(4))
        with Between(giver.address()["remote_port"], change) as between:
            assert fetch(taker, between.where, *range(4)) == []
        assert fetch(taker, giver.address(), *range(4), name="s") == list(range(4))


def test_late_blocks_of_one_request_do_not_hold_another_up() -> None:
    with closing(made("kv_producer"), made("kv_consumer", fetch_timeout=60.0)) as (giver, taker):
        save(giver, *range(4))
        with Between(giver.address()["remote_port"], _silent) as between:
            assert taker.fetch("slow", {KEYS[0]: BLOCK_BYTES}, between.where)
            assert fetch(taker, giver.address(), 1, 2) == [1, 2]
            assert taker.fetch("slow", {KEYS[0]: BLOCK_BYTES}, between.where)
            taker.forget("slow")


def _greet(port: int) -> socket.socket:
    asking = socket.create_connection(("127.0.0.1", port), 10)
    asking.settimeout(10)
    assert asking.recv(37, socket.MSG_WAITALL).startswith(b"HRKV\x02")
    return asking


def _ended(asking: socket.socket) -> bool:
    try:
        return asking.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n" + b"\r\n" * 40,
        b"HRKV\x02" + bytes(64),
        b"HRKV\x01" + bytes(64),
        b"\x80\x04" + bytes(100),
    ],
)
def test_strangers_get_nothing(said: bytes) -> None:
    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, 1)
        with _greet(giver.address()["remote_port"]) as asking:
            asking.sendall(said)
            assert _ended(asking)
        assert fetch(taker, giver.address(), 1) == [1]


def test_lengths_are_not_believed() -> None:
    """A frame that says it has 4 GB ends the connection before any of it is read."""
    from headrace_distributed.kv_connectors.p2p.channel import open_as_client

    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, 1)
        port = giver.address()["remote_port"]
        with socket.create_connection(("127.0.0.1", port), 10) as asking:
            open_as_client(asking, b"", time.monotonic() + 10)
            asking.settimeout(10)
            asking.sendall(struct.pack("<BI", 1, 0xFFFFFFFF))
            assert _ended(asking)
        assert fetch(taker, giver.address(), 1) == [1]


def test_an_engine_with_another_way_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    from headrace_distributed.kv_connectors.p2p import peer

    with closing(made("kv_producer"), made("kv_consumer")) as (giver, taker):
        save(giver, 1)
        original, peer.TCP = peer.TCP, "pigeon"
        try:
            assert fetch(taker, giver.address(), 1) == []
        finally:
            peer.TCP = original
        assert "gives its blocks away by 'tcp', not b'pigeon'" in caplog.text


def test_blocks_are_forgotten_in_time_and_for_room() -> None:
    now = [0.0]
    store = BlockStore(4 * BLOCK_BYTES, 10.0, lambda: now[0])
    save(store, 0, 1, 2, 3)
    assert store.contains(KEYS[0])
    save(store, 4)
    assert [n for n in range(5) if store.contains(KEYS[n])] == [0, 2, 3, 4]
    now[0] = 9.0
    assert store.contains(KEYS[3])
    now[0] = 11.0
    assert [n for n in range(5) if store.contains(KEYS[n])] == [3]
    now[0] = 30.0
    assert not store.contains(KEYS[3])
    assert store.arena.num_free == 4 * BLOCK_BYTES


def test_memory_that_is_read_is_not_given_to_others() -> None:
    store = BlockStore(2 * BLOCK_BYTES, 10.0)
    save(store, 0, 1)
    slots = [store.pin(KEYS[n]) for n in (0, 1)]
    with pytest.raises(NoRoom, match="no room for a block of 512 bytes"):
        save(store, 2)
    store.discard(KEYS[0])
    assert slots[0] is not None
    assert bytes(store.view(slots[0])) == content_of(0)
    store.unpin(slots[0])
    save(store, 2)
    assert store.contains(KEYS[1]), "it is still read"
    assert store.contains(KEYS[2])
    with pytest.raises(NoRoom):
        store.save(KEYS[9], memoryview(bytes(3 * BLOCK_BYTES)))
    assert store.contains(KEYS[2])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_pieces_of_an_arena_do_not_overlap(steps: list[tuple[bool, int]]) -> None:
    arena, taken = Arena(4096), list[tuple[int, int]]()
    for takes, number in steps:
        if takes:
            start = arena.take(number)
            if start is None:
                continue
            assert start % ALIGNMENT == 0
            assert start + number <= 4096
            assert all(start + number <= s or s + n <= start for s, n in taken)
            taken.append((start, number))
        elif taken:
            arena.give_back(*taken.pop(number % len(taken)))
    for piece in taken:
        arena.give_back(*piece)
    assert arena.take(4096) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, r"extra_config.colour = 1: must be left out: there are peers"),
        ({"peers": "a:1"}, r"peers = 'a:1': must be a list of host:port"),
        ({"peers": ["a"]}, r"peers = 'a': must be host:port"),
        ({"peers": ["far.example:80"]}, r"secret_file = None: must be given with the address 'far.ex"),
        ({"kv_ip": "0.0.0.0"}, r"secret_file = None: must be given with the address '0.0.0.0'"),
        ({"secret_file": "/proc/none"}, r"secret_file = '/proc/none': must be a file with a secret"),
        ({"secret_file": "/dev/null"}, r"must be a file with a secret of 16 to 4096 bytes"),
        ({"keep_seconds": 0}, r"keep_seconds = 0: must be seconds, above 0"),
        ({"fetch_timeout": "1"}, r"fetch_timeout = '1': must be seconds"),
        ({"num_workers": 0}, r"num_workers = 0: must be 1 to 64"),
        ({"kv_ip": "192.0.2.1", "secret_file": "FILE"}, r"kv_port = 0: must be free at 192.0.2.1"),
        ({"kv_ip": "0.0.0.0", "secret_file": "FILE"}, r"advertised_host = None: must be given with"),
        ({"engine_id": "x" * 256}, r"engine_id = .*: must be at most 255 bytes"),
    ],
)  # fmt: skip
def test_wrong_settings(changes: dict[str, Any], message: str, secret_file: Path) -> None:
    changes = {k: str(secret_file) if v == "FILE" else v for k, v in changes.items()}
    with pytest.raises(ConfigError, match=message):
        made(**changes)


def test_the_buffer_must_hold_a_block() -> None:
    with closing(made("kv_producer")) as connector:
        connector.check_block(1 << 20)
        with pytest.raises(ConfigError, match="kv_buffer_size = 1048576: must be at least 1048577"):
            connector.check_block((1 << 20) + 1)
    ranks = {"rank": 1, "num_ranks": 2}
    stated = {"kv_role": "kv_consumer", "kv_port": 14579, "kv_buffer_size": 1001, **ranks}
    with closing(P2PConnector({**stated, "kv_connector_extra_config": {}})) as connector:
        connector.check_block(500)
        with pytest.raises(ConfigError, match=r"= 1001: must be at least 1002, .* each of 2 ranks"):
            connector.check_block(501)
