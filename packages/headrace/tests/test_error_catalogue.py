"""Every code of an error is explained, in the codes' order."""

from __future__ import annotations

import pytest

from headrace.error_catalogue import CATALOGUE
from headrace_core.errors import ERROR_CODES


@pytest.mark.req("REL-11")
def test_every_code_is_explained() -> None:
    assert [entry.code for entry in CATALOGUE] == [code.code for code in ERROR_CODES]
    for entry in CATALOGUE:
        assert entry.title
        assert entry.cause.endswith(".")
        assert entry.hint.endswith(".")
