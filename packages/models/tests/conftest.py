from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a hub
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(
    prefix="headrace-code-"
)  # of checkpoints' own code
sys.path.insert(0, str(Path(__file__).parent))  # the shared suite is beside the tests
torch.set_num_threads(1)
