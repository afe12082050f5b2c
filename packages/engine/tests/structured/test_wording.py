"""Foreign messages are shown as far as they are harmless."""

import pytest

from headrace_engine.structured.wording import place, plain


@pytest.mark.req("SEC-09")
@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('at 1(8): unknown name: "foo"\n   1 | start', 'unknown name: "foo"'),
        ("regex parse error:\n    (a\n    ^\nerror: unclosed group", "unclosed group"),
        ("min/maxProperties only supported when", "min/maxProperties only supported when"),
        ("cannot open /usr/lib/python3/x.so", "cannot open"),
        ("panic: called `Result::unwrap()`\n<backtrace>", ""),
        ("object at 0x7f3a12345678 failed", ""),
        ('File "/root/a.py", line 3\nTraceback (most recent', ""),
        ("", ""),
    ],
)
def test_plain(message, shown):
    assert plain(message) == shown


def test_places():
    assert place('at 3(8): unknown name: "foo"') == (3, 8)
    assert place("2(8): lexer error") == (2, 8)
    assert place("line 4: no") == (4, 0)
    assert place("no such thing") is None
