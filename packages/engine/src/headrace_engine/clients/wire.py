"""Messages between a front end and a core in another process: msgspec types as msgpack.

Every frame is decoded against these types; a frame that does not fit is an error of ours, never
code that runs. Nothing here is pickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import headrace_core.errors
from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, EngineError, HeadraceError
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.config import EngineConfig
from headrace_engine.lockstep.peers import EnginePlace
from headrace_engine.messages import CoreOutputs
from headrace_engine.shared_objects.items import SharedItem
from headrace_engine.shared_objects.named_items import NamedItem, NamedPlace
from headrace_engine.startup import StartupTimeline

PARENT = "parent"
"""Name of the front end that started the core."""
HIGH_WATER_MARK = 10_000
"""Messages that may wait in a socket: enough for any pause that is not a hang."""
HEARTBEAT_SECONDS = 0.5
"""The core says at least this often how it is."""


def commands_address(folder: Path | str, name: str) -> str:
    """Address at which the core takes a front end's commands."""
    return f"ipc://{folder}/{name}.commands"


def reports_address(folder: Path | str, name: str) -> str:
    """Address at which a front end takes the core's reports."""
    return f"ipc://{folder}/{name}.reports"


class Hello(msgspec.Struct, frozen=True):
    """First line on the child's standard input, as JSON."""

    factory: str
    """``module:function``, called with (config, timeline); returns an EngineCore."""
    config: EngineConfig
    folder: str
    """Private folder with two sockets for each front end."""
    log_level: int
    log_json: bool = False
    """Log lines as JSON, as this process writes them."""
    log_colour: bool = False
    """Levels marked, as this process marks them."""
    log_model: str = ""
    """Name of the model, for log lines, where a server has several."""
    place: EnginePlace | None = None
    """The engine's, among those with which it shares experts; then the function gets it, too."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    requests: list[CoreRequest]
    items: list[SharedItem] = []
    """Media of theirs whose inputs are in shared memory."""
    named: list[NamedPlace] = []
    """Media of theirs that other front ends may ask for."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The front end's shared memory, before the first :attr:`Add.items`."""

    pid: int
    descriptor: int
    size: int
    max_object_size: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Suspend(msgspec.Struct, frozen=True, tag="suspend"):
    """Their readers are behind."""

    request_ids: list[str]


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    request_ids: list[str]


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    call_id: int
    drain: bool


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    call_id: int
    reset_running_requests: bool


class CallWorkers(msgspec.Struct, frozen=True, tag="call"):
    """The method is looked up in a list of what may be called, in the core's process."""

    call_id: int
    method: str
    args: list[Any]


class AddLoRA(msgspec.Struct, frozen=True, tag="add-lora"):
    call_id: int
    lora_request: LoRARequest


class RemoveLoRA(msgspec.Struct, frozen=True, tag="remove-lora"):
    call_id: int
    lora_int_id: int


class ListLoRAs(msgspec.Struct, frozen=True, tag="list-loras"):
    call_id: int


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """Ask for an item by its name."""

    call_id: int
    name: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A further front end, whose sockets have this name. The parent's to say, as the next two."""

    name: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """It has gone; whatever it asked for is aborted."""

    name: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


Command = (
    Add
    | Attach
    | Abort
    | Suspend
    | Resume
    | GetStats
    | AddLoRA
    | RemoveLoRA
    | ListLoRAs
    | ResetPrefixCache
    | CallWorkers
    | Recall
    | Join
    | Leave
    | Stop
)


class StartPhase(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    part_of: str | None = None


class RemoteError(msgspec.Struct, frozen=True):
    """An exception as data."""

    kind: str
    """Class name."""
    message: str
    details: dict[str, Any] = {}
    """Attributes that classes of :mod:`headrace_core.errors` carry."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    phases: list[StartPhase]
    memory_plan: str
    max_model_len: int = 0
    step_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core could not be built."""

    error: RemoteError


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: CoreOutputs


class StatsReply(msgspec.Struct, frozen=True, tag="stats-reply"):
    call_id: int
    stats: EngineStats


class DoneReply(msgspec.Struct, frozen=True, tag="done-reply"):
    """Answer to :class:`ResetPrefixCache`, :class:`AddLoRA` and :class:`RemoveLoRA`."""

    call_id: int
    done: bool


class LoRAsReply(msgspec.Struct, frozen=True, tag="loras-reply"):
    call_id: int
    loras: tuple[LoRARequest, ...]


class CallReply(msgspec.Struct, frozen=True, tag="call-reply"):
    call_id: int
    results: list[Any]


class RecallReply(msgspec.Struct, frozen=True, tag="recall-reply"):
    call_id: int
    item: NamedItem | None


class ErrorReply(msgspec.Struct, frozen=True, tag="error-reply"):
    call_id: int
    error: RemoteError


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    age: float
    """Seconds since the loop last came round."""


class Died(msgspec.Struct, frozen=True, tag="died"):
    error: RemoteError


Report = (
    Ready
    | Failed
    | Outputs
    | StatsReply
    | DoneReply
    | LoRAsReply
    | CallReply
    | RecallReply
    | ErrorReply
    | Heartbeat
    | Died
)


class BadFrame(EngineError):
    """A frame is not what the protocol allows; the other side is not ours, or broken."""


MessageT = TypeVar("MessageT", bound=Command | Report)


class FrameDecoder(Generic[MessageT]):
    """Decodes one direction's frames.

    Args:
        kind: :data:`Command` or :data:`Report`.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind)

    def decode(self, frame: bytes) -> MessageT:
        """The message in a frame.

        Raises:
            BadFrame: there is none.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise BadFrame(f"a frame of {len(frame)} bytes is not a message: {error}") from error


_DETAILS = (
    "field", "param", "library", "install", "retry_after",
    "limit", "num_prompt_tokens", "num_output_tokens", "at_least",
)  # fmt: skip


def as_data(error: BaseException) -> RemoteError:
    """An exception on its way to the other process."""
    details = {
        name: value
        for name in _DETAILS
        if isinstance(value := getattr(error, name, None), (str, int, float))
    }
    return RemoteError(type(error).__name__, str(error), details)


def as_exception(data: RemoteError) -> BaseException:
    """The exception that :func:`as_data` described: of its class if that is one of ours (or
    MemoryError), else an EngineDead that names it."""
    found = getattr(headrace_core.errors, data.kind, None)
    if isinstance(found, type) and issubclass(found, HeadraceError):
        error = found.__new__(found)
        error.args = (data.message,)
        for name in (*_DETAILS, "value"):
            setattr(error, name, data.details.get(name))
        return error
    if data.kind == "MemoryError":
        return MemoryError(data.message)
    return EngineDead(f"the engine process failed: {data.kind}: {data.message}")


def phases_of(timeline: StartupTimeline) -> list[StartPhase]:
    """A timeline on its way to the other process."""
    return [StartPhase(phase.name, phase.seconds, phase.part_of) for phase in timeline.phases]
