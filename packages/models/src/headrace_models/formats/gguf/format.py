"""The weights of GGUF files, in blocks as they are stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_models.formats.content import Content
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.gguf.config import Metadata
from headrace_models.formats.gguf.files import gguf_file
from headrace_models.formats.gguf.header import PLAIN, GGUFTensor, read_parts
from headrace_models.formats.gguf.names import DIALECTS, Dialect, Named, checkpoint_name

_DTYPES = dict(zip(PLAIN, (torch.float32, torch.float16, torch.bfloat16), strict=True))


class GGUFFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    A weight in blocks comes as uint8 [..., bytes of a row]: the quantization method ``gguf`` knows what they
    mean, from the ``quantization_config`` of :func:`~headrace_models.formats.gguf.config.gguf_quantization`.
    Other tensors come in the file's dtype.

    Args:
        load: ``safetensors_load_strategy`` decides between mapping files and reading them whole.
    """

    name = "gguf"

    def __init__(self, load: LoadConfig) -> None:
        extra_config(load, {})
        self.eager = load.safetensors_load_strategy == "eager"

    def recognises(self, path: Path) -> bool:
        return gguf_file(path) is not None

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file; UnsupportedModel naming the architecture."""
        file = gguf_file(path)
        if file is None:
            raise WeightsError(f"{path}: holds no GGUF file, or several: name one")
        header = read_parts(file)
        said = Metadata(header)
        dialect = DIALECTS.get(said.architecture)
        if dialect is None:
            raise UnsupportedModel(f"{file}: GGUF files of {said.architecture!r} are not supported")
        reader = _Reader(said, dialect)
        total, done = sum(tensor.num_bytes for tensor in header.tensors), 0
        for part, tensors in itertools.groupby(header.tensors, lambda tensor: tensor.file):
            content = Content(part, eager=self.eager)
            for tensor in tensors:
                for name, value in reader.read(content, tensor):
                    yield name, value, part
                done += tensor.num_bytes
                progress(LoadProgress("weights", done, total, "B", part.name))
                content.let_go(tensor.offset, tensor.num_bytes)


class _Reader:
    """Undoes what the converter did to each tensor."""

    def __init__(self, said: Metadata, dialect: Dialect) -> None:
        self.dialect = dialect
        heads = said.needed("attention.head_count")
        kv_heads = said.integer("attention.head_count_kv") or heads
        self.heads = {"attn_q": heads, "attn_k": kv_heads} if dialect.permuted else {}

    def read(self, content: Content, tensor: GGUFTensor) -> Iterator[tuple[str, Tensor]]:
        try:
            named = checkpoint_name(self.dialect, tensor.name)
        except UnsupportedModel as error:
            raise WeightsError(f"{tensor.file}: {error}") from error
        if named is None:
            return
        if "{}" not in named.name:
            yield named.name, self._restored(named, self._stored(content, tensor), tensor.file)
            return
        if len(tensor.shape) != 3:
            raise WeightsError(
                f"{tensor.file}: tensor {tensor.name!r} {list(tensor.shape)}: must be of three "
                "dimensions, expert by expert"
            )
        size = tensor.num_bytes // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            own = tensor._replace(
                shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size
            )
            yield named.name.replace("{}", str(expert)), self._stored(content, own)

    @staticmethod
    def _stored(content: Content, tensor: GGUFTensor) -> Tensor:
        """The tensor as stored, a view of the file: of blocks its rows' bytes."""
        dtype = _DTYPES.get(tensor.type.name, torch.uint8)
        flat = content.view(tensor.name, dtype, tensor.offset, tensor.num_bytes)
        if tensor.type.name in PLAIN:
            return flat.view(tensor.shape)
        row = tensor.shape[-1] // tensor.type.elements * tensor.type.num_bytes
        return flat.view(*tensor.shape[:-1], row)

    def _restored(self, named: Named, value: Tensor, path: Path) -> Tensor:
        is_shifted = named.stem.endswith("norm") and self.dialect.norm_offset
        if value.dtype == torch.uint8 and (is_shifted or not named.name.endswith(".weight")):
            raise WeightsError(
                f"{path}: tensor {named.name!r} is stored in blocks: norms and biases must be F32, F16 or "
                "BF16"
            )
        heads = self.heads.get(named.stem)
        if heads is not None:
            if value.shape[0] % (2 * heads):
                raise WeightsError(
                    f"{path}: tensor {named.name!r} has {value.shape[0]} rows: must be an even "
                    f"number for each of {heads} heads"
                )
            return _halves_apart(value, heads)
        if is_shifted:
            return value.float() - self.dialect.norm_offset
        if named.stem == "ffn_gate_inp_shexp" and value.dim() == 1:
            return value[None]
        return value


def _halves_apart(value: Tensor, heads: int) -> Tensor:
    """Rows of each head from (turning pairs side by side) to (first halves, then second halves)."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
