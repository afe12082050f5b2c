"""Files that go with a question in the terminal."""

from __future__ import annotations

import base64
import json
import os

import pytest

from headrace import demo
from headrace.cli import attachments
from headrace.cli.attachments import attachment, dropped_files
from headrace.cli.chat import name_files
from headrace.cli.chat_commands import run_command
from headrace.cli.conversation import AnswerReport, Conversation
from headrace_core.errors import RequestError

PNG = b"\x89PNG\r\n\x1a\npixels"


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a picture.PNG"
    path.write_bytes(PNG)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "part", "content"),
    [
        ("a.png", "image", "image_url", PNG),
        ("b.wav", "audio", "audio_url", b"RIFF\0\0\0\0WAVE"),
        ("c.mp4", "video", "video_url", b"\0\0\0\x20ftypisom"),
        ("d.mp3", "audio", "audio_url", b"\xff\xfb\x90\x00"),
    ],
)
def test_the_name_says_what_it_is(tmp_path, name, kind, part, content):
    (tmp_path / name).write_bytes(content)
    found = attachment(str(tmp_path / name))
    assert (found.name, found.kind, found.part["type"]) == (name, kind, part)
    head, _, data = found.part[part]["url"].partition(",")
    assert head.startswith(f"data:{kind}/")
    assert base64.b64decode(data) == content


@pytest.mark.parametrize(
    ("name", "content", "accepted"),
    [
        ("a.png", b"hello", "PNG, JPEG"),
        ("a.png", b"%PDF-1.7\n\xff", "PNG, JPEG"),
        ("b.wav", "вот текст ".encode() * 9, "WAV, MP3"),
        ("c.mp4", b"", "MP4, MOV"),
    ],
)
def test_what_does_not_begin_as_its_name_says_is_refused(tmp_path, name, content, accepted):
    (tmp_path / name).write_bytes(content)
    shown = run_command(Conversation(), f"/attach {tmp_path / name}")
    assert f"{name}' cannot be attached: its content is not {accepted}" in shown


def test_errors_name_the_file(picture):
    conversation = Conversation(system="Be kind.")
    run_command(conversation, f"/attach '{picture}' '{picture}'")
    conversation.add("What is it?", "A cat.", AnswerReport())
    run_command(conversation, f"/attach {picture}")
    for place in ("messages[1].content[1]", "messages[3].content[0]"):
        error = RequestError(f"{place}.image_url.url: image is damaged", param="x")
        name_files(error, conversation, "other")
        assert str(error) == f"{picture.name}: image is damaged"
    for told in (".type = 'image_url': must be one of text, refusal",
                 ": parts of type 'image_url' are not supported; this model takes text only"):  # fmt: skip
        error = RequestError(f"messages[3].content[0]{told}")
        name_files(error, conversation, demo.NAME)
        assert str(error) == (
            f"{picture.name}: this model takes no pictures; headrace chat --demo vision sees pictures"
        )
    error = RequestError("messages[3].content[1].text: must be text")
    name_files(error, conversation, demo.NAME)
    assert str(error) == "messages[3].content[1].text: must be text"


@pytest.mark.parametrize("name", ["notes.txt", "noending", "x.zip", "x.tiff", "x.svg"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(RequestError, match=r"must end as pictures'"):
        attachment(str(tmp_path / name))


def test_a_file_that_is_not_there_and_one_too_large(tmp_path, picture, monkeypatch):
    with pytest.raises(RequestError, match="No such file"):
        attachment(str(tmp_path / "missing.png"))
    monkeypatch.setattr(attachments, "MAX_BYTES", 5)
    with pytest.raises(RequestError, match="more than 5 bytes"):
        attachment(str(picture))


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "zero.png", "folder.png"):
        with pytest.raises(RequestError, match="it is not a regular file"):
            attachment(str(tmp_path / name))


@pytest.mark.parametrize("name", ["~nouser/x.png", "file://[x/a.png", "https://example.com/a.png"])
def test_names_of_no_file(name):
    with pytest.raises(RequestError, match="it names no file"):
        attachment(name)
    assert dropped_files(name) == []


def test_what_terminals_type_for_dropped_files(picture, tmp_path):
    escaped = str(picture).replace(" ", "\\ ")
    quoted, url = f"'{picture}' ", "file://" + str(picture).replace(" ", "%20")
    for line in (escaped, quoted, str(picture)):
        assert dropped_files(line) == [str(picture)]
    assert dropped_files(url) == [url]
    assert attachment(url).part == attachment(str(picture)).part
    assert dropped_files(f"{escaped} {quoted}") == [str(picture)] * 2
    (tmp_path / "notes.txt").write_text("x")
    others = (
        str(tmp_path / "notes.txt"),
        str(tmp_path / "no.png"),
        "it's",
        "",
        "Hi",
        "a" * 300 + ".png",
    )
    for line in (f"What is {escaped}", *others):
        assert dropped_files(line) == []


def test_what_is_attached_may_be_quoted(picture):
    conversation = Conversation()
    for argument in (str(picture), f'"{picture}"', f"'{picture}' '{picture}'"):
        shown = run_command(conversation, f"/attach {argument}")
        assert set(shown.split("\n")) == {f"{picture.name} goes with your next question"}
    assert len(conversation.attached) == 4


def test_a_path_that_is_no_file_is_no_command():
    shown = run_command(Conversation(), "/home/me/nothere.png what is it?")
    assert "neither a command nor a file" in shown
    assert "unknown command" not in shown


def test_it_goes_with_one_question_and_stays_in_the_conversation(picture):
    conversation = Conversation()
    assert (
        run_command(conversation, f"/attach {picture}")
        == f"{picture.name} goes with your next question"
    )
    (asked,) = conversation.messages("What is it?")
    assert [part["type"] for part in asked["content"]] == ["image_url", "text"]
    conversation.add("What is it?", "A cat.", AnswerReport())
    first, _, second = conversation.messages("Sure?")
    assert first == asked
    assert second == {"role": "user", "content": "Sure?"}


def test_clear_forgets_it_and_save_keeps_it(picture, tmp_path):
    conversation = Conversation()
    run_command(conversation, f"/attach {picture}")
    run_command(conversation, "/clear")
    assert conversation.messages("Hi") == [{"role": "user", "content": "Hi"}]
    run_command(conversation, f"/attach {picture}")
    conversation.add("What is it?", "A cat.", AnswerReport())
    run_command(conversation, f"/save {tmp_path / 'saved.json'}")
    saved = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert saved == conversation.messages()


def test_mistakes_of_the_command(tmp_path):
    conversation = Conversation()
    assert (
        run_command(conversation, "/attach")
        == "/attach needs the name of a picture, a recording or a clip"
    )
    assert "No such file" in run_command(conversation, f"/attach {tmp_path / 'x.png'}")
    assert conversation.attached == []
