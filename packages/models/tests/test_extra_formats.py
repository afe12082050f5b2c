"""Formats of other people's libraries: the same weights, or the line that installs the library."""

from __future__ import annotations

import builtins
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_models.formats.tensorized import serialize
from headrace_models.loading.sharded_state import save_sharded_state
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context

LLAMA = families.TestLlama()
PROMPT = LLAMA.prompt(20)

needs_runai = pytest.mark.skipif(
    importlib.util.find_spec("runai_model_streamer") is None, reason="needs runai-model-streamer"
)
needs_fast = pytest.mark.skipif(
    importlib.util.find_spec("fastsafetensors") is None, reason="needs fastsafetensors"
)
needs_tensorizer = pytest.mark.skipif(
    importlib.util.find_spec("tensorizer") is None, reason="needs tensorizer"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Checkpoint) -> Tensor:
    return logits_of(llama.path)


def logits_of(path: Path, **load: Any) -> Tensor:
    info = LLAMA.resolve(path, max_model_len=64)
    return PagedDriver(LLAMA.load(info, build_context(info), **load)).step({"a": PROMPT})


@needs_runai
class TestStreamer:
    def test_equal(
        self, llama: Checkpoint, expected: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("CONCURRENCY", "MEMORY_LIMIT"):
            monkeypatch.setenv(f"RUNAI_STREAMER_{name}", "1")  # so that both are put back
        extra = {"concurrency": 3, "memory_limit": 1 << 20}
        found = logits_of(llama.path, load_format="runai_streamer", model_loader_extra_config=extra)
        assert torch.equal(found, expected)
        assert os.environ["RUNAI_STREAMER_CONCURRENCY"] == "3"
        assert os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] == str(1 << 20)

    def test_shards(self, llama: Checkpoint, expected: Tensor, tmp_path: Path) -> None:
        info = LLAMA.resolve(llama.path, max_model_len=64)
        pattern = "r{rank}p{part}.safetensors"
        files = save_sharded_state(
            info, build_context(info), tmp_path, pattern=pattern, max_file_bytes=60_000
        )
        assert len(files) > 1
        found = logits_of(
            tmp_path, load_format="runai_streamer_sharded",
            model_loader_extra_config={"pattern": pattern},
        )  # fmt: skip
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            ({"speed": 3}, "'speed'.*knows: concurrency, memory_limit, distributed"),
            ({"concurrency": "3"}, "concurrency = '3': must be of type int"),
            ({"concurrency": True}, "concurrency = True: must be of type int"),
            ({"memory_limit": 0}, "memory_limit = 0: must be at least 1"),
            ({"distributed": True}, "distributed = True: must be left out"),
        ],
    )
    def test_refused_settings(self, llama: Checkpoint, extra: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            logits_of(llama.path, load_format="runai_streamer", model_loader_extra_config=extra)


@needs_fast
def test_fastsafetensors(llama: Checkpoint, expected: Tensor) -> None:
    assert torch.equal(logits_of(llama.path, load_format="fastsafetensors"), expected)


@needs_tensorizer
class TestTensorizer:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, llama: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("tensorized")
        serialize(llama.path, SafetensorsFormat(LoadConfig()), folder)
        return folder

    @pytest.mark.parametrize("load_format", ["auto", "tensorizer"])
    def test_equal(self, load_format: str, folder: Path, expected: Tensor) -> None:
        assert not list(folder.glob("*.safetensors"))
        assert torch.equal(logits_of(folder, load_format=load_format), expected)

    def test_tensors_elsewhere(
        self, folder: Path, llama: Checkpoint, expected: Tensor, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text((llama.path / "config.json").read_text())
        extra = {
            "tensorizer_uri": str(folder / "model.tensors"),
            "deserialization_kwargs": {"num_readers": 2},
        }
        found = logits_of(tmp_path, load_format="tensorizer", model_loader_extra_config=extra)
        assert torch.equal(found, expected)

    def test_settings_that_the_library_does_not_know(self, folder: Path) -> None:
        extra = {"deserialization_kwargs": {"speed": 2}}
        with pytest.raises(ConfigError, match=r"deserialization_kwargs = .*speed"):
            logits_of(folder, load_format="tensorizer", model_loader_extra_config=extra)

    @pytest.mark.parametrize("cut", [10, 500, 20_000])
    @pytest.mark.req("REL-13")
    def test_cut_short(self, cut: int, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        content = (folder / "model.tensors").read_bytes()
        (tmp_path / "model.tensors").write_bytes(content[:cut])
        with pytest.raises(WeightsError, match=r"model\.tensors: tensorizer cannot read it"):
            logits_of(tmp_path)

    def test_a_changed_byte(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        content = bytearray((folder / "model.tensors").read_bytes())
        content[-1000] ^= 1
        (tmp_path / "model.tensors").write_bytes(content)
        with pytest.raises(WeightsError, match=r"model\.tensors: tensorizer cannot read it.*Hash"):
            logits_of(tmp_path)


@pytest.mark.parametrize(
    ("load_format", "library", "extra"),
    [
        ("runai_streamer", "runai_model_streamer", "runai"),
        ("fastsafetensors", "fastsafetensors", "fastsafetensors"),
        ("tensorizer", "tensorizer", "tensorizer"),
    ],
)
def test_without_the_library(
    load_format: str, library: str, extra: str, llama: Checkpoint, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    path = llama.path
    if load_format == "tensorizer":
        path = tmp_path
        (path / "config.json").write_text((llama.path / "config.json").read_text())
        (path / "model.tensors").write_bytes(b"x")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=rf"pip install 'headrace-models\[{extra}\]'"):
        logits_of(path, load_format=load_format)
