from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported by path (importlib mode): their helper module is found here.
sys.path.insert(0, str(Path(__file__).parent))
