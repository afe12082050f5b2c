"""Sharded state: what each rank holds, written and read back; refused where it does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.parallel import Communicator
from headrace_models.formats.header import read_header
from headrace_models.formats.writer import SafetensorsWriter
from headrace_models.loading.loader import load_model
from headrace_models.loading.sharded_state import save_sharded_state
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context, run_ranks

LLAMA, MIXTRAL = families.TestLlama(), families.TestMixtral()
PROMPT = LLAMA.prompt(20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return MIXTRAL.make_checkpoint(tmp_path_factory.mktemp("mixtral"))


def save(checkpoint: Checkpoint, folder: Path, **settings: Any) -> list[Path]:
    info = LLAMA.resolve(checkpoint.path, max_model_len=64)
    return save_sharded_state(info, build_context(info), folder, **settings)


def logits_of(path: Path, ranks: int = 1, **load: Any) -> list[Tensor]:
    info = LLAMA.resolve(path, max_model_len=64)

    def work(communicator: Communicator) -> Tensor:
        context = build_context(info, communicator=communicator)
        return PagedDriver(load_model(info, context, load=LoadConfig(**load))).step({"a": PROMPT})

    return run_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_equal_to_the_checkpoint(
    family: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(family)
    files = save(checkpoint, tmp_path, world_size=ranks)
    assert [file.name for file in files] == [
        f"model-rank-{rank}-part-0.safetensors" for rank in range(ranks)
    ]
    for found, expected in zip(logits_of(tmp_path, ranks), logits_of(checkpoint.path, ranks)):
        assert torch.equal(found, expected)


def test_parts_by_size_under_a_pattern_of_ones_own(llama: Checkpoint, tmp_path: Path) -> None:
    pattern = "part{part}.of.{rank}.safetensors"
    files = save(llama, tmp_path, pattern=pattern, max_file_bytes=40_000)
    assert len(files) > 3
    assert all((tmp_path / f"part{part}.of.0.safetensors").is_file() for part in range(len(files)))
    load = {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": pattern}}
    assert torch.equal(logits_of(tmp_path, **load)[0], logits_of(llama.path)[0])


def test_files_are_safetensors_and_the_rest_is_copied(llama: Checkpoint, tmp_path: Path) -> None:
    source = shutil.copytree(llama.path, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "old.bin").write_bytes(b"")
    (source / "1_Dense").mkdir()
    (source / "1_Dense" / "config.json").write_text("{}")
    info = LLAMA.resolve(source, max_model_len=64)
    [file] = save_sharded_state(info, build_context(info), tmp_path / "out")
    with safe_open(file, "pt") as content:
        assert content.metadata()["world_size"] == "1"
        assert "layers.0.attention.qkv.weight" in content.keys()  # noqa: SIM118 - no mapping
    assert sum(entry.num_bytes for entry in read_header(file)) == info.weight_bytes
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {file.name, "config.json", "generation_config.json", "tokenizer.json",
                     "1_Dense"}  # fmt: skip


class TestRefusals:
    def test_another_number_of_ranks(self, llama: Checkpoint, tmp_path: Path) -> None:
        save(llama, tmp_path, world_size=2)
        with pytest.raises(WeightsError, match=r"saved for tensor_parallel_size = 2, this is 1"):
            logits_of(tmp_path, 1)
        with pytest.raises(WeightsError, match=r"saved for tensor_parallel_size = 2, this is 4"):
            logits_of(tmp_path, 4)

    def test_another_dtype(self, llama: Checkpoint, tmp_path: Path) -> None:
        save(llama, tmp_path)
        info = LLAMA.resolve(tmp_path, max_model_len=64, dtype="bfloat16")
        with pytest.raises(WeightsError, match=r"is torch.float32, .*needs torch.bfloat16"):
            load_model(info, build_context(info))

    @pytest.mark.parametrize("change", ["missing", "more", "twice", "shape"])
    def test_not_exactly_the_tensors(self, change: str, llama: Checkpoint, tmp_path: Path) -> None:
        [file] = save(llama, tmp_path)
        tensors = load_file(file)
        name = "layers.1.attention.qkv.weight"
        if change == "missing":
            del tensors[name]
        elif change == "more":
            tensors["layers.9.attention.qkv.weight"] = tensors[name].clone()
        elif change == "shape":
            tensors[name] = tensors[name][:-1].clone()
        save_file(tensors, file, metadata={"world_size": "1"})
        if change == "twice":
            other = file.with_name("model-rank-0-part-1.safetensors")
            save_file({name: tensors[name]}, other, metadata={"world_size": "1"})
        with pytest.raises(WeightsError, match=r"layers\.(1|9)\.attention\.qkv\.weight"):
            logits_of(tmp_path)

    def test_all_faults_are_told_at_once(self, llama: Checkpoint, tmp_path: Path) -> None:
        """In whatever order they lie in the file, and nothing is loaded that the next one may follow."""
        [file] = save(llama, tmp_path)
        tensors = load_file(file)
        gone, short = "layers.0.mlp.down.weight", "layers.1.attention.qkv.weight"
        del tensors[gone]
        tensors[short] = tensors[short][:-1].clone()
        tensors["embed.weight"] = tensors["embed.weight"].double()
        tensors["a.left.over"] = torch.ones(2)
        save_file(tensors, file, metadata={"world_size": "1"})
        other = file.with_name("model-rank-0-part-1.safetensors")
        twice = "final_norm.weight"
        save_file({twice: tensors[twice]}, other, metadata={"world_size": "1"})
        with pytest.raises(WeightsError) as caught:
            logits_of(tmp_path)
        for fault in (f"'{gone}' [", f"'{short}' [", "'embed.weight' [", "'a.left.over' [2] belongs",
                      f"part-1.safetensors: tensor '{twice}' [", "comes twice", "is missing",
                      "is torch.float64, the model needs torch.float32"):  # fmt: skip
            assert fault in str(caught.value)

    def test_a_long_list_of_faults_is_cut(self, llama: Checkpoint, tmp_path: Path) -> None:
        save(llama, tmp_path)
        info = LLAMA.resolve(tmp_path, max_model_len=64, dtype="bfloat16")
        with pytest.raises(WeightsError, match=r"and \d+ more$"):
            load_model(info, build_context(info))

    @pytest.mark.req("REL-13")
    def test_cut_short(self, llama: Checkpoint, tmp_path: Path) -> None:
        [file] = save(llama, tmp_path)
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(WeightsError, match=r"rank-0-part-0\.safetensors.*truncated"):
            logits_of(tmp_path)

    def test_saving_onto_itself_or_twice(self, llama: Checkpoint, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="another folder"):
            save(llama, llama.path)
        save(llama, tmp_path / "once")
        info = LLAMA.resolve(tmp_path / "once", max_model_len=64)
        with pytest.raises(ConfigError, match="sharded state already"):
            save_sharded_state(info, build_context(info), tmp_path / "again")

    @pytest.mark.parametrize(
        "pattern",
        ["{rank}.safetensors", "{rank}-{part}-{rank}", "../{rank}-{part}", "{rank}{part}{x}"],
    )
    def test_patterns(self, pattern: str, llama: Checkpoint, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="once each"):
            save(llama, tmp_path, pattern=pattern)


def test_a_file_that_fails_is_not_left_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with SafetensorsWriter(tmp_path / "a.safetensors", room=100, metadata={}) as writer:
            writer.add("a", torch.ones(3))
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert not list(tmp_path.iterdir())


def test_views_and_dtypes_are_written_as_they_are(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    tensors = {"t": whole.T, "row": whole[2], "b": whole.bfloat16()[1:, ::2],
               "i": torch.arange(7, dtype=torch.int8), "s": torch.tensor(3)}  # fmt: skip
    with SafetensorsWriter(tmp_path / "a.safetensors", room=2000, metadata={"k": "v"}) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
