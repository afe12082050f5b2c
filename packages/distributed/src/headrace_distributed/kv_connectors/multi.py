"""The connector ``multi``: several connectors in order, as one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.extra import EXTRA, extra_of, wrong

GROUP = "headrace.kv_connectors"
CONNECTORS = "connectors"
OF_ENGINE = ("rank", "num_ranks", "num_stages", "block_size", "kv_head_parts", "kv_by_layer")
"""Settings that all have, and of which they state none."""
_ROLES = ("kv_producer", "kv_consumer", "kv_both")


class _Part(NamedTuple):
    """One of them, and what its own role lets it do."""

    connector: KVConnector
    saves: bool
    loads: bool


class MultiConnector(KVConnector):
    """Blocks are saved to all and loaded from the first that has them, in the order of ``connectors``, a list
    of settings like those of one connector alone. What one that fetches does not get, the next one is asked
    for.

    Raises:
        ConfigError: the list is wrong; two connectors have an address for other engines; or from a connector.
        PluginNotFound, PluginLoadError: one is not installed, or cannot be imported.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        stated = extra_of(settings, CONNECTORS).get(CONNECTORS)
        if not isinstance(stated, list) or not stated:
            raise wrong(CONNECTORS, stated, "a list of settings, one for each connector")
        self._parts: list[_Part] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for index, one in enumerate(stated):
                self._parts.append(_part(f"{CONNECTORS}[{index}]", one, settings))
            if sum(bool(part.connector.address()) for part in self._parts) > 1:
                raise wrong(CONNECTORS, [one.get("kv_connector") for one in stated],
                            "at most one whose blocks other engines ask for")  # fmt: skip
            stack.pop_all()
        savers = [part.connector for part in self._parts if part.saves]
        self.saves_full_blocks = not savers or any(one.saves_full_blocks for one in savers)
        self._turns: dict[str, int] = {}
        """By request: the part that fetches for it."""

    def contains(self, key: bytes) -> bool:
        return any(part.connector.contains(key) for part in self._parts if part.loads)

    def load(self, key: bytes, into: memoryview) -> bool:
        failed: OSError | None = None
        for part in self._parts:
            try:
                if part.loads and part.connector.contains(key) and part.connector.load(key, into):
                    return True
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        return False

    def save(self, key: bytes, content: memoryview) -> None:
        failed: OSError | None = None
        for part in self._parts:
            try:
                if part.saves:
                    part.connector.save(key, content)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        for turn in range(self._turns.get(request_id, 0), len(self._parts)):
            self._turns[request_id] = turn
            connector, _, loads = self._parts[turn]
            away = {key: size for key, size in blocks.items() if not self.contains(key)}
            if loads and away and connector.fetch(request_id, away, params):
                return True
        self._turns.pop(request_id, None)
        return False

    def forget(self, request_id: str) -> None:
        turn = self._turns.pop(request_id, None)
        if turn is not None:
            self._parts[turn].connector.forget(request_id)

    def address(self) -> Mapping[str, Any]:
        return next(filter(None, (part.connector.address() for part in self._parts)), {})

    def check_block(self, num_bytes: int) -> None:
        for part in self._parts:
            part.connector.check_block(num_bytes)

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, whatever one raises
            for part in self._parts:
                stack.callback(part.connector.close)


def _part(where: str, stated: object, settings: Mapping[str, Any]) -> _Part:
    """Raises: ConfigError: the settings of one connector are wrong."""
    if not isinstance(stated, Mapping):
        raise wrong(where, stated, "an object")
    for fact in OF_ENGINE:
        if fact in stated:
            raise wrong(f"{where}.{fact}", stated[fact], "left out")
    own = {"kv_connector_extra_config": {}, **stated}
    for inherited in (*OF_ENGINE, "engine_id", "kv_load_failure_policy"):
        if inherited in settings:
            own.setdefault(inherited, settings[inherited])
    policy = settings.get("kv_load_failure_policy")
    if own.get("kv_load_failure_policy") != policy:
        raise wrong(f"{where}.kv_load_failure_policy", own["kv_load_failure_policy"],
                    f"left out, or {policy!r} as the engine's")  # fmt: skip
    name, role = own.get("kv_connector"), own.get("kv_role")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.kv_connector", name, "the name of a connector")
    if role not in _ROLES:
        raise wrong(f"{where}.kv_role", role, ", ".join(_ROLES))
    if not isinstance(own["kv_connector_extra_config"], Mapping):
        raise wrong(
            f"{where}.kv_connector_extra_config", own["kv_connector_extra_config"], "an object"
        )
    found = plugins.load(GROUP, name)
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise ConfigError(f"{EXTRA}.{where}.kv_connector = {name!r}: must be a subclass of KVConnector",
                          field=f"{EXTRA}.{where}.kv_connector")  # fmt: skip
    return _Part(found(own), role != "kv_consumer", role != "kv_producer")
