"""PyTorch's own files: the same model as its safetensors, or refused; never code."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.model import LoadProgress
from headrace_models.formats.index import PICKLES
from headrace_models.formats.pickled import PickledFormat, read_pickled
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context

LLAMA = families.TestLlama()
PROMPT = LLAMA.prompt(20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Checkpoint) -> Tensor:
    return logits_of(llama.path)


def logits_of(path: Path, **load: Any) -> Tensor:
    info = LLAMA.resolve(path, max_model_len=64)
    return PagedDriver(LLAMA.load(info, build_context(info), **load)).step({"a": PROMPT})


def saved(llama: Checkpoint, folder: Path, content: Any = None, **settings: Any) -> Path:
    """The checkpoint as one pickled file."""
    folder.mkdir(exist_ok=True)
    shutil.copy(llama.path / "config.json", folder)
    if content is None:
        content = load_file(llama.path / "model.safetensors")
    torch.save(content, folder / PICKLES.single, **settings)
    return folder


@functools.cache
def small_file(zipped: bool) -> bytes:
    """Made once: files of the older form contain addresses of memory, of whatever length."""
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    file = io.BytesIO()
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


@pytest.mark.parametrize("strategy", ["lazy", "eager"])
@pytest.mark.parametrize("load_format", ["auto", "pt", "PT"])
def test_equal_to_safetensors(
    llama: Checkpoint, expected: Tensor, load_format: str, strategy: str, tmp_path: Path
) -> None:
    path = saved(llama, tmp_path)
    found = logits_of(path, load_format=load_format, safetensors_load_strategy=strategy)
    assert torch.equal(found, expected)


def test_files_of_old_versions(llama: Checkpoint, expected: Tensor, tmp_path: Path) -> None:
    path = saved(llama, tmp_path, _use_new_zipfile_serialization=False)
    assert torch.equal(logits_of(path), expected)


def test_sharded_with_an_index(llama: Checkpoint, expected: Tensor, tmp_path: Path) -> None:
    shutil.copy(llama.path / "config.json", tmp_path)
    tensors = list(load_file(llama.path / "model.safetensors").items())
    places = {}
    for index in range(3):
        name = f"pytorch_model-{index}.bin"
        torch.save(dict(tensors[index::3]), tmp_path / name)
        places.update({tensor: name for tensor, _ in tensors[index::3]})
    index_file = tmp_path / PICKLES.index
    index_file.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits_of(tmp_path), expected)
    moved = tensors[0][0]
    index_file.write_text(json.dumps({"weight_map": {**places, moved: "pytorch_model-1.bin"}}))
    with pytest.raises(WeightsError, match=rf"model-1\.bin: tensor '{moved}', which.*is missing"):
        logits_of(tmp_path)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_weights_beside_other_things(
    llama: Checkpoint, expected: Tensor, wrapper: str, tmp_path: Path
) -> None:
    tensors = load_file(llama.path / "model.safetensors")
    path = saved(llama, tmp_path, {wrapper: tensors, "epoch": 3})
    assert torch.equal(logits_of(path), expected)


def test_safetensors_are_preferred_and_pt_forces(
    llama: Checkpoint, expected: Tensor, tmp_path: Path
) -> None:
    path = saved(llama, tmp_path, {"nothing": torch.ones(1)})
    shutil.copy(llama.path / "model.safetensors", path)
    assert torch.equal(logits_of(path), expected)
    with pytest.raises(WeightsError, match=r"tensor 'nothing'.*pytorch_model\.bin"):
        logits_of(path, load_format="pt")


def test_training_files_are_not_read(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"x")
    (tmp_path / "optimizer.pt").write_bytes(b"x")
    assert not PickledFormat(LoadConfig()).recognises(tmp_path)


def test_progress_ends_at_the_whole(llama: Checkpoint, tmp_path: Path) -> None:
    path, seen = saved(llama, tmp_path), list[LoadProgress]()
    info = LLAMA.resolve(path, max_model_len=64)
    load_model(info, build_context(info), progress=seen.append)
    assert seen[-1].done == seen[-1].total == info.weight_bytes
    assert [each.done for each in seen] == sorted(each.done for each in seen)


class Runs:
    """What a hostile file would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.req("SEC-22")
class TestHostile:
    def test_a_rank_beyond_all_counting(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1)}, tmp_path / "model.999999999999.pt")
        [(name, _, _)] = PickledFormat(LoadConfig()).tensors(tmp_path)
        assert name == "a"

    @pytest.mark.parametrize("zipped", [True, False])
    def test_code_is_not_run(self, llama: Checkpoint, zipped: bool, tmp_path: Path) -> None:
        ran = tmp_path / "ran"
        path = saved(llama, tmp_path / "m", {"a": Runs(ran)}, _use_new_zipfile_serialization=zipped)
        with pytest.raises(WeightsError, match=r"pytorch_model\.bin: not read: .*mkdir"):
            logits_of(path)
        assert not ran.exists()

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([torch.ones(2)], "holds a list"),
            ({"a": 3}, "'a' is a int, not a tensor"),
            ({3: torch.ones(1)}, "name is 3: must be text"),
            ({"a": torch.eye(3).to_sparse()}, "torch.sparse_coo"),
        ],
    )
    def test_what_is_no_tensor_by_name(
        self, llama: Checkpoint, content: Any, words: str, tmp_path: Path
    ) -> None:
        with pytest.raises(WeightsError, match=words):
            logits_of(saved(llama, tmp_path, content))

    def test_link_to_nowhere(self, llama: Checkpoint, tmp_path: Path) -> None:
        shutil.copy(llama.path / "config.json", tmp_path)
        (tmp_path / "part-1.bin").symlink_to(tmp_path / "gone")
        with pytest.raises(WeightsError, match=r"part-1\.bin: cannot be read"):
            LLAMA.resolve(tmp_path)
        with pytest.raises(WeightsError, match=r"part-1\.bin: cannot be read"):
            list(PickledFormat(LoadConfig()).tensors(tmp_path))

    @pytest.mark.req("REL-13")
    def test_cut_short(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = saved(llama, tmp_path)
        file = path / PICKLES.single
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(WeightsError, match=r"pytorch_model\.bin"):
            logits_of(path)

    def test_no_keys_of_its_own(self, llama: Checkpoint, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"'a': load format 'pt' knows: none"):
            logits_of(saved(llama, tmp_path), load_format="pt", model_loader_extra_config={"a": 1})

    @pytest.mark.parametrize("zipped", [True, False])
    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(data=st.data())
    def test_changed_bytes_and_cuts_are_harmless_or_refused(
        self, zipped: bool, tmp_path: Path, data: st.DataObject
    ) -> None:
        file, content = tmp_path / "x.bin", bytearray(small_file(zipped))
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        file.write_bytes(content)
        try:
            found = read_pickled(file)
        except WeightsError:
            return
        for tensor in found.values():
            tensor.double().sum()
