"""Files that begin with a byte order mark, as editors on Windows write them: the mark is ignored."""

from __future__ import annotations

from pathlib import Path

from headrace_server import ServerSettings
from headrace_server.security.keys import read_key_file
from headrace_server.settings import read_chat_template

BOM = b"\xef\xbb\xbf"


def test_keys(tmp_path: Path) -> None:
    marked, plain = tmp_path / "marked", tmp_path / "plain"
    plain.write_bytes(b"secret-key-of-many-characters\n")
    marked.write_bytes(BOM + plain.read_bytes())
    read = [read_key_file(str(path), "api_key_file", ServerSettings()) for path in (plain, marked)]
    assert [key.digest for key in read[0]] == [key.digest for key in read[1]]


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(BOM + b"{{ messages }}")
    assert read_chat_template(ServerSettings(chat_template=str(path))) == "{{ messages }}"
