"""AWQ and GPTQ copies of a checkpoint: ``packed_checkpoints.py FOLDER MODEL [awq gptq]``.

Blocks' linear layers have 4 bits and groups of 128, as such checkpoints are published; each weight is rounded
by itself, which is enough for speed and for nothing else. Embedding and head stay in bfloat16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_testing.model.quantized_layers import awq_tensors, gptq_tensors

GROUP = 128
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
             "lm_head": False, "checkpoint_format": "gptq"},
}  # fmt: skip


def make(folder: Path, model: str, method: str) -> Path:
    """Write ``MODEL-METHOD`` below ``folder`` unless it is there; returns its path."""
    path = folder / f"{model}-{method}"
    if (path / "model.safetensors").is_file():
        return path
    path.mkdir(exist_ok=True)
    for file in (folder / model).iterdir():
        if file.suffix == ".json":
            shutil.copy(file, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": CONFIGS[method], "torch_dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(folder / model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made = _layer(method, weight.float())
            tensors |= {f"{name.removesuffix('weight')}{part}": t for part, t in made.items()}
        else:
            tensors[name] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _layer(method: str, weight: Tensor) -> dict[str, Tensor]:
    if method == "awq":
        return awq_tensors(weight, group_size=GROUP)[0]
    return gptq_tensors(weight, bits=4, group_size=GROUP, symmetric=True)[0]


if __name__ == "__main__":
    for each in sys.argv[3:] or CONFIGS:
        print(make(Path(sys.argv[1]), sys.argv[2], each))
