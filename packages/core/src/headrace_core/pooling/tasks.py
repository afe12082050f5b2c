"""Tasks of pooling models, and pooling types."""

from __future__ import annotations

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify", "plugin")
EMBED_TASKS = ("embed", "token_embed")
CLASSIFY_TASKS = ("classify", "score", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
"""Tasks whose result has a row for each token of the prompt."""
POOLING_TYPES = ("LAST", "ALL", "CLS", "STEP", "MEAN")
