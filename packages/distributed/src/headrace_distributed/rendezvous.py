"""Where the ranks of a group find each other: an address in text, and a store of small values behind it.

An address is ``tcp://HOST:PORT/NAME``: a ``torch.distributed.TCPStore``, within which NAME keeps groups
apart. No global process group exists, so a process can be in any number of groups, which come and go
(``torch.distributed.init_process_group`` makes one for a process's life).
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from urllib.parse import urlsplit

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from headrace_core.errors import ConfigError
from headrace_distributed.errors import PeerLost, PeerTimeout

DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for others, unless told otherwise."""
GIVEN_UP = "given up"
"""Key of a group that will never be whole."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks for what another rank has yet to say."""


@dataclass(frozen=True, slots=True)
class Address:
    """A rendezvous, read."""

    host: str
    port: int
    name: str


def parse_address(rendezvous: str) -> Address:
    """Read ``tcp://HOST:PORT/NAME``.

    Raises:
        ConfigError: it is something else.
    """
    try:
        parts = urlsplit(rendezvous)
        host, port, name = parts.hostname, parts.port, parts.path.strip("/")
    except ValueError:  # a port that is no number
        host = port = name = None
    if not host or not port or not name or parts.scheme != "tcp":
        raise ConfigError(
            f"rendezvous {rendezvous!r} is not an address: must be tcp://HOST:PORT/NAME, such as "
            "tcp://127.0.0.1:29500/tp"
        )
    return Address(host, port, name)


def connect(rendezvous: str, timeout: float = DEFAULT_TIMEOUT) -> Store:
    """The store behind an address, seen through its name.

    Raises:
        ConfigError: the address cannot be read.
        PeerTimeout: nobody serves it within ``timeout`` seconds.
    """
    address = parse_address(rendezvous)
    try:
        store = TCPStore(
            address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as error:
        raise PeerTimeout(
            f"rendezvous {rendezvous!r} did not answer within {timeout:g} s: {error}", rank=None
        ) from error
    return PrefixStore(address.name, store)


def exchange(
    store: Store, key: str, rank: int, world_size: int, value: str, timeout: float
) -> tuple[str, ...]:
    """What each rank gave under a key, by rank; waits for all of them.

    Raises:
        PeerTimeout: names the first rank that gave nothing within ``timeout`` seconds.
        PeerLost: the meeting was given up, or the store has closed.
    """
    store.set(f"{key}/{rank}", value)
    return tuple(
        wait_for_value(store, f"{key}/{peer}", peer, world_size, timeout)
        for peer in range(world_size)
    )


def wait_for_value(store: Store, key: str, peer: int, world_size: int, timeout: float) -> str:
    """What rank ``peer`` of a group puts under a key.

    It is looked for again and again: a wait in the store would not end when the store does, and torch
    would write a stack of its own about that.

    Raises:
        PeerTimeout: it has put nothing within ``timeout`` seconds.
        PeerLost: the meeting was given up, or the store has closed.
    """
    deadline, pause = time.monotonic() + timeout, SHORTEST_PAUSE
    try:
        while not store.check([key]):
            if store.check([GIVEN_UP]):
                raise PeerLost(
                    f"the meeting was given up before rank {peer} of {world_size} joined the group",
                    rank=peer,
                )
            if time.monotonic() >= deadline:
                raise PeerTimeout(
                    f"rank {peer} of {world_size} has not joined the group within {timeout:g} s",
                    rank=peer,
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        found: bytes = store.get(key)
    except RuntimeError as error:
        raise PeerLost(
            f"the rendezvous closed before rank {peer} of {world_size} joined the group", rank=peer
        ) from error
    return found.decode()


class RendezvousServer:
    """The store that ranks meet at, served by this process; a context manager.

    Args:
        host: the address to listen on; the port is any that is free.
    """

    def __init__(self, host: str = "127.0.0.1", timeout: float = DEFAULT_TIMEOUT) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=128) as listener:
            self.port: int = listener.getsockname()[1]
            # A socket of our own: the store's would listen on every interface.
            self._store: TCPStore | None = TCPStore(
                host, self.port, is_master=True, wait_for_workers=False,
                timeout=timedelta(seconds=timeout), master_listen_fd=listener.detach(),
            )  # fmt: skip
        self.host = host
        self._names: set[str] = set()

    def address(self, name: str) -> str:
        """The address of the group of that name."""
        self._names.add(name)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{name}"

    def give_up(self) -> None:
        """Tell the ranks that wait for another one, and those that join from now on, that it will not come.

        The store is served until :meth:`close`: a rank that finds nobody there would try for its whole
        timeout.
        """
        if self._store is not None:
            for name in self._names:
                PrefixStore(name, self._store).set(GIVEN_UP, "")

    def close(self) -> None:
        """Serve no longer. Groups that have met do not need the store."""
        self._store = None

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
