"""GET /docs: the page and what it loads, over a real socket; in a browser where there is one."""

from __future__ import annotations

import asyncio
import hashlib
import html.parser
import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2
import pytest

from headrace_server.routes.docs import FILES

FOLDER = Path(str(files("headrace_server") / "swagger_ui"))


class References(html.parser.HTMLParser):
    """Collects the addresses that a page loads, and the code in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._open = tag
        self.loaded += [v for k, v in attrs if k in ("src", "href") and v and tag != "a"]
        self.inline += [k for k in values if k == "style" or k.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)


async def test_everything_comes_from_the_server_itself(live: Any) -> None:
    server = await live()
    async with httpx2.AsyncClient() as client:
        page = await client.get(server.url + "/docs")
        assert page.headers["content-type"].startswith("text/html")
        found = References(page.text)
        assert not found.inline
        assert {
            urlsplit(one).path.rpartition("/")[2] for one in found.loaded if ":" not in one
        } == {*FILES}
        for one in found.loaded:
            if one == "data:,":
                continue
            assert not urlsplit(one).netloc, one
            answer = await client.get(urljoin(server.url + "/docs", one))
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert len(answer.content) > 100
        assert (await client.get(server.url + "/redoc")).status_code == 404
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy.pop("img-src") == "'self' data:"
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}


async def test_behind_a_prefix(live: Any) -> None:
    server = await live(root_path="/api")
    async with httpx2.AsyncClient() as client:
        page = await client.get(server.url + "/api/docs")
        for one in References(page.text).loaded:
            if one != "data:,":
                url = urljoin(server.url + "/api/docs", one)
                assert urlsplit(url).path.startswith("/api/")
                assert (await client.get(url)).status_code == 200


async def test_keys_guard_the_page_as_other_routes(connect: Any) -> None:
    client = connect(api_key=["secret"])
    for path in ("/docs", *(f"/docs/{name}" for name in FILES)):
        assert (await client.get(path)).status_code == 401
        allowed = await client.get(path, headers={"Authorization": "Bearer secret"})
        assert allowed.status_code == 200


def test_the_files_are_those_that_are_recorded() -> None:
    told = dict(
        re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", (FOLDER / "README.md").read_text(), re.M)
    )
    assert set(told) == set(FILES) - {"start.js"}
    for name, digest in told.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
    for name in ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"):
        assert (FOLDER / name).read_text()


async def test_a_browser_shows_the_routes(live: Any, tmp_path: Path) -> None:
    """Every other host is out of reach: the page asks nothing of them, and the policy stops nothing."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    server = await live()
    log = tmp_path / "net.json"
    running = await asyncio.create_subprocess_exec(
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={tmp_path}/user",
        f"--log-net-log={log}", "--enable-logging=stderr", "--virtual-time-budget=30000", "--dump-dom",
        server.url + "/docs", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(100):
            dom, said = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    text = dom.decode()
    assert "operations-" in text, said.decode()[-2000:]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        assert path in text.replace("\u200b", "").replace("<wbr>", "").replace(
            "&ZeroWidthSpace;", ""
        )
    told = [line for line in said.decode().splitlines() if "CONSOLE" in line]
    assert not [line for line in told if "Content Security Policy" in line], told
    events = json.loads(log.read_text())["events"] if log.read_text().rstrip().endswith("}") else []
    asked = {e.get("params", {}).get("url", "") for e in events}
    own = {one for one in asked if one.startswith(server.url)}
    assert len(own) >= len(FILES) + 2
    by_page = {
        event["params"]["url"]
        for event in events
        if server.url in str(event.get("params", {}).get("initiator", ""))
    }
    assert by_page
    assert all(one.startswith((server.url, "data:")) for one in by_page), by_page
