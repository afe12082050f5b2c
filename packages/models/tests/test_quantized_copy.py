"""A checkpoint written again: linear layers encoded, the rest as it was; an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import test_latent_families as latent
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import WeightEncoder
from headrace_models.loading.quantized_copy import INDEX, JOURNAL, Copied, write_quantized
from headrace_testing.model.decoders import Checkpoint, build_context

LLAMA, MIXTRAL = families.TestLlama(), families.TestMixtral()
GPT2, DEEPSEEK = families.TestGPT2(), latent.TestDeepseekV3()


class Negated(WeightEncoder):
    """Notes the shapes that it gets; refuses the layers whose rows are of ``misfits`` numbers."""

    def __init__(self, misfits: Iterable[int] = (), fails_at: int = -1) -> None:
        self.misfits, self.fails_at = set(misfits), fails_at
        self.shapes: list[tuple[int, ...]] = []

    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        if len(self.shapes) == self.fails_at:
            raise KeyboardInterrupt
        self.shapes.append(tuple(weight.shape))
        if weight.shape[1] in self.misfits:
            return None
        return {"codes": -weight, "scale": torch.ones(1)}

    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        return {"quant_method": "negated", "encoded": list(encoded), "left": list(left)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)


def write(checkpoint: Checkpoint, folder: Path, encoder: WeightEncoder, **settings: Any) -> Copied:
    info = LLAMA.resolve(checkpoint.path, max_model_len=64)
    return write_quantized(info, build_context(info), encoder, folder, **settings)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sorted(weight_map) == sorted(name for file in files.values() for name in file)
    return {name: files[file][name] for name, file in weight_map.items()}


def test_linear_layers_are_encoded_and_the_rest_is_as_it_was(
    llama: Checkpoint, tmp_path: Path
) -> None:
    (llama.path / "tokenizer.json").write_text("{}")
    copied = write(llama, tmp_path / "out", Negated())
    before, after = load_file(llama.path / "model.safetensors"), tensors_of(tmp_path / "out")
    linear = {name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")}
    assert set(copied.encoded) == linear
    assert copied.left == ["lm_head"]
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if module in linear:
            assert torch.equal(after.pop(f"{module}.codes"), -tensor)
            after.pop(f"{module}.scale")
        else:
            assert torch.equal(after.pop(name), tensor)
    assert not after
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["quantization_config"]["encoded"]) == linear
    assert config["quantization_config"]["left"] == ["lm_head"]
    own = json.loads((llama.path / "config.json").read_text())
    assert config.items() >= own.items()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    again = Negated()
    assert write(llama, tmp_path / "out", again).encoded == copied.encoded
    assert not again.shapes, "everything is there"
    assert copied.source_bytes == sum(tensor.nbytes for tensor in before.values())


def test_the_head_where_it_is_asked_for(llama: Checkpoint, tmp_path: Path) -> None:
    copied = write(llama, tmp_path, Negated(), with_head=True)
    assert "lm_head" in copied.encoded
    assert "lm_head.codes" in tensors_of(tmp_path)


def test_a_tied_head_is_told_to_readers(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    tied = LLAMA.make_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    copied = write(tied, tmp_path, Negated(), with_head=True)
    assert copied.left == ["lm_head"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["left"] == ["lm_head"]


def test_layers_that_do_not_fit_stay(llama: Checkpoint, tmp_path: Path) -> None:
    config = json.loads((llama.path / "config.json").read_text())
    copied = write(llama, tmp_path, Negated([config["intermediate_size"]]))
    assert {name.rpartition(".")[2] for name in copied.left} == {"down_proj", "lm_head"}
    assert "model.layers.0.mlp.down_proj.weight" in tensors_of(tmp_path)


def test_no_layer_fits(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no linear layer has a shape that the format takes"):
        write(llama, tmp_path, Negated(range(10_000)))


def test_heads_of_latent_attention_stay_floats(tmp_path: Path) -> None:
    info = DEEPSEEK.resolve(DEEPSEEK.make_checkpoint(tmp_path / "source").path, max_model_len=64)
    copied = write_quantized(info, build_context(info), Negated(), tmp_path / "out")
    assert any(name.endswith("kv_b_proj") for name in copied.left)
    assert not any(name.endswith("kv_b_proj") for name in copied.encoded)


def test_transposed_weights_are_refused(tmp_path: Path) -> None:
    info = GPT2.resolve(GPT2.make_checkpoint(tmp_path / "source").path, max_model_len=64)
    encoder = Negated()
    with pytest.raises(WeightsError, match="stored transposed"):
        write_quantized(info, build_context(info), encoder, tmp_path / "out")
    assert not encoder.shapes


def test_experts_are_linear_layers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mixtral = MIXTRAL.make_checkpoint(tmp_path_factory.mktemp("mixtral"))
    copied = write(mixtral, tmp_path, Negated())
    assert any(".experts.0." in name for name in copied.encoded)
    assert not any(name.endswith(".gate") for name in copied.encoded), "a router stays in floats"


def test_an_interrupted_run_goes_on(llama: Checkpoint, tmp_path: Path) -> None:
    whole, size = Negated(), 40_000
    write(llama, tmp_path / "whole", whole, file_bytes=size)
    with pytest.raises(KeyboardInterrupt):
        write(llama, tmp_path / "out", Negated(fails_at=5), file_bytes=size)
    assert (tmp_path / "out" / JOURNAL).is_file()
    done = sorted((tmp_path / "out").glob("*.safetensors"))
    assert done
    assert not (tmp_path / "out" / "config.json").exists()
    stamps = [path.stat().st_mtime_ns for path in done]
    rest = Negated()
    copied = write(llama, tmp_path / "out", rest, file_bytes=size)
    assert copied.resumed_files == len(done)
    assert 0 < len(rest.shapes) < len(whole.shapes)
    assert [path.stat().st_mtime_ns for path in done] == stamps
    found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    config, other = (
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "whole")
    )
    assert config == other


def test_a_folder_of_something_else_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(llama, tmp_path, Negated(fails_at=5), file_bytes=40_000)
    with pytest.raises(ConfigError, match="a run of another model, format or setting"):
        write(llama, tmp_path, Negated(), with_head=True, file_bytes=40_000)
    own = tmp_path / "own"
    own.mkdir()
    (own / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty: name a folder that is new or empty"):
        write(llama, own, Negated())
    assert (own / "README.md").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        write(llama, own / "README.md", Negated())
    with pytest.raises(ConfigError, match="another folder than the model's"):
        write(llama, llama.path, Negated())


def test_a_quantized_checkpoint_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    info = LLAMA.resolve(llama.path, max_model_len=64)
    config = {**info.config, "quantization_config": {"quant_method": "awq"}}
    quantized = dataclasses.replace(info, config=config)
    with pytest.raises(ConfigError, match="quantized with 'awq' already"):
        write_quantized(quantized, build_context(info), Negated(), tmp_path)


def test_bad_numbers_name_the_tensor(llama: Checkpoint, tmp_path: Path) -> None:
    class Refusing(Negated):
        def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
            raise WeightsError("the weight holds infinities or NaN")

    with pytest.raises(WeightsError, match=r"tensor 'model\.layers\.\d.*weight': .*infinities"):
        write(llama, tmp_path, Refusing())


@pytest.fixture
def finished(llama: Checkpoint, tmp_path: Path) -> tuple[Checkpoint, Path]:
    """A copy of the checkpoint, and the folder of a whole run over it."""
    source = shutil.copytree(llama.path, tmp_path / "source")
    checkpoint = dataclasses.replace(llama, path=source)
    write(checkpoint, tmp_path / "out", Negated(), file_bytes=40_000)
    return checkpoint, tmp_path / "out"


def test_a_cut_file_is_written_again(finished: tuple[Checkpoint, Path]) -> None:
    source, out = finished
    before = {name: tensor.clone() for name, tensor in tensors_of(out).items()}
    path = out / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    files = len(list(out.glob("*.safetensors")))
    assert write(source, out, Negated(), file_bytes=40_000).resumed_files == files - 1
    after = tensors_of(out)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_changed_weights_are_another_run(finished: tuple[Checkpoint, Path]) -> None:
    """As large as they were: a model that was trained on."""
    source, out = finished
    path = source.path / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ConfigError, match="the model's files have changed since"):
        write(source, out, Negated(), file_bytes=40_000)


@pytest.mark.parametrize(
    "text", ['{"stamp": "ab', "[]", '{"stamp": 1}', '{"stamp": 1, "files": 2}']
)
def test_a_damaged_journal_is_named(finished: tuple[Checkpoint, Path], text: str) -> None:
    source, out = finished
    (out / JOURNAL).write_text(text)
    with pytest.raises(ConfigError, match=rf"{JOURNAL}: is not a journal of a run"):
        write(source, out, Negated(), file_bytes=40_000)


def test_only_what_belongs_to_the_copy_is_copied(llama: Checkpoint, tmp_path: Path) -> None:
    """Neither other frameworks' weights nor hidden folders; and no copy lies in its own source."""
    source = shutil.copytree(llama.path, tmp_path / "source")
    for name in ("tf_model.h5", "onnx/model.onnx", ".git/config", "1_Pooling/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    checkpoint = dataclasses.replace(llama, path=source)
    write(checkpoint, tmp_path / "out", Negated())
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    assert not [*(tmp_path / "out").rglob("*.h5"), *(tmp_path / "out").rglob("*.onnx")]
    assert not (tmp_path / "out" / ".git").exists()
    with pytest.raises(ConfigError, match="and not inside it"):
        write(checkpoint, source / "out", Negated())
    assert not (source / "out").exists()
