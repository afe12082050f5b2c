"""Heads of requests that two servers could read in two ways, which h11 takes: they are refused.

Where a proxy and this server do not agree where a request ends, what one takes for a body is the next
request to the other, with whatever rights the proxy gives it ("request smuggling"). h11 prefers chunks to a
length, merges equal lengths, joins folded lines, and takes LF for CR LF, as RFC 9112 allows; a server that
is asked directly loses nothing by refusing them, which the RFC allows too.
"""

from __future__ import annotations

import re

import h11

_END = re.compile(rb"\n\r?\n")
_ODD_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")
_FRAMING = re.compile(rb"\n(content-length|transfer-encoding)[ \t]*:([^\r\n]*)", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """A server's side of a connection, which refuses ambiguous heads before h11 reads them."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See :meth:`h11.Connection.next_event`.

        Raises:
            h11.RemoteProtocolError: also for what is ambiguous; the connection must be closed.
        """
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            end = _END.search(data)
            problem = _problem(data[: end.end()]) if end is not None else ""
            if problem:
                raise h11.RemoteProtocolError(problem)
        return super().next_event()


def _problem(head: bytes) -> str:
    """The ambiguity in a request's head, its last empty line included; "": there is none."""
    if _ODD_LINE.search(head):
        return "a line is folded, or does not end with CR LF"  # sections 2.2 and 5.2
    framing = [(name.lower(), value) for name, value in _FRAMING.findall(head)]
    if len(framing) > 1:
        return "its length is said more than once"  # section 6.3
    for name, value in framing:
        if name == b"content-length" and b"," in value:
            return "its length is said more than once"
        if name == b"transfer-encoding" and head.partition(b"\r")[0].endswith(b"HTTP/1.0"):
            return "HTTP/1.0 has no chunks"  # section 6.1
    return ""
