"""The tests' own packers are modules beside them."""

from __future__ import annotations

import sys
from pathlib import Path

folder = Path(__file__).parent
if str(folder) not in sys.path:
    sys.path.insert(0, str(folder))
