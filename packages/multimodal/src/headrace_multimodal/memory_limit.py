"""The limit on its own memory that a decoder's process sets."""

from __future__ import annotations

import resource


def limit_memory(num_bytes: int) -> None:
    """Bound this process's address space; a limit that it was started under, if lower, holds."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
