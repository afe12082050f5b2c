"""Reasoning in a form that clients carry without looking into it: ``encrypted_content``.

Clients that have nothing stored here (``store: false``) keep this and drop the text. It is not encrypted:
the client got the same text beside it, and may send any other as well.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "hr1."


def sealed(text: str) -> str:
    """Reasoning as opaque content."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def opened(content: str) -> str | None:
    """The reasoning in opaque content; None: another server made it."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content[len(_MARK) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
