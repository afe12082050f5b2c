"""What two hosts prove to each other, and what they tell a stranger."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_engine.multiproc.nodes import secret as secrets
from headrace_engine.multiproc.nodes.secret import NotTrusted, admit, join, read_secret

SECRET = b"0123456789abcdef"
OTHER = b"0123456789abcdeF"


def both(
    listens: Callable[[socket.socket], Any], joins: Callable[[socket.socket], Any]
) -> list[Any]:
    """What each side of a pair of sockets comes to: its result or exception."""
    ends, found = socket.socketpair(), [None, None]

    def run(index: int, side: Callable[[socket.socket], Any]) -> None:
        with ends[index]:
            try:
                found[index] = side(ends[index])
            except Exception as error:
                found[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((listens, joins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_who_knows_the_secret_is_admitted(secret: bytes) -> None:
    assert both(lambda c: admit(c, secret), lambda c: join(c, secret)) == [None, None]


@pytest.mark.parametrize("theirs", [OTHER, b"", SECRET[:-1]])
def test_another_secret_is_refused_on_both_sides(theirs: bytes) -> None:
    listens, joins = both(lambda c: admit(c, SECRET), lambda c: join(c, theirs))
    assert isinstance(listens, NotTrusted)
    assert isinstance(joins, NotTrusted)
    assert "does not know the secret" in str(listens)
    assert "HEADRACE_NODE_SECRET" in str(joins)
    assert "the same on all hosts" in str(joins)


def test_a_listener_that_admits_everybody_is_found_out() -> None:
    """It has no proof, or sends the joiner's own back."""

    def listens(connection: socket.socket) -> None:
        connection.sendall(b"headrace nodes 1" + bytes(32))
        told = b""
        while len(told) < 64:
            told += connection.recv(64)
        connection.sendall(b"\x01" + told[32:])

    _, joins = both(listens, lambda c: join(c, SECRET))
    assert isinstance(joins, NotTrusted)
    assert "does not know the secret of this host" in str(joins)


def test_who_joins_is_told_nothing_before_its_proof() -> None:
    """Sixteen known bytes and a number."""
    ours, theirs = socket.socketpair()

    def refuses() -> None:
        with contextlib.suppress(EOFError):
            admit(ours, SECRET)

    with ours, theirs:
        thread = threading.Thread(target=refuses)
        thread.start()
        assert len(theirs.recv(1000)) == 48
        theirs.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_proof_is_of_one_connection() -> None:
    sent: list[bytes] = []

    def listens(connection: socket.socket) -> None:
        connection.sendall(b"headrace nodes 1" + bytes(32))
        while len(b"".join(sent)) < 64:
            sent.append(connection.recv(64))

    both(listens, lambda c: join(c, SECRET))

    def again(connection: socket.socket) -> bytes:
        connection.recv(48)
        connection.sendall(b"".join(sent))
        return connection.recv(1)

    listens_now, answer = both(lambda c: admit(c, SECRET), again)
    assert isinstance(listens_now, NotTrusted)
    assert answer == b"\x00"


def test_another_service_is_no_rank_0() -> None:
    _, joins = both(
        lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4), lambda c: join(c, SECRET)
    )
    assert isinstance(joins, NotTrusted)
    assert "is not rank 0" in str(joins)


def test_secrets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file), "10.0.0.1", {}) == SECRET
    assert read_secret(None, "10.0.0.1", {secrets.VARIABLE: f" {SECRET.decode()}\n"}) == SECRET
    for address in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert read_secret(None, address, {}) == b""


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "host.example"])
def test_hosts_need_a_secret(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"HEADRACE_NODE_SECRET: holds 0 bytes.*at least 16 .*openssl"
    ):
        read_secret(None, address, {})


def test_short_and_missing_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds 5 bytes: must be .*16"):
        read_secret(None, "127.0.0.1", {secrets.VARIABLE: "short"})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "none"), "127.0.0.1", {})
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="holds 0 bytes"):
        read_secret(str(tmp_path / "empty"), "127.0.0.1", {})
