"""A checkpoint written again with its linear layers in another format: ``headrace quantize``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, WeightEncoder
from headrace_core.model import BuildContext, ModelInfo, ProgressCallback, ignore_progress
from headrace_models.formats.writer import SafetensorsWriter
from headrace_models.layers.attention.mla import HeadProjections
from headrace_models.loading.loader import Built, choose_format
from headrace_models.loading.sharded_state import WEIGHT_SUFFIXES, copy_others
from headrace_models.quantization import quantization_config

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
PATTERN = "model-{number:05d}.safetensors"
JOURNAL = "headrace-quantize.json"
"""What a run has written; it stays beside the checkpoint."""
MOST_FILE_BYTES, LEAST_FILE_BYTES, FILES = 2 << 30, 128 << 20, 16
"""Bytes of the source's tensors that go into one file: what an interrupted run does again at most."""
_ROOM = 1 << 10
"""Bytes of a file's header besides its tensors' entries."""
_ENTRY = 160
"""Bytes of a tensor's entry besides its name."""
_MOST_TENSORS = 8
"""Tensors that an encoder makes of one."""
HEAD = "lm_head"


@dataclass
class _File:
    """What one written file holds."""

    source_bytes: int = 0
    written_bytes: int = 0
    file_bytes: int = 0
    tensors: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class Copied:
    """What was written."""

    folder: Path
    source_bytes: int = 0
    """Bytes of the source's tensors."""
    written_bytes: int = 0
    """Bytes of the tensors written."""
    encoded: list[str] = field(default_factory=list)
    """Names of the linear layers in the new format."""
    left: list[str] = field(default_factory=list)
    """Names of those that stayed in floats."""
    resumed_files: int = 0
    """Files that an earlier run had written."""

    def add(self, file: _File) -> None:
        """Count a file in."""
        self.source_bytes += file.source_bytes
        self.written_bytes += file.written_bytes
        self.encoded += file.encoded
        self.left += file.left


class _Recorder(QuantMethod):
    """Notes for which modules a model asks a linear method; all else is another method's."""

    name = "recorder"

    def __init__(self, method: QuantMethod) -> None:
        self._method = method
        self.modules: set[str] = set()

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: Any) -> QuantMethod:
        raise NotImplementedError

    @classmethod
    def refuse(cls, need: Any) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        self.modules.update(spec.part_names or (spec.name,))
        return self._method.for_layer(spec)


