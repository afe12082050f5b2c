"""Files beside ``config.json`` in which quantizers say what they did. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_models.config.json_object import read_object

KEYS = ("quantization_config", "compression_config")
"""Keys of ``config.json``, which wins over the files."""

FILES: Mapping[str, str | None] = {
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
    "quantization_config.json": None,
    "hf_quant_config.json": "modelopt",
}
"""File -> the method of one that names none; None: it must name one. The first that is there counts."""


def with_quantization(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """``config.json``'s settings, with the ``quantization_config`` of a file beside it if they have none.

    Args:
        path: the checkpoint's folder, or a GGUF file, which has none beside it.

    Raises:
        UnsupportedModel: such a file cannot be read.
    """
    if not path.is_dir() or any(config.get(key) for key in KEYS):
        return config
    for name, method in FILES.items():
        if (path / name).is_file():
            found = read_object(path / name, required=True)
            inner = found.get("quantization_config")
            block = dict(inner) if isinstance(inner, Mapping) else found
            if method is not None:
                block.setdefault("quant_method", method)
            return {**config, "quantization_config": block}
    return config
