"""Fixtures: checkpoints made once a session, engines and servers that leave nothing behind."""

from __future__ import annotations

import functools
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpcore2
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import RunningServer, serving


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """transformers and headrace share two cores with whatever else runs."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_reading_of_certificates() -> Iterator[None]:
    """Clients share the context that they would each make: all authorities of the machine, 20 ms of work.
    Hundreds of clients ask a server that has no TLS."""
    make = httpcore2.default_ssl_context

    @functools.cache
    def made(trust_env: bool, *variables: str | None) -> ssl.SSLContext:
        return make(_trust_env=trust_env)

    def context(*, _trust_env: bool = True) -> ssl.SSLContext:
        return made(_trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", context)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The demo model with tool calls, of all tests that take a server as it is and leave it so."""
    with serving("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as running:
        yield running
