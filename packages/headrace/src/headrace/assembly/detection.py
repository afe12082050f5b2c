"""NVIDIA GPUs as a platform, and the platform of a machine where the user names none."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_core.platform import CpuPlatform, Platform


@dataclass(frozen=True, slots=True)
class CudaPlatform:
    """NVIDIA GPUs through CUDA."""

    device: str = "cuda"
    attention_order: Sequence[str] = ("paged", "varlen", "sdpa")
    default_block_size: int = 16
    default_max_num_seqs: int = 256
    default_max_num_batched_tokens: int = 8192
    default_max_num_shared_tokens: int = 8192

    def dtype_for(self, checkpoint_dtype: str) -> str:
        """float32 checkpoints run in float16: tensor cores have no float32."""
        return "float16" if checkpoint_dtype == "float32" else checkpoint_dtype

    def available_memory(self) -> int:
        import torch

        free, _total = torch.cuda.mem_get_info()
        return int(free)


def detect() -> Platform:
    """The platform of this machine: CUDA if torch sees a GPU, else the CPU.

    Torch is imported (a second) only if it was built for GPUs.
    """
    folder = torch_folder()
    if folder is not None and is_for_cpus(folder):
        return CpuPlatform()
    try:
        import torch
    except ImportError:
        return CpuPlatform()
    return CudaPlatform() if torch.cuda.is_available() else CpuPlatform()


def torch_folder() -> Path | None:
    """Folder of the installed torch, which is not imported; None: there is none."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def is_for_cpus(folder: Path) -> bool:
    """True if a torch has its CPU library and none for GPUs, by its files.

    Args:
        folder: of torch.
    """
    names = [path.name for path in (folder / "lib").glob("*torch_*")]
    has_cpu = any("torch_cpu" in name for name in names)
    return has_cpu and not any("torch_cuda" in name or "torch_hip" in name for name in names)
