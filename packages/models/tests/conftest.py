from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a hub
sys.path.insert(0, str(Path(__file__).parent))  # the shared suite is beside the tests
torch.set_num_threads(1)
