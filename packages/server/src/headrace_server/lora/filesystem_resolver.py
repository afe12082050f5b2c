"""Resolver of adapters that lie in one folder of the server's machine, each in a folder of its name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from headrace_core.errors import ConfigError, RequestError
from headrace_core.lora import LoRARequest
from headrace_server.lora.folders import CONFIG, WEIGHTS, lies_within, read_config
from headrace_server.lora.resolvers import LoRAResolver, LoRAResolverRegistry

VARIABLE = "HEADRACE_LORA_RESOLVER_CACHE_DIR"
NAME = "lora_filesystem_resolver"


class FilesystemResolver(LoRAResolver):
    """Finds ``<folder>/<name>``.

    Args:
        folder: what it holds may be loaded by anybody who may send requests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See :meth:`LoRAResolver.resolve_lora`. None also for an adapter of another base model, and for
        names that lead out of the folder."""
        found = await asyncio.to_thread(self._find, base_model_name, lora_name)
        return None if found is None else LoRARequest(lora_name, 1, str(found), base_model_name)

    def _find(self, base_model_name: str, lora_name: str) -> Path | None:
        if lora_name in ("", ".", "..") or any(c in lora_name for c in "/\\\0"):
            return None
        try:
            folder = (self._folder / lora_name).resolve()
            if folder.parent != self._folder or not (folder / CONFIG).is_file():
                return None
            if not lies_within(folder, self._folder):
                return None
        except (OSError, RuntimeError, ValueError):  # a name too long, a loop of links, no text
            return None
        if read_config(folder).get("base_model_name_or_path") != base_model_name:
            return None
        if not any((folder / name).is_file() for name in WEIGHTS):
            raise RequestError(f"adapter {lora_name!r}: holds none of {', '.join(WEIGHTS)}")
        return folder


def register() -> None:
    """Have the folder of :data:`VARIABLE` searched, if it is set. A function of general plug-ins.

    Raises:
        ConfigError: it is not a folder.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        return
    if not Path(given).is_dir():
        raise ConfigError(
            f"{VARIABLE} = {given!r}: must be set to a valid directory", field=VARIABLE
        )
    LoRAResolverRegistry.register_resolver(NAME, FilesystemResolver(Path(given)))
