"""Folders that hold pipes, sockets and devices under the names of files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.platform import CpuPlatform
from headrace_models.checkpoint.read_ahead import read_ahead
from headrace_models.checkpoint.regular_file import open_regular, refuse_special_files
from headrace_models.formats.content import Content
from headrace_models.formats.contents import stored_tensors
from headrace_models.formats.gguf.header import read_gguf
from headrace_models.formats.header import read_header
from headrace_models.formats.pickled import read_pickled
from headrace_models.resolve import resolve

KINDS = {"pipe": "named pipe", "socket": "socket", "device": "device", "folder": "directory"}
READERS: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": read_header,
    "content.safetensors": Content,
    "m.gguf": read_gguf,
    "pytorch_model.bin": read_pickled,
}


@contextmanager
def placed(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is no file, under a file's name. A pipe has a writer, so that whoever opens it after all
    fails and does not wait."""
    with ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
            stack.callback(os.close, os.open(path, os.O_RDWR | os.O_NONBLOCK))
        elif kind == "socket":
            monkeypatch.chdir(path.parent)  # its path must be short
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(path.name)
        elif kind == "device":
            path.symlink_to("/dev/null")
        else:
            path.mkdir()
        yield


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_readers_refuse_it_by_name(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rf"{name}: cannot be read: it is a {KINDS[kind]}, must be a regular file"
    with placed(kind, tmp_path / name, monkeypatch), pytest.raises(WeightsError, match=wanted):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "model-2.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_one_is_refused_before_it_is_loaded(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with placed(kind, tmp_path / name, monkeypatch):
        with pytest.raises(WeightsError, match=rf"{name}: .*{KINDS[kind]}"):
            stored_tensors(tmp_path, LoadConfig())
        thread = read_ahead(tmp_path, weight_bytes=1, available=9)
        if thread is not None:
            thread.join(60)
            assert not thread.is_alive()


def test_a_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/null")
    with pytest.raises(
        UnsupportedModel, match=r"config\.json: .* it is a device, must be a regular"
    ):
        resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())


NAMES = ("generation_config.json", "chat_template.jinja", "tokenizer.model", "other.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_need_not_be_there_is_a_file_if_it_is(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_special_files(tmp_path)
    error = WeightsError if name.endswith(".safetensors") else UnsupportedModel
    with placed(kind, tmp_path / name, monkeypatch):
        with pytest.raises(error, match=rf"{name}: cannot be read: it is a {KINDS[kind]}"):
            refuse_special_files(tmp_path)
        if error is WeightsError:
            refuse_special_files(tmp_path, weights=False)


def test_what_has_no_name_of_a_checkpoint_may_be_anything(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model-Q8_0.gguf").mkdir()
    (tmp_path / "config.json").symlink_to("nothing")
    refuse_special_files(tmp_path)
    refuse_special_files(tmp_path / "pipe")


def test_links_to_files_are_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    (entry,) = read_header(tmp_path / "model.safetensors")
    assert entry.name == "a"
    with open_regular(tmp_path / "model.safetensors") as file:
        assert len(file.read()) == entry.offset + entry.num_bytes
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
