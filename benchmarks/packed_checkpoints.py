"""AWQ and GPTQ copies of a checkpoint: ``packed_checkpoints.py FOLDER MODEL [awq gptq]``.

Blocks' linear layers have 4 bits and groups of 128, as such checkpoints are published; each weight is rounded
by itself, which is enough for speed and for nothing else. Embedding and head stay in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
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


def main() -> None:
    """Write the named copies of a checkpoint, or all of them."""
    parser = argparse.ArgumentParser(description="Write packed copies of a checkpoint.")
    parser.add_argument("folder", type=Path, help="where checkpoints.py wrote the checkpoint")
    parser.add_argument("model", help="its name there; copies are called MODEL-METHOD")
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help=f"of {', '.join(CONFIGS)} (all)"
    )
    args = parser.parse_args()
    if not (args.folder / args.model / "model.safetensors").is_file():
        parser.error(
            f"{args.folder / args.model} is no checkpoint: write it by checkpoints.py first"
        )
    for method in args.methods:
        if method not in CONFIGS:
            parser.error(f"there is no method {method!r}; there are {', '.join(CONFIGS)}")
    for method in args.methods or CONFIGS:
        print(make(args.folder, args.model, method))


if __name__ == "__main__":
    main()
