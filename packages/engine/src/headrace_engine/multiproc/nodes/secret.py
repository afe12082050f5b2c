"""A secret that all hosts of an engine know, and how two of them prove that to each other.

Each side sends a number that the other has never seen, and gets back a keyed hash (HMAC-SHA-256, RFC 2104)
of both numbers and of the side that answers, so that no answer can be sent back as one's own. Whoever joins
answers first: a stranger learns nothing. All messages have a fixed size. What follows is not encrypted.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from headrace_core.errors import ConfigError, EngineError

VARIABLE = "HEADRACE_NODE_SECRET"
FIELD = "parallel.node_secret_file"
SHORTEST = 16
"""Bytes of a secret: who hears the proofs can try out shorter ones."""
_MAGIC = b"headrace nodes 1"
_NONCE = _PROOF = 32
_YES, _NO = b"\x01", b"\x00"
_JOINS, _LISTENS = b"joins", b"listens"


class NotTrusted(EngineError):
    """The other side does not know the secret, or is no rank of an engine."""


def read_secret(file: str | None, address: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret of a host.

    Args:
        file: whose content it is; None: the variable :data:`VARIABLE` holds it.
        address: at which ranks meet; on a loopback address there need not be a secret.

    Raises:
        ConfigError: there is none, it is too short, or the file cannot be read.
    """
    source = VARIABLE if file is None else f"{FIELD} = {file!r}"
    if file is None:
        secret = environ.get(VARIABLE, "").strip().encode()
    else:
        try:
            secret = Path(file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"{source}: cannot be read: {error.strerror}; must be a file that holds the secret",
                field=FIELD,
            ) from error
    if not secret and file is None and is_loopback(address):
        return b""
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"{source}: holds {len(secret)} bytes: must be the same secret of at least {SHORTEST} bytes on "
            f"all hosts (openssl rand -hex 32), as parallel.master_addr = {address!r} can be reached from "
            f"others; set {VARIABLE}, or --node-secret-file",
            field=FIELD,
        )
    return secret


def is_loopback(address: str) -> bool:
    """True if only this host reaches an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def admit(connection: socket.socket, secret: bytes) -> None:
    """Check who joins, then prove to be who listens. The caller bounds the time.

    Raises:
        NotTrusted: as said. OSError, EOFError: of the connection.
    """
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(_MAGIC + nonce)
    theirs = _exactly(connection, _NONCE)
    proof = _exactly(connection, _PROOF)
    if not hmac.compare_digest(proof, _proof(secret, _JOINS, nonce, theirs)):
        connection.sendall(_NO + bytes(_PROOF))
        raise NotTrusted(f"it does not know the secret ({VARIABLE}, --node-secret-file)")
    connection.sendall(_YES + _proof(secret, _LISTENS, nonce, theirs))


def join(connection: socket.socket, secret: bytes) -> None:
    """Prove to know the secret, and check that who listens does. The caller bounds the time.

    Raises:
        NotTrusted: as said. OSError, EOFError: of the connection.
    """
    if _exactly(connection, len(_MAGIC)) != _MAGIC:
        raise NotTrusted("what listens there is not rank 0 of an engine, or is of another version")
    nonce, ours = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(ours + _proof(secret, _JOINS, nonce, ours))
    admitted, proof = _exactly(connection, 1), _exactly(connection, _PROOF)
    if admitted != _YES:
        raise NotTrusted(
            f"the secret of this host is refused: {VARIABLE}, or the content of --node-secret-file, must be "
            "the same on all hosts"
        )
    if not hmac.compare_digest(proof, _proof(secret, _LISTENS, nonce, ours)):
        raise NotTrusted("what listens there does not know the secret of this host")


def _proof(secret: bytes, side: bytes, listener: bytes, joiner: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + side + listener + joiner, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise EOFError("the connection is closed")
        found += piece
    return found
