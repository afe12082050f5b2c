"""Vectors of media that engines hand to each other: an encoder's (producer) are taken by others (consumers).

Both name an item's vectors by the model and the item's hash. A transfer that fails is logged and costs
the work of a tower, never the request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import ECConnector, MediaInput
from headrace_engine.execution.media import as_tensor
from headrace_engine.given_vectors import INDEX_WIDTH, RETAINED

logger = logging.getLogger(__name__)


def model_name(config: Mapping[str, Any], dtype: str, weight_bytes: int) -> str:
    """A name that is the same in two engines with the same model: 256 bits in hex.

    Args:
        config: ``config.json``, whole.
        dtype: the activations'.
        weight_bytes: of the checkpoint's tensors.
    """
    facts = json.dumps([dict(config), dtype, weight_bytes], sort_keys=True, default=repr)
    return sha256(facts.encode()).hexdigest()


class EncoderTransfer:
    """One worker's end.

    Args:
        connector: carries the vectors.
        is_producer: also offers those that its towers make.
        model: see :func:`model_name`.
        dtype: the activations'.
        hidden_size: the language model's; rows are one or several of it wide.
        device: where the model is.
    """

    def __init__(
        self,
        connector: ECConnector,
        *,
        is_producer: bool,
        model: str,
        dtype: str,
        hidden_size: int,
        device: str,
    ) -> None:
        self._connector, self.is_producer = connector, is_producer
        self._model, self._dtype, self._hidden_size = model, dtype, hidden_size
        self._device = torch.device(device)
        self.num_loaded = self.num_saved = 0
        """Items that were taken from and offered to others."""

    def load(self, item: MediaInput) -> Tensor | None:
        """An item's vectors [num_vectors, W]; None: nobody offers them, or they are damaged."""
        try:
            array = self._connector.load(self._key(item))
        except OSError as error:
            logger.warning("vectors of media could not be loaded: %s", error)
            return None
        if array is None:
            return None
        if not self._fits(array, item):
            logger.warning(
                "vectors of media that were loaded are %s %s, not [%d, %d] of %s",
                array.dtype, list(array.shape), item.num_vectors, self._hidden_size, self._dtype,
            )  # fmt: skip
            return None
        self.num_loaded += 1
        return as_tensor(array, self._device)

    def save(self, item: MediaInput, vectors: Tensor) -> None:
        """Offer an item's vectors, if this engine is a producer."""
        if not self.is_producer:
            return
        rows = vectors.detach().to("cpu", getattr(torch, self._dtype)).contiguous()
        data = rows.view(torch.uint8).numpy().tobytes()
        try:
            self._connector.save(self._key(item), PackedArray(self._dtype, tuple(rows.shape), data))
        except OSError as error:
            logger.warning("vectors of media could not be saved: %s", error)
            return
        self.num_saved += 1

    def close(self) -> None:
        """Close the connector."""
        self._connector.close()

    def _key(self, item: MediaInput) -> str:
        return sha256(f"{self._model}:{item.modality}:{item.content_hash}".encode()).hexdigest()

    def _fits(self, array: PackedArray, item: MediaInput) -> bool:
        shape, behind = array.shape, INDEX_WIDTH if RETAINED in item.inputs else 0
        return (
            array.dtype == self._dtype
            and len(shape) == 2
            and shape[0] == item.num_vectors
            and shape[1] > behind
            and (shape[1] - behind) % self._hidden_size == 0
        )
