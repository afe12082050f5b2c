"""Resolver of adapters on the Hugging Face hub, of the repositories that the operator lists."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import MissingDependency, RequestError
from headrace_core.lora import LoRARequest
from headrace_server.lora.folders import CONFIG, WEIGHTS, read_config
from headrace_server.lora.resolvers import LoRAResolver, LoRAResolverRegistry

VARIABLE = "HEADRACE_LORA_RESOLVER_HF_REPO_LIST"
NAME = "hf_hub_resolver"
_FILES = (CONFIG, *(name for name in WEIGHTS if not name.endswith(".pt")))


class HubResolver(LoRAResolver):
    """Finds ``owner/repository`` and ``owner/repository/folder``.

    Args:
        repositories: those that may be fetched from, as ``owner/repository``.
        snapshot: fetches files of a repository and returns their folder
            (``huggingface_hub.snapshot_download``).
    """

    def __init__(self, repositories: Sequence[str], snapshot: Any) -> None:
        self._repositories = frozenset(repositories)
        self._snapshot = snapshot

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See :meth:`LoRAResolver.resolve_lora`. Nothing is asked of the hub for other names."""
        parts = lora_name.split("/")
        repository, inside = "/".join(parts[:2]), parts[2:]
        if repository not in self._repositories or any(p in ("", ".", "..") for p in inside):
            return None
        if any(c in part for part in inside for c in "\\*?[]\0"):
            return None
        folder = await asyncio.to_thread(self._fetched, repository, inside)
        if folder is None:
            return None
        if read_config(folder).get("base_model_name_or_path") != base_model_name:
            return None
        return LoRARequest(lora_name, 1, str(folder), base_model_name)

    def _fetched(self, repository: str, inside: Sequence[str]) -> Path | None:
        """The adapter's folder, fetched unless it is there already; None: it is none."""
        prefix = "".join(part + "/" for part in inside)
        try:
            root = self._snapshot(
                repo_id=repository, allow_patterns=[prefix + name for name in _FILES]
            )
        except Exception as error:  # the library's own tree, and of its HTTP client
            raise RequestError(
                f"adapter {repository + '/' + prefix!r:.256}: could not be fetched "
                f"({type(error).__name__})"
            ) from error
        folder = Path(root, *inside)
        return folder if (folder / CONFIG).is_file() else None


def register() -> None:
    """Have the repositories of :data:`VARIABLE` searched, if it is set: names with commas. A function of
    general plug-ins.

    Raises:
        MissingDependency: ``huggingface_hub`` is not installed.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if not names:
        return
    try:
        snapshot = importlib.import_module("huggingface_hub").snapshot_download
    except ImportError as error:
        raise MissingDependency(
            "huggingface_hub", needed_for=VARIABLE, install="pip install huggingface_hub"
        ) from error
    LoRAResolverRegistry.register_resolver(NAME, HubResolver(names, snapshot))
