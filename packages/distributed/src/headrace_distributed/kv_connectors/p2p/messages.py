"""What engines say to each other about blocks: small binary messages of known length.

``HELLO`` (client): name of the way that bytes take. ``WELCOME``: the server's engine id, its place among the
engine's ranks, and what the way needs to know of its memory. ``GET``: keys, each with the bytes that its
block has. The answer is, for the way ``tcp``, a ``BLOCK`` or ``MISSING`` for each, in order; for others one
``LOCATED``, after which the client reads the server's memory itself and says ``DONE``. ``REFUSED``: why not,
before the connection ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from headrace_distributed.kv_connectors.p2p.channel import ChannelError
from headrace_distributed.kv_connectors.p2p.ranks import LAYOUT_BYTES, RankLayout
from headrace_distributed.kv_connectors.p2p.store import DIGEST_BYTES

HELLO, WELCOME, REFUSED, GET, BLOCK, MISSING, LOCATED, DONE = range(1, 9)
KEY_BYTES = 32
MAX_KEYS = 256
"""Most keys of one ``GET``."""
MAX_NAME, MAX_DESCRIPTION = 256, 1 << 20
_WANTED = struct.Struct(f"<{KEY_BYTES}sQ")
_LOCATED = struct.Struct(f"<Q{DIGEST_BYTES}s")
MAX_GET = MAX_KEYS * _WANTED.size
MAX_WELCOME = 1 + MAX_NAME + LAYOUT_BYTES + MAX_DESCRIPTION


class Wanted(NamedTuple):
    """A block that is asked for."""

    key: bytes
    num_bytes: int


class Located(NamedTuple):
    """Where a block lies in its server's memory. ``address`` 0: it has none."""

    address: int
    digest: bytes


def pack_get(wanted: Sequence[Wanted]) -> bytes:
    return b"".join(_WANTED.pack(*one) for one in wanted)


def unpack_get(payload: bytes) -> list[Wanted]:
    """Raises: ChannelError: it is no list of keys."""
    if len(payload) % _WANTED.size:
        raise ChannelError("a list of keys was cut off")
    return [Wanted(*one) for one in _WANTED.iter_unpack(payload)]


def pack_located(located: Sequence[Located]) -> bytes:
    return b"".join(_LOCATED.pack(*one) for one in located)


def unpack_located(payload: bytes, count: int) -> list[Located]:
    """Raises: ChannelError: it does not answer so many keys."""
    if len(payload) != count * _LOCATED.size:
        raise ChannelError("an answer of the wrong length")
    return [Located(*one) for one in _LOCATED.iter_unpack(payload)]


def located_bytes(count: int) -> int:
    """Length of an answer to so many keys."""
    return count * _LOCATED.size


class Welcome(NamedTuple):
    """Who answers."""

    engine_id: str
    layout: RankLayout
    description: bytes
    """Of its memory; see :meth:`RemoteMemory.describe`."""


def pack_welcome(welcome: Welcome) -> bytes:
    name = welcome.engine_id.encode()
    return bytes([len(name)]) + name + welcome.layout.pack() + welcome.description


def unpack_welcome(payload: bytes) -> Welcome:
    """Raises: ChannelError: it was cut off, or says impossible things."""
    size = payload[0] + 1 if payload else 1
    end = size + LAYOUT_BYTES
    if len(payload) < end:
        raise ChannelError("a welcome was cut off")
    name, layout = payload[1:size].decode("utf-8", "replace"), RankLayout.unpack(payload[size:end])
    if not layout.is_possible:
        raise ChannelError(
            f"a welcome of rank {layout.rank} of {layout.num_ranks} on {layout.num_stages} stages"
        )
    return Welcome(name, layout, payload[end:])
