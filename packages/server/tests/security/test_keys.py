"""Keys: where they come from, the file that is read again, what is kept of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings
from headrace_server.security import keys
from headrace_server.security.keys import Key, KeyRing, admin_keys, digest, public_keys

pytestmark = pytest.mark.req("SEC-19")


def found(ring: KeyRing, key: str) -> str | None:
    key_found = ring.find(key.encode())
    return None if key_found is None else key_found.name


def test_sources(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nthree\n\n  team-a   four \nfive\n")
    settings = ServerSettings(api_key=("one",), api_key_file=str(file))
    ring = public_keys(settings, {"HEADRACE_API_KEY": "two"})
    names = [key.name for key in ring.keys]
    own = {key: f"key-{digest(key.encode()).hex()[:16]}" for key in ("three", "five")}
    assert names == ["api_key-0", "environment", own["three"], "team-a", own["five"]]
    assert found(ring, "four") == "team-a"
    assert found(ring, "team-a") is None
    assert found(ring, "five") == own["five"], "the same wherever it stands"
    assert found(ring, "") is None
    assert not admin_keys(settings, {"HEADRACE_API_KEY": "two"})
    assert found(admin_keys(settings, {"HEADRACE_ADMIN_API_KEY": "x"}), "x") == "environment"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "holds no key"), ("a b c", "line 1"), ("bad/name canary", "a name has"),
        ("a canary\na other", "used twice"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        public_keys(ServerSettings(api_key_file=str(file)), {})
    assert caught.value.field == "api_key_file"
    assert "canary" not in str(caught.value).replace(str(file), "")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be read"):
        public_keys(ServerSettings(api_key_file=str(tmp_path / "none")), {})


def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, now = tmp_path / "keys", 0.0
    settings = ServerSettings(api_key_file=str(file))

    def read(path: str) -> list[Key]:
        return keys.read_key_file(path, "api_key_file", settings)

    def replace(text: str) -> None:
        other = tmp_path / "new"
        other.write_text(text)
        os.replace(other, file)

    replace("a canary-old\n")
    ring = KeyRing([Key("fixed", digest(b"always"))], str(file), read, clock=lambda: now)
    replace("a canary-new\n")
    assert found(ring, "canary-old") == "a", "not looked at before the interval is over"
    now += keys.LOOK_EVERY
    assert (found(ring, "canary-old"), found(ring, "canary-new")) == (None, "a")
    for broken in ("", "one two three four\n"):
        replace(broken)
        now += keys.LOOK_EVERY
        with caplog.at_level(logging.ERROR):
            assert found(ring, "canary-new") == "a", "a broken file takes no key away"
        assert "the server keeps the old keys" in caplog.text
        caplog.clear()
    file.unlink()
    now += keys.LOOK_EVERY
    assert found(ring, "canary-new") == "a"
    assert found(ring, "always") == "fixed"
    replace("b canary-last\n")
    now += keys.LOOK_EVERY
    assert found(ring, "canary-last") == "b"
    assert found(ring, "canary-new") is None
    assert "canary" not in caplog.text


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever matches, and whether one does: the work is the same."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    ring = KeyRing([Key(str(i), digest(str(i).encode())) for i in range(5)])
    counts = []
    for key in ("0", "4", "none", "x" * 10_000):
        compared.clear()
        ring.find(key.encode())
        counts.append(list(compared))
    assert counts == [[(32, 32)] * 5] * 4


async def test_a_key_that_is_taken_away_stops_working(connect: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a first-key\n")
    client = connect(api_key_file=str(file))

    async def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return int((await client.get("/v1/models", headers=headers)).status_code)

    assert (await status("first-key"), await status("second-key")) == (200, 401)
    file.write_text("a second-key\n")
    ring = client._transport.app.user_middleware  # the look is due at once
    for middleware in ring:
        if "keys" in middleware.kwargs:
            middleware.kwargs["keys"]._looked -= keys.LOOK_EVERY
    assert (await status("first-key"), await status("second-key")) == (401, 200)
