"""Names, shapes and dtypes in a checkpoint's files, before a weight is read. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_core.config import LoadConfig
from headrace_core.errors import UnsupportedModel
from headrace_models.checkpoint.quantization_files import KEYS
from headrace_models.config.json_object import read_object
from headrace_models.formats.gguf.config import (
    gguf_config,
    gguf_generation_config,
    gguf_quantization,
)
from headrace_models.formats.gguf.files import SUFFIX, gguf_file
from headrace_models.formats.gguf.header import read_gguf, read_parts
from headrace_models.formats.header import TensorEntry
from headrace_models.formats.index import (
    CONSOLIDATED,
    PICKLES,
    PT_FILES,
    SHARD,
    checkpoint_files,
    checkpoint_headers,
    file_bytes,
)
from headrace_models.formats.mistral_config import has_params, mistral_config


def stated_config(
    path: Path, *, config_folder: str | None = None, load_format: str = "auto"
) -> dict[str, Any]:
    """``config.json``: of another folder, of the checkpoint's, or made of Mistral's ``params.json`` or
    of a GGUF file's metadata. Of a GGUF file's weights its ``quantization_config`` is told by the file.

    Raises:
        UnsupportedModel: there is none, or it cannot be read. WeightsError: the GGUF file is damaged.
    """
    if config_folder is not None:
        stated = read_object(Path(config_folder).expanduser() / "config.json", required=True)
        return _with_blocks(stated, path, load_format)
    if has_params(path, load_format):
        return mistral_config(path)
    if path.is_dir() and (path / "config.json").is_file():
        stated = read_object(path / "config.json", required=True)
        return _with_blocks(stated, path, load_format)
    file = gguf_file(path)
    if file is not None:
        return gguf_config(read_parts(file))
    several = [found.name for found in sorted(path.glob("*.gguf"))] if path.is_dir() else []
    if several:
        raise UnsupportedModel(
            f"{path}: holds several GGUF files ({', '.join(several[:5])}): name one as the model"
        )
    return read_object(path / "config.json", required=True)


def _with_blocks(stated: dict[str, Any], path: Path, load_format: str) -> dict[str, Any]:
    """Another checkpoint's config, with the ``quantization_config`` of the GGUF file whose weights are read;
    as it is where none is read."""
    if gguf_file(path) is None:
        return stated
    files = weight_files(path, LoadConfig(load_format=load_format))
    if not files or files[0].suffix.lower() != SUFFIX:
        return stated
    kept = {key: value for key, value in stated.items() if key not in KEYS}
    blocks = gguf_quantization(read_parts(files[0]))
    return kept if blocks is None else {**kept, "quantization_config": blocks}


def stated_generation_config(path: Path) -> dict[str, Any]:
    """``generation_config.json``, or what a GGUF file's metadata says of it; {} without either.

    Raises:
        UnsupportedModel: it cannot be read. WeightsError: the GGUF file is damaged.
    """
    file = path if path.is_file() else None
    if file is None and not (path / "config.json").is_file():
        file = gguf_file(path)
    if file is not None:
        return gguf_generation_config(read_gguf(file))
    return read_object(path / "generation_config.json", required=False)


def stored_tensors(path: Path, load: LoadConfig) -> tuple[TensorEntry, ...]:
    """Every tensor of the checkpoint, as the headers of its files say. Of formats without headers
    one entry for each file, which has no name and no dtype.

    Raises:
        WeightsError: a header is damaged.
    """
    files = weight_files(path, load)
    if files and files[0].suffix.lower() == SUFFIX:
        return tuple(
            TensorEntry(each.name, each.type.name, each.shape, each.offset, each.num_bytes)
            for each in read_parts(files[0]).tensors
        )
    if has_params(path, load.load_format):
        headers = checkpoint_headers(path, CONSOLIDATED)
        return tuple(entry for entries in headers.values() for entry in entries)
    if files and files[0].suffix == ".safetensors" and not files[0].name.startswith(SHARD):
        return tuple(entry for entries in checkpoint_headers(path).values() for entry in entries)
    return tuple(TensorEntry("", "", (), 0, file_bytes(each)) for each in files)


def weight_files(path: Path, load: LoadConfig) -> tuple[Path, ...]:
    """The files that will be read, by what the user asks for and what there is; () if none is known.

    Raises:
        WeightsError: an index, or the header of a GGUF file, is damaged.
    """
    wanted, file = load.load_format.lower(), gguf_file(path)
    if path.is_file() or wanted == "gguf":
        return _parts(file)
    if has_params(path, wanted):
        return checkpoint_files(path, CONSOLIDATED)
    if wanted != "pt" and (files := checkpoint_files(path)):
        return files
    return (
        checkpoint_files(path, PICKLES)
        or checkpoint_files(path, PT_FILES)
        or _parts(file)
        or tuple(sorted(path.glob(f"{SHARD}*.safetensors")))
        or tuple(sorted(path.glob("*.tensors")))
    )


def _parts(file: Path | None) -> tuple[Path, ...]:
    if file is None:
        return ()
    return tuple(dict.fromkeys([file, *(tensor.file for tensor in read_parts(file).tensors)]))
