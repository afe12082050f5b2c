"""The adapters that a server has names for: those of its command line, and those that come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_core import plugins
from headrace_core.engine import EngineClient
from headrace_core.errors import ConfigError, HeadraceError, RequestError, UnknownModel
from headrace_core.lora import LoRARequest, media_adapters
from headrace_server.api_processes.peers import Peers, PeerSilent
from headrace_server.lora.folders import check_folder
from headrace_server.lora.ledger import Ledger
from headrace_server.lora.modules import FIELD, MAX_NAME, check_name, parse_modules
from headrace_server.lora.resolvers import LoRAResolver, resolvers
from headrace_server.lora.view import state_with
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState

logger = logging.getLogger(__name__)

MAX_SHOWN = 32
"""Served names that an error lists."""


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter under its name."""

    request: LoRARequest
    state: ServerState
    """By which requests for it are answered."""
    base_name: str
    """Its model's first name."""
    created: int
    """Since when it is served here, in seconds of Unix time."""

    @property
    def name(self) -> str:
        return self.request.lora_name

    @property
    def number(self) -> int:
        return self.request.lora_int_id


class ServedAdapters:
    """Adapters by name, of one model. Of one event loop.

    Where several HTTP processes share the engine, it is the engine that knows all adapters: it is asked
    for names that are unknown here, and the others are told of those that are gone.

    Args:
        state: of the model, without adapters.

    Raises:
        ConfigError: a name of ``lora_modules`` is the model's own.
        PluginError: a resolver cannot be had.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._engine: EngineClient = state.engine
        settings = state.settings
        self._modules = parse_modules(settings.lora_modules)
        for module in self._modules:
            if module.name in state.engine.model.names:
                raise ConfigError(f"{FIELD}: name {module.name!r} is the model's own", field=FIELD)
        self._root: str | None = settings.allowed_lora_path
        self._resolvers: Mapping[str, LoRAResolver] = {}
        if settings.allow_runtime_lora_updating:
            plugins.run_general()  # which may register some
            self._resolvers = resolvers()
            logger.info("LoRA resolvers: %s", ", ".join(self._resolvers) or "none")
        self._peers: Peers | None = state.peers
        self._defaults = _defaults(state.engine)
        self._num_defaults = len(self._defaults)
        folder = None if state.peers is None else state.peers.folder
        self._ledger = Ledger(folder, self._num_defaults)
        self._started = False
        self._starting = asyncio.Lock()
        self._by_name: dict[str, ServedAdapter] = {}
        self._gone: set[int] = set()
        """Ids of removed ones. A request that was under way may bring one back to the engine, but to
        nobody else."""
        self._resolving: dict[str, asyncio.Task[ServedAdapter | None]] = {}

    async def start(self) -> None:
        """Load those of the command line, once in the server's life. The first request does it where nobody
        has.

        Raises:
            ConfigError: one cannot be used; says why.
        """
        async with self._starting:
            if not self._started:
                await self._load_first()
                self._started = True

    async def _load_first(self) -> None:
        async with self._ledger.starting() as is_first:
            for default in self._defaults if is_first else ():
                await self._read_default(default)
            for module in self._modules if is_first else ():
                try:
                    await self.load(
                        module.name, module.path, base=module.base_model_name, root=None
                    )
                except RequestError as error:
                    raise ConfigError(
                        f"{FIELD}: {module.name}={module.path}: {error}", field=FIELD
                    ) from error
        await self._refresh()

    async def _read_default(self, default: LoRARequest) -> None:
        try:
            await self._engine.add_lora(default)
        except RequestError as error:
            raise ConfigError(
                f"default_mm_loras: {default.lora_name}: {error}", field="default_mm_loras"
            ) from error

    # Names

    async def find(self, name: str) -> ServedAdapter:
        """The adapter of a name, looked for by the resolvers if nobody has loaded it.

        Raises:
            UnknownModel: there is none; names those that are served.
            RequestError: a resolver's adapter cannot be used.
        """
        if not self._started:
            await self.start()
        found = self._by_name.get(name)
        if found is None and self._peers is not None:
            await self._refresh()
            found = self._by_name.get(name)
        if found is None and self._resolvers and name.isprintable() and len(name) <= MAX_NAME:
            found = await self._resolve(name)
        if found is None:
            names = [*self._engine.model.names, *self._by_name]
            more = ", ..." if len(names) > MAX_SHOWN else ""
            served = ", ".join(map(repr, names[:MAX_SHOWN])) + more
            raise UnknownModel(f"model {name[:256]!r} is not served; served: {served}",
                               param="model")  # fmt: skip
        return found

    async def listed(self) -> Sequence[ServedAdapter]:
        """All, by id."""
        if not self._started:
            await self.start()
        if self._peers is not None:
            await self._refresh()
        return sorted(self._by_name.values(), key=lambda adapter: adapter.number)

    async def _refresh(self) -> None:
        """Take over what the engine knows."""
        before = dict(self._by_name)
        known = {r.lora_int_id: r for r in await self._engine.list_loras()}
        for number in self._gone & known.keys():
            await self._engine.remove_lora(number)
        for name, adapter in before.items():
            if adapter.number not in known and self._by_name.get(name) is adapter:
                del self._by_name[name]
        for number in sorted(known.keys() - self._gone):
            if number > self._num_defaults:
                self._adopt(known[number])

    def _adopt(self, request: LoRARequest) -> ServedAdapter:
        """Serve an adapter under its name. Of two with one name the later one counts."""
        before = self._by_name.get(request.lora_name)
        if before is not None and before.number >= request.lora_int_id:
            return before
        state, base = state_with(self._state, request), self._engine.model.name
        adapter = ServedAdapter(request, state, base, int(time.time()))
        self._by_name[request.lora_name] = adapter
        return adapter

    # Loading and unloading

    async def load(
        self,
        name: str,
        path: str,
        *,
        base: str | None = None,
        root: str | None = None,
        in_place: bool = False,
    ) -> ServedAdapter:
        """Read an adapter and serve it under a name.

        Args:
            base: name of its model, for the list of models.
            root: folder in which it must lie; None: anywhere.
            in_place: one of that name may be served already; requests that it has end with it.

        Raises:
            RequestError: the name is taken or none, or the adapter cannot be used; says why.
            UnknownModel: there is no adapter at that path.
            PeerSilent: it is loaded, and another process may still use the one that it replaces.
        """
        check_name(name, "lora_name")
        if name in self._engine.model.names:
            raise RequestError(f"lora_name = {name!r}: is the model's own name", param="lora_name")
        folder = await asyncio.to_thread(check_folder, path, root)
        async with self._ledger.changing(name):
            before = await self._current(name)
            if before is not None and not in_place:
                raise RequestError(
                    f"lora_name = {name!r}: an adapter of that name is loaded already; unload it, or "
                    "send load_inplace",
                    param="lora_name",
                )
            request = LoRARequest(name, await self._ledger.next_id(), folder, base)
            try:
                await self._engine.add_lora(request)
            except RequestError as error:
                error.param = "lora_path"
                raise
            adapter = self._adopt(request)
            logger.info("adapter %r (id %d) is loaded", name, adapter.number)
            if before is not None:
                await self._remove(before)
        return adapter

    async def load_allowed(self, name: str, path: str, *, in_place: bool) -> ServedAdapter:
        """:meth:`load` for a client, from where the operator allows."""
        return await self.load(name, path, root=self._root, in_place=in_place)

    async def unload(self, name: str | None, number: int | None) -> ServedAdapter:
        """Serve an adapter no longer. Requests that have it go on.

        Args:
            name, number: either says which; both must say the same.

        Raises:
            UnknownModel: none such is loaded.
            PeerSilent: it is unloaded, and another process may still use it.
        """
        adapter = await self._loaded(name, number)
        async with self._ledger.changing(adapter.name):
            if await self._current(adapter.name) is not adapter:
                raise _not_loaded(name, number)
            await self._remove(adapter)
        return adapter

    async def _loaded(self, name: str | None, number: int | None) -> ServedAdapter:
        for adapter in await self.listed():
            if name in (None, adapter.name) and number in (None, adapter.number):
                return adapter
        raise _not_loaded(name, number)

    async def _current(self, name: str) -> ServedAdapter | None:
        if self._peers is not None:
            await self._refresh()
        return self._by_name.get(name)

    async def _remove(self, adapter: ServedAdapter) -> None:
        """Nobody finds it any more, then it is taken from the engine."""
        self.forget(adapter.number)
        silent: PeerSilent | None = None
        if self._peers is not None:
            try:
                await self._peers.ask("forget_adapter", number=adapter.number)
            except PeerSilent as error:
                silent = error
        await self._engine.remove_lora(adapter.number)
        logger.info("adapter %r (id %d) is unloaded", adapter.name, adapter.number)
        if silent is not None:
            raise silent

    def forget(self, number: int) -> None:
        """Give no further request an adapter, which somebody removes."""
        self._gone.add(number)
        for name, adapter in list(self._by_name.items()):
            if adapter.number == number:
                del self._by_name[name]

    # Resolvers

    async def _resolve(self, name: str) -> ServedAdapter | None:
        """Ask the resolvers, once for all requests that wait for the name. A client that leaves does not
        end it: others may wait."""
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = asyncio.create_task(self._resolved(name))
            task.add_done_callback(lambda done: self._end_resolving(name, done))
        return await asyncio.shield(task)

    def _end_resolving(self, name: str, task: asyncio.Task[ServedAdapter | None]) -> None:
        del self._resolving[name]
        if not task.cancelled():
            task.exception()  # heard by those who wait; nobody may

    async def _resolved(self, name: str) -> ServedAdapter | None:
        base = self._engine.model.name
        for resolver_name, resolver in self._resolvers.items():
            try:
                found = await resolver.resolve_lora(base, name)
            except HeadraceError:
                raise
            except Exception:
                logger.exception("LoRA resolver %r failed; the next one is asked", resolver_name)
                continue
            if found is not None:
                return await self._load_resolved(name, found)
        return None

    async def _load_resolved(self, name: str, found: LoRARequest) -> ServedAdapter:
        try:
            return await self.load(name, found.lora_path, base=found.base_model_name)
        except RequestError as error:
            if (other := self._by_name.get(name)) is not None:  # somebody was quicker
                return other
            # The client learns what is wrong with the adapter, and not where it lies.
            told = str(error).replace(found.lora_path, name)
            kind = UnknownModel if isinstance(error, UnknownModel) else RequestError
            raise kind(told, param="model") from error


def check_adapters(settings: ServerSettings, engine: EngineClient) -> None:
    """Refuse settings of adapters where the engine takes none.

    Raises:
        ConfigError: naming the setting.
    """
    if settings.lora_modules and not engine.model.max_loras:
        raise ConfigError(
            f"{FIELD}: this engine takes no adapters; start it with --enable-lora", field=FIELD
        )


def _defaults(engine: EngineClient) -> Sequence[LoRARequest]:
    """The adapters of prompts with media that name none, with the ids that the engine gives them."""
    given: Any = engine.settings.get("lora") or {}
    adapters = media_adapters(given.get("default_mm_loras") or {}).values()
    return list({one.lora_int_id: one for one in adapters}.values())


def _not_loaded(name: str | None, number: int | None) -> UnknownModel:
    if name is not None and number is not None:
        return UnknownModel(f"lora_name = {name[:256]!r}, lora_int_id = {number}: no adapter of this name "
                            "and this id is loaded", param="lora_name")  # fmt: skip
    if name is not None:
        return UnknownModel(f"lora_name = {name[:256]!r}: no such adapter is loaded",
                            param="lora_name")  # fmt: skip
    return UnknownModel(f"lora_int_id = {number}: no such adapter is loaded", param="lora_int_id")
