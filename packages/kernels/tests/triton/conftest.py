"""Where the Triton kernels run in these tests: on a GPU if there is one, else interpreted.

``TRITON_INTERPRET`` must be set before triton is imported, and pytest reads this file before it
imports the tests beside it. Where something has imported triton before, the tests are skipped and
say so; running this folder alone always works.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
TRITON_CAME_FIRST = not HAS_GPU and (
    "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
)
if not HAS_GPU and not TRITON_CAME_FIRST:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def device() -> str:
    """What the kernels run on; skips where they cannot."""
    if TRITON_CAME_FIRST:
        pytest.skip("triton was imported before TRITON_INTERPRET=1 was set; run this folder alone")
    return "cuda" if HAS_GPU else "cpu"
