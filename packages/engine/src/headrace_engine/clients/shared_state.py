"""What several engines have been told since their start, and how a new one comes to be like them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from headrace_core.errors import EngineDead, HeadraceError
from headrace_core.lora import LoRARequest
from headrace_engine.clients.base import CONTROL_TIMEOUT, PROFILE_TIMEOUT, dead_again
from headrace_engine.clients.process import ProcessClient

logger = logging.getLogger(__name__)

READING_CALLS = frozenset(
    {"report", "start_profile", "stop_profile", "is_sleeping", "weights_version"}
)
"""Calls of workers after which a new engine is still like the others."""


class SharedState:
    """Adapters, sleep and changes. Belongs to one thread at a time: to the one that holds the lock.

    Args:
        lock: guards it.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.loras: dict[int, LoRARequest] = {}
        self.sleep: list[Any] | None = None
        """Arguments of the call after which engines sleep; None while they are awake."""
        self.changed: str | None = None
        """The call after which a new engine would not be like the others."""
        self._lock = lock

    def note_call(self, method: str, args: Sequence[Any]) -> None:
        """Note what a new engine must be told, or that there can be none."""
        if method == "sleep":
            self.sleep = list(args)
        elif method == "wake_up" and not any(args):
            self.sleep = None
        else:
            self.changed = method

    def why_not_repeated(self) -> str | None:
        """Why no new engine would be like the others; None: it would."""
        if self.changed is None:
            return None
        return f"{self.changed} was called since the start, which a new engine would lack"

    def take_back(self, request: LoRARequest, before: LoRARequest | None) -> None:
        """An adapter was refused by an engine: a new one need not read it.

        Args:
            before: the adapter that had its id.
        """
        if self.loras.get(request.lora_int_id) is not request:
            return
        if before is None:
            del self.loras[request.lora_int_id]
        else:
            self.loras[request.lora_int_id] = before

    def repeat_on(self, client: ProcessClient, name: str, join: Callable[[], None]) -> None:
        """Have a new engine read the adapters that the others have, and sleep while they do.

        Args:
            client: the engine's.
            name: of the engine, for the log.
            join: called with the lock held, once the engine is like the others: none of them is told
                anything meanwhile.

        Raises:
            EngineDead: it has ended meanwhile.
        """
        known: dict[int, LoRARequest] = {}
        asleep: list[Any] | None = None
        while True:
            with self._lock:
                wanted = [one for key, one in self.loras.items() if known.get(key) is not one]
                gone = [key for key in known if key not in self.loras]
                sleep = self.sleep
                if not wanted and not gone and sleep is asleep:
                    if client.failure is not None:
                        raise dead_again(client.failure)
                    join()
                    return
            for lora_int_id in gone:
                del known[lora_int_id]
                client.remove_lora(lora_int_id).result(CONTROL_TIMEOUT)
            for lora in wanted:
                known[lora.lora_int_id] = lora
                _read_adapter(client, lora, name)
            if not wanted and not gone:
                call = ("wake_up", [None]) if sleep is None else ("sleep", sleep)
                client.call_workers(*call).result(CONTROL_TIMEOUT)
                asleep = sleep


def _read_adapter(client: ProcessClient, lora: LoRARequest, name: str) -> None:
    """Have a new engine read an adapter. One that it cannot read, because its files have gone for example,
    fails the requests that name it, and nothing else.

    Raises:
        EngineDead: the engine has ended.
    """
    try:
        client.add_lora(lora).result(PROFILE_TIMEOUT)
    except EngineDead:
        raise
    except HeadraceError as error:
        logger.warning("%s does not have adapter %s: %s", name, lora.lora_name, error)
