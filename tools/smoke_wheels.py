"""Install built wheels into fresh environments and use them: ``smoke_wheels.py DIST TORCH``.

Four sets, each in an environment of its own: the kernels alone, the communicators alone, the server alone
with a fake engine (which must bring no torch), and ``headrace[all]``. DIST is the folder of the wheels;
TORCH is a folder in which torch is installed (``pip install --target``), which all environments but the
server's see beside their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = """
import torch
from headrace_core.ops import KernelNeed, bind_ops
ops = bind_ops(KernelNeed("cpu", "float32"), choose={"rms_norm": "cpu", "linear": "cpu"})
x, w = torch.randn(3, 64), torch.rand(64)
expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
assert torch.allclose(ops.rms_norm(x, w, 1e-6), expected, atol=1e-5)
weight = torch.randn(48, 64)
assert torch.allclose(ops.linear(x, ops.linear.pack(weight)), x @ weight.T, atol=1e-4)
print("kernels alone:", ops.providers["linear"])
"""

DISTRIBUTED = """
import sys
from headrace_distributed.shm import library
from headrace_distributed.shm.ring import RingReader, RingWriter
if sys.platform == "linux":
    assert library.available(), "the wheel lacks the native library"
    with RingWriter(1) as writer, RingReader(str(writer.handle), 0) as reader:
        writer.send(b"hello")
        assert reader.receive() == b"hello"
    print("communicators alone: shared memory works")
"""

SERVER = """
import importlib.util
assert importlib.util.find_spec("torch") is None, "the server's wheel brought torch"
assert importlib.util.find_spec("transformers") is None
from headrace_testing.fakes.engine import FakeEngine
from headrace_server.app import create_app
from headrace_server.settings import ServerSettings
paths = create_app(FakeEngine(), ServerSettings()).openapi()["paths"]
assert "/v1/chat/completions" in paths, paths
print("server alone:", len(paths), "routes, no torch")
"""

EVERYTHING = """
from headrace import LLM, SamplingParams
with LLM() as llm:
    [output] = llm.chat([[{"role": "user", "content": "What is 2 + 3?"}]],
                        SamplingParams(temperature=0, max_tokens=24))
print("headrace[all]:", output.outputs[0].text)
assert "5" in output.outputs[0].text
"""


def smoke(dist: Path, torch: Path | None, requirements: Sequence[str], code: str) -> None:
    """Make a fresh environment, install the requirements from the wheels, run the code."""
    with tempfile.TemporaryDirectory(prefix="headrace-smoke-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        if torch is not None:
            site = next(Path(folder).rglob("site-packages"))
            (site / "torch.pth").write_text(f"{torch.resolve()}\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                        "--find-links", str(dist), *requirements], check=True)  # fmt: skip
        subprocess.run([python, "-I", "-c", code], check=True, cwd=folder, timeout=300)


def main() -> None:
    dist, torch = Path(sys.argv[1]), Path(sys.argv[2])
    sets = (
        (torch, ["headrace[all]"], EVERYTHING),
        (None, ["headrace-server", "headrace-testing"], SERVER),
        (torch, ["headrace-kernels"], KERNELS),
        (torch, ["headrace-distributed"], DISTRIBUTED),
    )
    with ThreadPoolExecutor(2) as pool:  # pip works on one core
        for done in [pool.submit(smoke, dist, *one) for one in sets]:
            done.result()


if __name__ == "__main__":
    main()
