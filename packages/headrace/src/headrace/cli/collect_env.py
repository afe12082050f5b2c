"""``headrace collect-env``: a report for a bug ticket. Works when half of everything is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions

from headrace.arguments import Parser
from headrace_engine.cores import cpu_quota, format_cores, usable_cores

PACKAGES = re.compile(
    r"^(headrace.*|torch|numpy|triton|transformers|tokenizers|safetensors|huggingface.hub|fastapi|"
    r"starlette|uvicorn|pydantic|msgspec|pyzmq|jinja2|prometheus.client|llguidance|xgrammar|"
    r"outlines.core|lm.format.enforcer|nvidia.*)$",
    re.IGNORECASE,
)
SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)
VARIABLE = re.compile(
    r"^(HEADRACE_|HF_|TORCH_|OMP_|MKL_|KMP_|GOMP_|CUDA_|NVIDIA_|NCCL_|LD_PRELOAD$|LD_LIBRARY_PATH$)"
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace collect-env",
        description="Print the facts about this machine that a bug report needs. Shows no secrets.",
    )
    parser.parse_args(argv)
    for title, collect in SECTIONS:
        print(f"== {title}")
        try:
            for line in collect():
                print(line)
        except Exception as error:
            print(f"not collected ({type(error).__name__}: {error})")
        print()
    return 0


def _system() -> Iterator[str]:
    yield f"system: {platform.platform()}"
    yield f"libc: {' '.join(platform.libc_ver())}"
    yield f"python: {sys.version.split()[0]} ({sys.executable})"
    for name, command in (("gcc", "gcc"), ("g++", "g++"), ("cmake", "cmake")):
        yield f"{name}: {_first_line(command, '--version')}"


def _processor() -> Iterator[str]:
    wanted = ("Architecture", "Model name", "CPU(s)", "Thread(s) per core", "L2 cache", "L3 cache")
    for line in _output("lscpu").splitlines():
        if line.split(":")[0].strip() in wanted:
            yield re.sub(r":\s+", ": ", line.strip())
    flags = re.search(r"^Flags:(.*)$", _output("lscpu"), re.MULTILINE)
    if flags:
        useful = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
        yield "instruction sets: " + " ".join(f for f in useful if f in flags.group(1).split())
    quota = cpu_quota()
    yield f"cores that this process may use: {format_cores(usable_cores())}"
    yield f"CPU quota: {'none' if quota is None else f'{quota:g} cores'}"
    with open("/proc/meminfo", encoding="ascii") as file:
        yield from (line.strip() for line in file if line.startswith(("MemTotal", "MemAvailable")))


def _torch() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield "torch: not installed"
        return
    import torch

    yield f"torch: {torch.__version__}"
    yield f"threads: {torch.get_num_threads()}"
    yield f"CUDA: {torch.version.cuda or 'not built in'}"
    for index in range(torch.cuda.device_count()):
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}"


def _kernels() -> Iterator[str]:
    from headrace_core import plugins
    from headrace_core.ops import KernelNeed

    for name, plugin in plugins.installed("headrace.kernels").items():
        try:
            reasons = plugin.load().refuse(KernelNeed("cpu", "float32"))
        except Exception as error:
            reasons = [str(error)]
        yield f"{name}: {'; '.join(reasons) or 'usable on the CPU'}"


def _packages() -> Iterator[str]:
    found = {
        d.metadata["Name"]: d.version for d in distributions() if PACKAGES.match(d.metadata["Name"])
    }
    yield from (
        f"{name}: {version}" for name, version in sorted(found.items(), key=lambda p: p[0].lower())
    )


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if VARIABLE.match(name) and not SECRET.search(name):
            yield f"{name}={value}"


def _kept() -> Iterator[str]:
    from headrace.assembly.start_costs import cache_root

    root = cache_root(os.environ)
    if root is None:
        yield "nothing (HEADRACE_CACHE_ROOT is empty)"
        return
    yield f"folder: {root}"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        sizes = [file.stat().st_size for file in folder.iterdir()]
        yield f"{folder.name}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"


SECTIONS: tuple[tuple[str, Callable[[], Iterator[str]]], ...] = (
    ("System", _system),
    ("Processor", _processor),
    ("PyTorch", _torch),
    ("Kernels", _kernels),
    ("Packages", _packages),
    ("Environment", _environment),
    ("Kept between starts", _kept),
)


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(*command: str) -> str:
    return _output(*command).split("\n")[0] or "N/A"
