"""A checkpoint that takes the place of a running one: resolved, compared, and built as that one was."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.worker.model import build_model
from headrace_core.errors import RequestError
from headrace_engine.startup import StartupTimeline

if TYPE_CHECKING:
    from headrace.assembly.parallel.experts import DividedMixtures
    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.lora import AdapterSlots
    from headrace_core.model import CausalLM, ModelInfo, ProgressCallback
    from headrace_core.ops import OpTable
    from headrace_engine.encoder.slices import EncoderSlices
    from headrace_engine.weights.update_set import LoadedModel
    from headrace_models.layers.base import Layer

FACTS = (
    "architecture", "vocab_size", "eos_token_ids", "dtype", "max_model_len", "runner", "convert",
    "tasks", "pooling", "is_encoder_decoder", "processor", "has_towers", "source",
)  # fmt: skip
"""Fields of :class:`~headrace_core.model.ModelInfo` that front ends, the cache's plan and steps rely on."""
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
"""Files with what token ids mean."""
_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
"""Entries of ``tokenizer.json`` that say so. Others, truncation for one, tools change as they write it."""


def check_files(path: str) -> None:
    """Check that what lies in a folder has an end: whoever opens a FIFO waits for its other end, and nobody
    could end the swap.

    Raises:
        RequestError: names the first that is no file, folder or link to one.
    """
    if not os.path.isdir(path):
        return
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            except OSError:  # a link to nothing: whoever needs it says so
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RequestError(
                    f"path = {path!r:.300}: {entry.name!r:.200} is a FIFO, socket or device: must be a file",
                    param="path",
                )


class BesideBuilder:
    """Builds models of other checkpoints with the running one's kernels and settings, one at a time
    (:class:`headrace_engine.weights.beside.BuildBeside`).

    Args:
        resolved: the running model.
        slices: see :func:`headrace.assembly.worker.model.build_model`.
        ranks: of the running model.
        make_experts: divides the experts of a model that is built beside; None: they are divided as all else
            is.
        experts: of the running model; likewise.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        ops: OpTable,
        slices: EncoderSlices | None,
        ranks: Ranks,
        make_experts: Callable[[], DividedMixtures | None],
        experts: DividedMixtures | None,
    ) -> None:
        self._resolved, self._ops, self._slices = resolved, ops, slices
        self._ranks, self._make_experts, self._experts = ranks, make_experts, experts
        self._beside: tuple[Ranks, DividedMixtures | None] | None = None
        """Of the model that is built, or was last, and has not ended."""

    def __call__(
        self,
        path: str,
        slots: AdapterSlots | None,
        admit: Callable[[CausalLM, int], None],
        progress: ProgressCallback,
        told: Callable[[LoadedModel], None],
    ) -> CausalLM:
        """See :class:`headrace_engine.weights.beside.BuildBeside`."""
        from headrace_models.weight_bytes import kept_bytes

        check_files(path)
        new = resolved_beside(self._resolved, path)
        dtype = new.info.dtype

        def admit_built(model: CausalLM) -> None:
            admit(model, kept_bytes(cast("Layer", model), dtype))

        ranks, experts = self._ranks.beside(), self._make_experts()
        self._beside = ranks, experts
        return build_model(
            new, self._ops, StartupTimeline(), self._slices, slots, again=True, told=told,
            ranks=ranks, experts=experts, check=admit_built, progress=progress,
        )  # fmt: skip

    def ended(self, serves: bool) -> None:
        """The model that was built last serves now in the place of the running one, or (False) has been
        dropped."""
        beside, self._beside = self._beside, None
        if beside is None:
            return
        ranks, experts = beside
        if not serves:
            ranks.leave_stages()
            return
        self._ranks.take_over(ranks)
        if self._experts is not None and experts is not None:
            self._experts.take_over(experts)


def resolved_beside(running: ResolvedConfig, path: str) -> ResolvedConfig:
    """The configuration of the new checkpoint, which must be on this machine. Code that it brings is not
    run, whatever the running one may.

    Raises:
        RequestError: it is not there, or of another model.
        HeadraceError: it cannot be resolved.
    """
    from headrace_models.resolve import resolve

    found = Path(path).expanduser()
    if not found.exists():
        raise RequestError(
            f"path = {path!r:.300}: no such folder or file on the machine of the engine",
            param="path",
        )
    config = running.config
    model = dataclasses.replace(
        config.model, model=str(found), revision=None, trust_remote_code=False
    )
    load = config.load
    if load.load_format == "dummy":
        load = dataclasses.replace(load, load_format="auto")
    info = resolve(model, load, running.platform)
    _check_facts(info, running.info)
    if config.model.tokenizer is None and not config.model.skip_tokenizer_init:
        _check_vocabulary(info.path, running.info.path)
    new = dataclasses.replace(config, model=model, load=load)
    return running._replace(config=new, info=info)


def _check_facts(new: ModelInfo, running: ModelInfo) -> None:
    for name in FACTS:
        found, wanted = getattr(new, name), getattr(running, name)
        if found != wanted:
            raise RequestError(
                f"path: {name} is {found!r:.200} in the new checkpoint: must be the running model's, "
                f"{wanted!r:.200}",
                param="path",
            )


def _check_vocabulary(new: Path, running: Path) -> None:
    """Files that both checkpoints have must say the same; a checkpoint of weights alone is fine."""
    if not new.is_dir() or not running.is_dir():
        return
    for name in VOCABULARIES:
        ours, theirs = running / name, new / name
        if ours.is_file() and theirs.is_file() and _meaning(ours) != _meaning(theirs):
            raise RequestError(
                f"path: {name} of the new checkpoint differs from the running model's: must say the same, "
                "as the tokenizer is kept",
                param="path",
            )


def _meaning(file: Path) -> Any:
    content = file.read_bytes()
    if file.suffix != ".json":
        return content
    try:
        read = json.loads(content)
    except ValueError:
        return content
    if file.name == "tokenizer.json" and isinstance(read, dict):
        return [read.get(part) for part in _PARTS]
    return read
