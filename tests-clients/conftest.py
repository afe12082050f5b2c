"""Where the server is."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    found = os.environ.get("HEADRACE_URL")
    if not found:
        pytest.skip("HEADRACE_URL says where the server is; nox -s clients starts one")
    return found


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ.get("HEADRACE_MODEL", "headrace-demo")
