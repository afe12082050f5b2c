"""Test modules of this folder share a module that is beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
