"""Identity of media items: a 256-bit hash over content, shape and options.

The hash is a key of shared caches, so it must be collision-resistant, and must tell apart equal
bytes of another shape or type (a 2x8 picture is not a 4x4 one).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def content_hash(
    modality: str, data: npt.NDArray[Any], options: Mapping[str, Any] | None = None
) -> str:
    """SHA-256 in hex.

    Args:
        modality: ``image``, ``audio`` or ``video``.
        data: decoded content, any shape and dtype.
        options: whatever else changes what the model sees; JSON values.
    """
    header = json.dumps(
        [modality, data.dtype.str, list(data.shape), dict(options or {})], sort_keys=True
    ).encode()
    digest = hashlib.sha256(len(header).to_bytes(8, "little"))
    digest.update(header)
    digest.update(np.ascontiguousarray(data).data)
    return digest.hexdigest()
