"""Tensors by gloo's broadcast, from a trainer that is rank 0 of a group of its own.

The group is no default group of ``torch.distributed``: a trainer and an engine may each be part of another.
Gloo moves numbers between memories whose sizes both sides know; nothing that it receives is unpickled. It
knows no passwords: whoever reaches the trainer's port can join, so that the network must be trusted.
"""

from __future__ import annotations

import datetime
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.weights.messages import NamedTensors, TensorPlace, by_name
from headrace_engine.weights.plain_tensors import plain

dist: Any = torch.distributed  # whose types leave out much of what it documents
JOIN_SECONDS = 60.0
"""Longest wait for the other members."""
SEND_SECONDS = 120.0
"""Longest wait for one tensor."""
_ADDRESS = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}|[0-9A-Fa-f:]{2,45}(%[A-Za-z0-9_.-]{1,32})?"
)
"""Host names, and addresses of both kinds."""
MAX_ABANDONED = 4
"""Attempts to join that were given up and have not ended: the library goes on trying for minutes."""
PREFIX = "headrace-weights"
"""Of the group's names in the store."""


class WeightGroup:
    """A member of the group.

    Args:
        store: through which the members find each other.
        rank, world_size: of this member.
        address: that others reach this member by.

    Raises:
        RuntimeError: the others have not come in time.
    """

    def __init__(self, store: Any, rank: int, world_size: int, address: str) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=SEND_SECONDS)
        self._store = store  # the group needs it as long as it lives
        self._group = gloo(dist.PrefixStore(PREFIX, store), rank, world_size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self.rank, self.world_size = rank, world_size

    @classmethod
    def join(cls, address: str, port: int, rank: int, world_size: int) -> WeightGroup:
        """Become a member of a trainer's group: an engine's end.

        Raises:
            RequestError: the trainer was not reached, or others have not come in time.
        """
        try:
            return _within(JOIN_SECONDS, lambda: cls._joined(address, port, rank, world_size))
        except (RuntimeError, OSError, dist.DistError, TimeoutError) as error:
            raise RequestError(
                f"init_weight_update_group: the group at {address}:{port} (rank {rank} of {world_size}) "
                f"cannot be joined: {(str(error).splitlines() or [type(error).__name__])[0]:.300}",
                param="master_address",
            ) from error

    @classmethod
    def _joined(cls, address: str, port: int, rank: int, world_size: int) -> WeightGroup:
        timeout = datetime.timedelta(seconds=JOIN_SECONDS)
        store = dist.TCPStore(address, port, world_size, False, timeout=timeout)
        return cls(store, rank, world_size, _own_address(address, port))

    def receive(
        self, tensors: Sequence[TensorPlace], unwanted: threading.Event | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the order in which rank 0 sends them.

        Args:
            unwanted: set: no further ones are received.

        Raises:
            RequestError: the trainer went away, or sent nothing in time; or no more are wanted.
        """
        for place in tensors:
            if unwanted is not None and unwanted.is_set():
                raise RequestError(
                    f"tensor {place.name!r:.200}: was not received: the update was cancelled meanwhile",
                    param="tensors",
                )
            tensor = torch.empty(place.shape, dtype=getattr(torch, place.dtype))
            try:
                self._broadcast(tensor)
            except RuntimeError as error:
                raise RequestError(
                    f"tensor {place.name!r:.200}: did not come: {str(error).splitlines()[0]:.300}",
                    param="tensors",
                ) from error
            yield place.name, tensor

    def send(self, weights: NamedTensors) -> None:
        """Send tensors to all other members: rank 0's end. Returns when they are sent."""
        for name, tensor in by_name(weights):
            self._broadcast(plain(name, tensor).detach().to("cpu").contiguous())

    def _broadcast(self, tensor: Tensor) -> None:
        # As bytes: gloo does not know every dtype.
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        if flat.numel():
            self._group.broadcast([flat], self._options).wait()


class TrainerGroup:
    """Rank 0 of a group, which others join at :attr:`port`: a trainer's end.

    >>> group = TrainerGroup(world_size=2)
    ... # in another thread: engine.init_weight_update_group("127.0.0.1", group.port, 1, 2)
    ... group.wait()
    ... group.send(model.state_dict())

    Args:
        world_size: members, this one included.
        address: that others reach this machine by, and the only one that is listened at.
        port: 0: any that is free.
    """

    def __init__(self, world_size: int, address: str = "127.0.0.1", port: int = 0) -> None:
        self.address, self.world_size = address, world_size
        self._listener = socket.create_server((address, port))
        self._store = dist.TCPStore(
            address, self._listener.getsockname()[1], world_size, True,
            timeout=datetime.timedelta(seconds=JOIN_SECONDS), wait_for_workers=False,
            master_listen_fd=self._listener.detach(), use_libuv=True,
        )  # fmt: skip
        self.port = int(self._store.port)
        self._group: WeightGroup | None = None

    def wait(self) -> None:
        """Wait until all have joined.

        Raises:
            RuntimeError: not in :data:`JOIN_SECONDS`.
        """
        self._group = WeightGroup(self._store, 0, self.world_size, self.address)

    def send(self, weights: NamedTensors) -> None:
        """Send tensors to all others, who must be receiving: in this order, and all of them."""
        assert self._group is not None, "wait() comes first"
        self._group.send(weights)


def described(weights: NamedTensors, **options: Any) -> dict[str, Any]:
    """The argument of ``update_weights`` that has an engine receive these tensors, in this order.

    Args:
        options: further fields of that argument (``finish``, ``version``).
    """
    tensors: list[Mapping[str, Any]] = [
        {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
        for name, given in by_name(weights)
        for t in [plain(name, given)]
    ]
    return {"source": "broadcast", "tensors": tensors, **options}


def check_member(address: object, port: object, rank: object, world_size: object) -> None:
    """Check what a caller says of a group.

    Raises:
        RequestError: it cannot be meant.
        UnsupportedFeature: this torch has no gloo.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise UnsupportedFeature("init_weight_update_group: this torch was built without gloo")
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise _wrong("master_address", address, "a host's name or address")
    if not _is_count(port) or not 0 < port <= 65535:  # type: ignore[operator]
        raise _wrong("master_port", port, "a port: 1 to 65535")
    if not _is_count(world_size) or not 2 <= world_size <= 4096:  # type: ignore[operator]
        raise _wrong("world_size", world_size, "2 to 4096 members, the trainer included")
    if not _is_count(rank) or not 1 <= rank < world_size:  # type: ignore[operator]
        raise _wrong("rank_offset", rank, f"1 to {int(world_size) - 1}: the trainer has rank 0")  # type: ignore[call-overload]


def _within(seconds: float, join: Callable[[], WeightGroup]) -> WeightGroup:
    """The group that ``join`` makes in a thread, which is not waited for any longer.

    Raises:
        TimeoutError: it has not in so many seconds. RuntimeError: too many have not, and still try.
    """
    trying = [one for one in threading.enumerate() if one.name == _JOINER]
    if len(trying) >= MAX_ABANDONED:
        raise RuntimeError(f"{len(trying)} earlier attempts have not ended yet")
    joined: Future[WeightGroup] = Future()

    def work() -> None:
        try:
            group = join()
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(group)

    threading.Thread(target=work, name=_JOINER, daemon=True).start()
    try:
        return joined.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"the trainer did not answer within {seconds:g} seconds") from None


_JOINER = "headrace-weights-join"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _own_address(address: str, port: int) -> str:
    """This machine's address on the way to another's."""
    with socket.create_connection((address, port), timeout=JOIN_SECONDS) as connection:
        return str(connection.getsockname()[0])


def _wrong(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"init_weight_update_group: {name} = {value!r:.200}: must be {accepted}", param=name
    )
