"""GGUF checkpoints: the same model as the safetensors they were made of, or refused."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import test_families as families
import torch
from gguf import GGMLQuantizationType
from gguf_writing import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_moe_families import TestQwen2Moe as Qwen2MoeSuite
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from headrace_models.formats.contents import stated_config
from headrace_models.formats.gguf.format import GGUFFormat
from headrace_models.formats.gguf.header import BLOCK_TYPES, MAX_VALUES, read_gguf
from headrace_models.quantization import quant_method_name
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context

LLAMA = families.TestLlama()
PROMPT = LLAMA.prompt(30)


def logits_of(suite: Any, path: Path) -> Tensor:
    return PagedDriver(suite.open(path)).step({"a": PROMPT})


FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (LLAMA, "llama", {}),
    "llama-tied": (LLAMA, "llama", {"tie_word_embeddings": True, "attention_bias": False,
                                    "mlp_bias": False}),
    "mistral": (families.TestMistral(), "llama", {"sliding_window": None}),
    "mixtral": (families.TestMixtral(), "llama", {"sliding_window": None}),
    "qwen2": (families.TestQwen2(), "qwen2", {"use_sliding_window": False}),
    "qwen2moe": (Qwen2MoeSuite(), "qwen2moe", {"use_sliding_window": False, "mlp_only_layers": [],
                                              "norm_topk_prob": False}),
    "qwen3": (families.TestQwen3(), "qwen3", {"use_sliding_window": False}),
    "qwen3moe": (families.TestQwen3Moe(), "qwen3moe", {"mlp_only_layers": [],
                                                      "norm_topk_prob": True}),
    "gemma": (families.TestGemma(), "gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (families.TestGemma2(), "gemma2", {"query_pre_attn_scalar": 20}),
    "gemma3": (families.TestGemma3(), "gemma3", {"query_pre_attn_scalar": 20}),
    "phi3": (families.TestPhi3(), "phi3", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_the_checkpoint_it_was_made_of(name: str, tmp_path: Path) -> None:
    suite, architecture, overrides = FAMILIES[name]
    checkpoint = suite.make_checkpoint(tmp_path / "hf", **overrides)
    extra = {"gemma3.rope.freq_base_swa": 50.0} if name == "gemma3" else {}
    file = write(checkpoint.path, tmp_path / "m.gguf", architecture, extra=extra)
    torch.testing.assert_close(
        logits_of(suite, file), logits_of(suite, checkpoint.path), atol=3e-4, rtol=0
    )


def test_early_files_of_qwen2_moe(tmp_path: Path) -> None:
    """They do not say the sizes of experts."""
    suite = Qwen2MoeSuite()
    sizes = {"intermediate_size": 72, "moe_intermediate_size": 36, "num_experts_per_tok": 2,
             "shared_expert_intermediate_size": 72}  # fmt: skip
    checkpoint = suite.make_checkpoint(tmp_path, **FAMILIES["qwen2moe"][2], **sizes)
    expected = logits_of(suite, checkpoint.path)
    config = json.loads((tmp_path / "config.json").read_text())
    unsaid = ("moe_intermediate_size", "shared_expert_intermediate_size")
    kept = {key: value for key, value in config.items() if key not in unsaid}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    file = write(tmp_path, tmp_path / "m.gguf", "qwen2moe")
    torch.testing.assert_close(logits_of(suite, file), expected, atol=3e-4, rtol=0)


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Not our writer alone: transformers' own reader of such files finds the same tensors."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = LLAMA.make_checkpoint(
        tmp_path / "hf", attention_bias=False, mlp_bias=False, head_dim=18,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    tokens = [f"t{i}" for i in range(131)]
    extra = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
             "tokenizer.ggml.scores": [0.0] * 131, "tokenizer.ggml.token_type": [1] * 131}  # fmt: skip
    file = write(checkpoint.path, tmp_path / "m.gguf", "llama", extra=extra)
    expected = load_gguf_checkpoint(
        str(file), return_tensors=True, model_to_load=checkpoint.reference
    )["tensors"]
    found = {name: tensor for name, tensor, _ in GGUFFormat(LoadConfig()).tensors(file)}
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.as_tensor(expected[name])), name


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_floats_of_16_bits(kind: str, wide: Checkpoint, tmp_path: Path) -> None:
    type_ = GGMLQuantizationType[kind]
    file = write(wide.path, tmp_path / "m.gguf", "llama", lambda *_: type_)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_text((wide.path / "config.json").read_text())
    tensors = load_file(wide.path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored = gguf.quants.quantize(tensor.numpy(), type_)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, type_))
    save_file(tensors, rounded / "model.safetensors")
    info = LLAMA.resolve(file)
    assert info.dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
    assert "quantization_config" not in info.config
    got = PagedDriver(LLAMA.open(file, dtype="float32")).step({"a": PROMPT})
    torch.testing.assert_close(got, logits_of(LLAMA, rounded), atol=2e-4, rtol=0)


def test_blocks_are_computed_in_bfloat16(wide: Checkpoint, tmp_path: Path) -> None:
    """They do not say what their model was trained in; float16 overflows in some."""
    file = write(wide.path, tmp_path / "m.gguf", "llama", lambda *_: GGMLQuantizationType.Q8_0)
    assert LLAMA.resolve(file).dtype == "bfloat16"
    assert LLAMA.resolve(file, dtype="float16").dtype == "float16"


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_sizes_of_blocks_are_those_of_the_formats_own_package(number: int) -> None:
    kind, theirs = BLOCK_TYPES[number], GGMLQuantizationType(number)
    assert theirs.name == kind.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.elements, kind.num_bytes)


class TestBlocks:
    """Weights in blocks come as their bytes, and the config says of which types they are."""

    @staticmethod
    def mixture(name: str, tensor: Tensor) -> GGMLQuantizationType:
        """Of two types, as in Q4_K_M; the router is in floats."""
        if "gate_inp" in name:
            return GGMLQuantizationType.F32
        eight = "attn_v" in name or "ffn_down" in name or name.startswith("output")
        return GGMLQuantizationType.Q8_0 if eight else GGMLQuantizationType.Q4_0

    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, wide: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("blocks") / "m.gguf"
        return write(wide.path, path, "llama", cls.mixture)

    def test_bytes_of_rows(self, file: Path, wide: Checkpoint) -> None:
        floats = load_file(wide.path / "model.safetensors")
        found = {name: tensor for name, tensor, _ in GGUFFormat(LoadConfig()).tensors(file)}
        assert set(found) == set(floats)
        for name, tensor in floats.items():
            if tensor.dim() < 2:
                assert found[name].dtype == torch.float32
                continue
            eight = "v_proj" in name or "down_proj" in name or "lm_head" in name
            kind = GGMLQuantizationType.Q8_0 if eight else GGMLQuantizationType.Q4_0
            blocks = torch.from_numpy(gguf.quants.quantize(tensor.numpy(), kind))
            assert torch.equal(found[name], blocks), name

    def test_the_config_says_the_types(self, file: Path) -> None:
        block = LLAMA.resolve(file).config["quantization_config"]
        assert block["quant_method"] == "gguf"
        types = block["types"]
        assert types["model.embed_tokens"] == types["model.layers.1.self_attn.q_proj"] == "Q4_0"
        assert types["lm_head"] == types["model.layers.0.mlp.down_proj"] == "Q8_0"
        assert len(types) == 16
        assert not any("norm" in name for name in types)

    def test_another_config_has_the_same_types(
        self, file: Path, wide: Checkpoint, tmp_path: Path
    ) -> None:
        """What the original checkpoint says of its own quantization does not hold for the file."""
        own = stated_config(file)["quantization_config"]
        stated = json.loads((wide.path / "config.json").read_text())
        stated["quantization_config"] = {"quant_method": "mxfp4"}
        (tmp_path / "config.json").write_text(json.dumps(stated))
        assert stated_config(file, config_folder=str(tmp_path))["quantization_config"] == own
        (tmp_path / "m.gguf").symlink_to(file)
        assert stated_config(tmp_path)["quantization_config"] == own
        (tmp_path / "model.safetensors").symlink_to(wide.path / "model.safetensors")
        assert stated_config(tmp_path)["quantization_config"] == {"quant_method": "mxfp4"}
        assert stated_config(tmp_path, load_format="gguf")["quantization_config"] == own

    def test_experts_come_one_by_one(self, tmp_path: Path) -> None:
        suite = families.TestQwen3Moe()
        sizes = {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "intermediate_size": 64,
            "head_dim": 16,
        }
        checkpoint = suite.make_checkpoint(
            tmp_path / "hf", **FAMILIES["qwen3moe"][2], **sizes, num_hidden_layers=1
        )
        file = write(checkpoint.path, tmp_path / "m.gguf", "qwen3moe", self.mixture)
        types = suite.resolve(file).config["quantization_config"]["types"]
        assert types["model.layers.0.mlp.experts.*.down_proj"] == "Q8_0"
        found = {name: tensor for name, tensor, _ in GGUFFormat(LoadConfig()).tensors(file)}
        for name, tensor in load_file(checkpoint.path / "model.safetensors").items():
            if name.endswith("experts.1.down_proj.weight"):
                blocks = gguf.quants.quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
                assert torch.equal(found[name], torch.from_numpy(blocks))

    def test_without_the_method_blocks_are_refused(self, file: Path) -> None:
        with pytest.raises(WeightsError, match=r"m\.gguf: tensor '\S+' has shape"):
            LLAMA.open(file)

    def test_norms_in_blocks_are_refused_where_the_converter_changed_them(
        self, tmp_path: Path
    ) -> None:
        suite = families.TestGemma()
        checkpoint = suite.make_checkpoint(tmp_path / "hf", hidden_act="gelu_pytorch_tanh")
        file = write(checkpoint.path, tmp_path / "m.gguf", "gemma")
        content = bytearray(file.read_bytes())
        place = content.index(b"output_norm.weight") + len("output_norm.weight") + 4
        content[place : place + 12] = struct.pack("<QI", 32, 8)
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"'model\.norm\.weight' is stored in blocks: norms"):
            list(GGUFFormat(LoadConfig()).tensors(file))

    @pytest.mark.parametrize(
        ("wanted", "name"), [(None, "gguf"), ("gguf", "gguf"), ("int8", "gguf"), ("none", "gguf")]
    )
    def test_the_method_is_the_files_own(self, wanted: str | None, name: str, file: Path) -> None:
        assert quant_method_name(LLAMA.resolve(file), wanted) == name


class TestFiles:
    @pytest.fixture(scope="class")
    @classmethod
    def small(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("small")
        checkpoint = LLAMA.make_checkpoint(folder / "hf", num_hidden_layers=1)
        return write(checkpoint.path, folder / "m.gguf", "llama")

    def test_several_parts(self, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf")
        first = write(checkpoint.path, tmp_path / "m.gguf", "llama", splits=9)
        assert len(list(tmp_path.glob("*.gguf"))) > 2
        whole = logits_of(LLAMA, checkpoint.path)
        torch.testing.assert_close(logits_of(LLAMA, first), whole, atol=3e-4, rtol=0)
        second = next(tmp_path.glob("*-00002-of-*.gguf"))
        with pytest.raises((WeightsError, UnsupportedModel)):
            LLAMA.resolve(second)
        second.unlink()
        with pytest.raises(WeightsError, match=r"00002-of-.*cannot be read"):
            LLAMA.resolve(first)

    def test_a_folder_with_one_file(self, small: Path, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").symlink_to(small)
        (tmp_path / "mmproj-model.gguf").write_bytes(b"not looked at")
        assert LLAMA.resolve(tmp_path).architecture == "LlamaForCausalLM"
        (tmp_path / "other.gguf").symlink_to(small)
        with pytest.raises(UnsupportedModel, match=r"several GGUF files \(.*model\.gguf.*name one"):
            LLAMA.resolve(tmp_path)

    def test_another_folders_config(self, small: Path, tmp_path: Path) -> None:
        config = json.loads((small.parent / "hf" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 7]}))
        stated = stated_config(small, config_folder=str(tmp_path))
        assert stated["eos_token_id"] == [5, 7]
        info = LLAMA.resolve(small, hf_config_path=str(tmp_path))
        assert info.config["rope_parameters"]["rope_type"] == "llama3"

    def test_ends_of_an_answer(self, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
        extra = {"tokenizer.ggml.eot_token_id": 9}
        file = write(checkpoint.path, tmp_path / "m.gguf", "llama", extra=extra)
        assert LLAMA.resolve(file).eos_token_ids == (2, 9)

    def test_unknown_architecture(self, small: Path, tmp_path: Path) -> None:
        file = changed(small, tmp_path, "general.architecture", "llama", "bloom")
        with pytest.raises(UnsupportedModel, match=r"'bloom'.*must be one of llama, qwen2"):
            LLAMA.resolve(file)

    def test_heads_that_differ_from_layer_to_layer(self, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf")
        extra = {"llama.attention.head_count_kv": [2, 2, 1]}
        file = write(checkpoint.path, tmp_path / "m.gguf", "llama", extra=extra)
        with pytest.raises(UnsupportedModel, match=r"head_count_kv differs from layer to layer"):
            LLAMA.resolve(file)

    @pytest.mark.parametrize(
        ("key", "value"), [("block_count", math.inf), ("context_length", math.nan)]
    )
    def test_numbers_that_are_none(self, key: str, value: float, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
        extra = {f"llama.{key}": value}
        file = write(checkpoint.path, tmp_path / "m.gguf", "llama", extra=extra)
        with pytest.raises(UnsupportedModel, match=rf"llama\.{key} = .*: must be a finite number"):
            LLAMA.resolve(file)

    def test_more_heads_than_numbers(self, tmp_path: Path) -> None:
        suite = families.TestPhi3()
        checkpoint = suite.make_checkpoint(tmp_path / "hf")
        extra = {"phi3.attention.head_count": 100_000}
        file = write(checkpoint.path, tmp_path / "m.gguf", "phi3", extra=extra)
        with pytest.raises(UnsupportedModel, match=r"head_count = 100000: must be at most"):
            suite.resolve(file)

    def test_tensor_of_no_layer(self, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
        file = write(checkpoint.path, tmp_path / "m.gguf", "llama")
        content = file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_op.weight")
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"m\.gguf: tensor 'blk\.0\.ffn_op\.weight' belongs"):
            LLAMA.open(file)

    def test_types_that_are_not_read(self, tmp_path: Path) -> None:
        checkpoint = LLAMA.make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
        file = write(checkpoint.path, tmp_path / "m.gguf", "llama")
        place = file.read_bytes().index(b"token_embd.weight") + len("token_embd.weight") + 20
        content = bytearray(file.read_bytes())
        content[place : place + 4] = struct.pack("<I", 9)
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"'token_embd\.weight'.*Q8_1 are not read.*Q4_K"):
            LLAMA.resolve(file)

    def test_extra_config_has_no_keys(self, small: Path) -> None:
        info = LLAMA.resolve(small)
        with pytest.raises(ConfigError, match=r"'threads': load format 'gguf' knows: none"):
            LLAMA.load(info, build_context(info), load_format="gguf",
                       model_loader_extra_config={"threads": 3})  # fmt: skip

    @pytest.mark.req("SEC-22", "REL-13")
    @settings(
        max_examples=200,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(data=st.data())
    def test_changed_bytes_and_cuts_are_harmless_or_refused(
        self, small: Path, tmp_path: Path, data: st.DataObject
    ) -> None:
        content = bytearray(small.read_bytes())
        end = 4096
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, end))
            size = data.draw(st.sampled_from([1, 4, 8]))
            content[place : place + size] = data.draw(st.binary(min_size=size, max_size=size))
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        file = tmp_path / "x.gguf"
        file.write_bytes(content)
        try:
            header = read_gguf(file)
        except WeightsError:
            return
        ends = [tensor.offset + tensor.num_bytes for tensor in header.tensors]
        assert max(ends, default=0) <= len(content)
        try:
            LLAMA.open(file)
        except ModelError:
            return


def changed(file: Path, folder: Path, key: str, old: str, new: str) -> Path:
    """The file with one text of its metadata changed to another of the same length."""
    content = file.read_bytes()
    place = content.index(key.encode())
    found = content.index(old.encode(), place + len(key))
    path = folder / "changed.gguf"
    path.write_bytes(content[:found] + new.encode() + content[found + len(old) :])
    return path


@pytest.mark.req("SEC-22")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(40), "tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(40), "metadata keys; at most"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "at most"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 4000) + bytes(40), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 2**60), "do not fit"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1) + bytes(8), "array of type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 1, 0, 1, b"t", 9, 1) + bytes(40), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "sizes"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**60, 0, 0), "sizes"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "multiples of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 0, 7), "multiple of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 0, 0), "truncated"),
    ],
)  # fmt: skip
def test_lying_headers(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=words) as caught:
        read_gguf(file)
    assert str(file) in str(caught.value)


@pytest.mark.req("SEC-22")
def test_an_array_as_long_as_a_large_file(tmp_path: Path) -> None:
    """Each of its bytes would become a Python number."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, MAX_VALUES + 1))
    os.truncate(file, MAX_VALUES + 100)
    with pytest.raises(WeightsError, match=r"'a': \d+ values; at most"):
        read_gguf(file)
