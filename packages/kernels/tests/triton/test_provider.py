"""What the provider offers, refuses and where it stands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_core.ops import OP_NAMES, OPTIONAL_OP_NAMES, KernelNeed, bind_ops
from headrace_kernels.triton.provider import PROVIDER

CPU, CUDA = KernelNeed("cpu", "float32"), KernelNeed("cuda", "bfloat16")


def test_is_an_entry_point() -> None:
    from headrace_core import plugins

    assert plugins.load("headrace.kernels", "triton") is PROVIDER


def test_serves_cuda_first() -> None:
    assert PROVIDER.name == "triton"
    assert PROVIDER.refuse(CUDA) == []
    assert PROVIDER.priority(CUDA) == 100


def test_is_last_on_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where kernels can be interpreted, only who asks gets them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert PROVIDER.refuse(CPU) == []
    assert PROVIDER.priority(CPU) == -1
    assert "triton" not in bind_ops(CPU).providers.values()
    assert bind_ops(CPU, choose={"rms_norm": "triton"}).providers["rms_norm"] == "triton"


def test_refuses_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert PROVIDER.refuse(CPU) == [
        "device 'cpu' is served only by the interpreter (TRITON_INTERPRET=1)"
    ]
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        bind_ops(CPU, choose={"rms_norm": "triton"})


@pytest.mark.parametrize(
    ("need", "part"),
    [
        (KernelNeed("xpu", "float16"), "device 'xpu' is not supported"),
        (KernelNeed("cuda", "float64"), "dtype 'float64' is not supported"),
    ],
)
def test_refuses_by_name(need: KernelNeed, part: str) -> None:
    (reason,) = PROVIDER.refuse(need)
    assert part in reason


def test_refuses_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_triton(name: str, *rest: Any) -> Any:
        return None if name == "triton" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_triton)
    assert PROVIDER.refuse(CUDA) == [
        "triton is not installed (pip install 'headrace-kernels[triton]')"
    ]


def test_offers_known_ops_only() -> None:
    offered = PROVIDER.operations(CUDA)
    known = {*OP_NAMES, *OPTIONAL_OP_NAMES}
    assert set(offered) <= known
    assert known - set(offered) == {
        "add",
        "clamp",
        "copy_rows",
        "embedding",
        "index_tokens",
        "key_share",
        "linear",
        "lse_correction",
        "mlstm",
        "round_k_quant",
        "sample",
        "scale",
        "to_float32",
        "top_logprobs",
    }


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_batch_invariance_is_asked_for_by_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("HEADRACE_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", value)
    assert PROVIDER.row_invariant(CUDA) is expected
    attention = PROVIDER.operations(CUDA)["paged_attention"]
    assert attention.keywords == {"batch_invariant": expected}


def test_importing_it_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys; import headrace_kernels.triton.provider as p; from headrace_core.ops import "
        "KernelNeed; p.PROVIDER.refuse(KernelNeed('cuda', 'float16')); "
        "assert not {'triton', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=60)