def write_quantized(
    info: ModelInfo,
    context: BuildContext,
    encoder: WeightEncoder,
    folder: Path,
    *,
    with_head: bool = False,
    load: LoadConfig | None = None,
    file_bytes: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Copied:
    """Write the checkpoint with every linear layer that the format takes encoded, the rest unchanged.

    One tensor is in memory at a time. Files that an earlier run of the same settings has completed are kept.

    Args:
        context: of the plain checkpoint, on one rank.
        folder: created if need be; may not be the checkpoint's own.
        with_head: encode ``lm_head`` too.
        file_bytes: bytes of the source's tensors that go into one file; default: a sixteenth, within limits.

    Raises:
        ConfigError: the model is quantized already, or a GGUF file; the folder is a file, the model's or
            inside it, or holds something else.
        WeightsError: see :func:`headrace_models.loading.loader.load_model`; or no layer fits the format.
    """
    load = load or LoadConfig()
    if (block := quantization_config(info)) is not None:
        raise ConfigError(
            f"model.model = {info.name!r}: is quantized with {block['quant_method']!r} already; name the "
            "checkpoint in floats", field="model.model",
        )  # fmt: skip
    if not info.path.is_dir():
        raise ConfigError(
            f"model.model = {info.name!r}: must be a folder or hub name: a GGUF file's tokenizer would "
            "be lost; name the checkpoint that it was made from", field="model.model",
        )  # fmt: skip
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file: name a folder that is new or empty")
    if info.path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ConfigError(f"{folder}: must be another folder than the model's, and not inside it")
    folder.mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(context.quant)
    built = Built.of(info, dataclasses.replace(context, quant=recorder))
    copied = Copied(folder)
    if file_bytes is None:
        file_bytes = min(MOST_FILE_BYTES, max(LEAST_FILE_BYTES, info.weight_bytes // FILES))
    stamp = _stamp(info, encoder, with_head, file_bytes)
    copy = _Copy(
        copied, encoder, recorder.modules, with_head, stamp, lambda name: _stays(built, name)
    )
    stored = choose_format(info.path, load).tensors(info.path, progress)
    wanted = ((name, tensor) for name, tensor, _ in stored if not built.passes_over(name))
    with torch.no_grad():
        copy.run(wanted, file_bytes)
    if not copied.encoded:
        raise WeightsError(
            f"{info.path}: no linear layer has a shape that the format takes, or all are stored transposed, "
            "as GPT-2's are"
        )
    stored_nowhere = recorder.modules - set(copied.encoded) - set(copied.left)
    copied.left += sorted(
        stored_nowhere
    )  # a tied head: readers must know that it is no layer of the format
    copy_others(info.path, folder)
    config = {**info.whole_config} if info.whole_config else {**info.config}
    config["quantization_config"] = dict(encoder.config(copied.encoded, copied.left))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return copied


def _stays(built: Built, name: str) -> bool:
    """True if a weight of the model is floats in every checkpoint: formats have no transposed weights, and
    latent attention multiplies by its heads' matrices itself."""
    match = built.weights.find(name)
    if match is None:
        return False
    return match.rule.transposed or isinstance(built.leaves[match.place.leaf], HeadProjections)


def _stamp(info: ModelInfo, encoder: WeightEncoder, with_head: bool, file_bytes: int) -> str:
    """Tells an unfinished run of the same weights, format and settings from others.

    Weights that were written anew into the same files have other times.
    """
    kind = type(encoder)
    weights = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(info.path.iterdir())
        if path.suffix in WEIGHT_SUFFIXES
    ]
    facts = (
        str(info.path.resolve()), weights, kind.__module__, kind.__qualname__, with_head, file_bytes,
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


class _Copy:
    """The files of one run. What is complete stands in a journal."""

    def __init__(
        self,
        copied: Copied,
        encoder: WeightEncoder,
        modules: set[str],
        with_head: bool,
        stamp: str,
        stays: Callable[[str], bool],
    ) -> None:
        self.copied, self.encoder, self.modules, self.with_head = (
            copied,
            encoder,
            modules,
            with_head,
        )
        self.stamp, self.stays = stamp, stays
        self.journal = copied.folder / JOURNAL
        self.files = self._files_before()

    def _files_before(self) -> dict[str, _File]:
        """Raises: ConfigError: the folder holds something else, or the journal is damaged."""
        if self.journal.is_file():
            return self._noted()
        if any(self.copied.folder.iterdir()):
            raise ConfigError(
                f"{self.copied.folder}: is not empty: name a folder that is new or empty, or that of an "
                "unfinished run"
            )
        return {}

    def _noted(self) -> dict[str, _File]:
        """The journal's files that are as they were written; others are written again."""
        try:
            found = json.loads(self.journal.read_text(encoding="utf-8"))
            stamp, files = found["stamp"], found["files"]
            noted = {name: _File(**each) for name, each in files.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(
                f"{self.journal}: is not a journal of a run: name a folder that is new or empty"
            ) from None
        if stamp != self.stamp:
            raise ConfigError(
                f"{self.copied.folder}: holds a run of another model, format or setting, or the model's "
                "files have changed since: name a folder that is new or empty"
            )
        return {name: file for name, file in noted.items() if self._is_whole(name, file)}

    def _is_whole(self, name: str, file: _File) -> bool:
        path = self.copied.folder / name
        return path.is_file() and path.stat().st_size == file.file_bytes

    def _note(self) -> None:
        """Write the journal, so that it is whole at every moment."""
        state = {"stamp": self.stamp, "files": {n: asdict(f) for n, f in self.files.items()}}
        partial = self.journal.with_name(self.journal.name + ".partial")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(self.journal)

    def run(self, stored: Iterator[tuple[str, Tensor]], file_bytes: int) -> None:
        """Write all files and their index."""
        self._note()
        pending: list[tuple[str, Tensor]] = []
        size = number = 0
        for name, tensor in stored:
            pending.append((name, tensor))
            size += tensor.nbytes
            if size >= file_bytes:
                number += 1
                self._file(number, pending)
                pending, size = [], 0
        if pending:
            self._file(number + 1, pending)
        index = {
            "metadata": {"total_size": self.copied.written_bytes},
            "weight_map": {name: path for path, f in self.files.items() for name in f.tensors},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self.copied.folder / INDEX).write_text(text, encoding="utf-8")

    def _file(self, number: int, tensors: list[tuple[str, Tensor]]) -> None:
        path = self.copied.folder / PATTERN.format(number=number)
        if path.name in self.files:
            self.copied.resumed_files += 1
        else:
            self.files[path.name] = self._write(path, tensors)
            self._note()
        self.copied.add(self.files[path.name])

    def _write(self, path: Path, tensors: list[tuple[str, Tensor]]) -> _File:
        room = _ROOM + sum(_MOST_TENSORS * (len(name) + _ENTRY) for name, _ in tensors)
        file = _File(source_bytes=sum(tensor.nbytes for _, tensor in tensors))
        with SafetensorsWriter(path, room=room, metadata={"format": "pt"}) as writer:
            for name, tensor in tensors:
                for own, value in self._encoded(name, tensor, file).items():
                    writer.add(own, value)
                    file.tensors.append(own)
            file.written_bytes = writer.num_bytes
        file.file_bytes = path.stat().st_size
        return file

    def _encoded(self, name: str, tensor: Tensor, file: _File) -> Mapping[str, Tensor]:
        module = name.removesuffix(".weight")
        if module == name or module not in self.modules or tensor.dim() != 2:
            return {name: tensor}
        found = None
        is_left = self.stays(name) or (module.rpartition(".")[2] == HEAD and not self.with_head)
        if not is_left:
            try:
                found = self.encoder.encode(tensor)
            except WeightsError as error:
                raise WeightsError(f"tensor {name!r}: {error}") from None
        if found is None:
            file.left.append(module)
            return {name: tensor}
        file.encoded.append(module)
        return {f"{module}.{suffix}": value for suffix, value in found.items()}
