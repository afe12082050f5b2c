"""Checkpoints of packed weights that cannot be served: messages name the tensor, what the config says of it,
and the remedy."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_variants as V
import torch
from forks import run_command
from quantized_checkpoints import IntegerConformance
from safetensors.torch import load_file, save_file
from test_bitsandbytes import TestNF4 as NF4
from test_compressed_tensors import TestMxfp4 as Mxfp4
from test_compressed_tensors import TestMxfp8 as Mxfp8
from test_integer_checkpoints import TestAWQ as AWQ
from test_integer_checkpoints import TestGPTQ as GPTQ
from test_modelopt import TestNvfp4 as Nvfp4
from test_quark_torchao import TestQuark as Quark
from test_quark_torchao import TestTorchAO as TorchAO
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_testing.model.decoders import build_context, run_ranks

DOWN = "model.layers.1.mlp.down_proj"
FORMATS = (GPTQ, AWQ, NF4, Nvfp4, Mxfp4, Quark, TorchAO)


def damaged(
    suite: IntegerConformance,
    folder: Path,
    fields: dict[str, Any] | None,
    change: Callable[[dict[str, Tensor]], object] = lambda _: None,
) -> None:
    """Write a checkpoint whose config and tensors contradict each other.

    Args:
        fields: over those of ``quantization_config``; None: there is none.
    """
    suite.make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    if fields is None:
        del config["quantization_config"]
    else:
        config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("suite", "fields", "words"),
    [
        (GPTQ, {"bits": 8}, (".qweight' has shape", "bits 8, group_size 32")),
        (AWQ, {"group_size": 64}, (".qzeros' has shape", "quant_method 'awq', bits 4, group_size 64")),
        (NF4, {"load_in_4bit": False, "load_in_8bit": True}, (".weight' has shape", "load_in_8bit True")),
        (GPTQ, None, ("qweight'", "no quantization_config", "quantize_config.json")),
        (NF4, None, (".weight' has shape", "no quantization_config")),
        (Nvfp4, None, (".weight' has", "no quantization_config")),
    ],
)  # fmt: skip
def test_a_config_that_is_not_the_files(
    suite: type[IntegerConformance], fields: dict[str, Any] | None, words: Any, tmp_path: Path
) -> None:
    damaged(suite(), tmp_path, fields)
    with pytest.raises(WeightsError) as caught:
        suite().open(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_plain_checkpoint_is_told_nothing_of_packing(tmp_path: Path) -> None:
    """A tensor that belongs nowhere is no sign of packed weights."""
    suite = GPTQ()
    super(IntegerConformance, suite).make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.extra.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError) as caught:
        suite.open(tmp_path)
    assert "model.extra.weight" in str(caught.value)
    assert "packed" not in str(caught.value)


GROUPED = (
    *FORMATS, V.AutoRoundAWQ, V.GPTQOf2Bits, V.W4A16Zeros, V.Mxfp6, Mxfp8, V.FP4, V.ModelOptFp4,
    V.ModelOptMxfp8, V.QuarkE2M3, V.QuarkUint4, V.TorchAOInt4,
)  # fmt: skip
"""Formats whose scales are of groups of inputs, or whose codes are in words along them."""
OF_EXPERTS = (
    V.W4A16Mixture, V.Mxfp4Mixture, V.ModelOptFp4Mixture, V.QuarkE3M2, V.TorchAOMixture, V.AutoRoundMixture,
    V.GptOss,
)  # fmt: skip
IN_WORDS = {
    GPTQ: "k_proj.qzeros", AWQ: "k_proj.qweight", V.W4A16Zeros: "k_proj.weight_zero_point",
    V.QuarkUint4: "k_proj.weight", V.AutoRoundAWQ: "k_proj.qweight",
}  # fmt: skip
"""Formats with eight outputs in a word, and the tensor of which a rank has 20."""


@pytest.mark.keep(7, every_value=False)
@pytest.mark.parametrize("suite", GROUPED)
def test_groups_that_end_within_a_ranks_share(
    suite: type[IntegerConformance], tmp_path: Path
) -> None:
    """Refused before weights are read, naming tensor and remedy; one rank may have them."""
    size = 16 if suite in (Nvfp4, NF4, V.FP4, V.ModelOptFp4) else 32
    words = rf"'model\.layers\.0\.mlp\.down_proj\.\w+'.*in_features = {9 * size // 2}.*multiple"
    assert_one_rank_only(suite(), tmp_path, words, intermediate_size=9 * size)


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("suite", OF_EXPERTS)
def test_groups_of_experts_that_end_within_a_ranks_share(
    suite: type[IntegerConformance], tmp_path: Path
) -> None:
    size = 16 if suite is V.ModelOptFp4Mixture else 32
    key = "intermediate_size" if suite is V.GptOss else "moe_intermediate_size"
    words = rf"'model\.layers\.0\.mlp\.experts\.0\.down_proj\.\w+'.*in_features = {3 * size // 2}.*multiple"
    assert_one_rank_only(suite(), tmp_path, words, **{key: 3 * size})


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("suite", IN_WORDS)
def test_words_that_end_within_a_ranks_share(
    suite: type[IntegerConformance], tmp_path: Path
) -> None:
    """Outputs of the part that is named, query's being whole words."""
    words = rf"'model\.layers\.\d\.self_attn\.{re.escape(IN_WORDS[suite])}'.*outputs = 20.*multiple of 8"
    sizes = {"head_dim": 20, "num_attention_heads": 16, "num_key_value_heads": 2}
    assert_one_rank_only(suite(), tmp_path, words, **sizes)


def assert_one_rank_only(made: IntegerConformance, folder: Path, words: str, **sizes: int) -> None:
    made.make_checkpoint(folder, **sizes)
    info = made.resolve(folder, max_model_len=64)
    made.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"tensor {words}.*tensor_parallel_size"):
        run_ranks(2, lambda group: made.load(info, build_context(info, communicator=group)))


@pytest.mark.parametrize(
    ("suite", "change", "words", "options"),
    [
        (GPTQ, lambda t: t.pop(f"{DOWN}.scales"), (f"{DOWN}.scales", "HR-MOD-002"), ()),
        (AWQ, lambda t: t.pop(f"{DOWN}.qzeros"), (f"{DOWN}.qzeros", "HR-MOD-002"), ()),
        (NF4, lambda t: t.pop(f"{DOWN}.weight.absmax"), (f"{DOWN}.weight.absmax", "HR-MOD-002"), ()),
        (GPTQ, lambda _: None, ("'awq'", "'gptq'", "HR-CFG-001"), ("--quantization", "awq")),
        (Nvfp4, lambda _: None, ("'NVFP4'", "'modelopt_mxfp8'"), ("--quantization", "modelopt_mxfp8")),
    ],
)  # fmt: skip
def test_the_command_says_it(
    suite: type[IntegerConformance], change: Any, words: Any, options: Any, tmp_path: Path
) -> None:
    damaged(suite(), tmp_path, {}, change)
    done = run_command(
        "serve", str(tmp_path), "--port", "0", "--max-model-len", "64", "--skip-tokenizer-init", *options,
        stderr=subprocess.STDOUT, timeout=120,
    )  # fmt: skip
    assert done.returncode in (2, 3), done.stdout
    assert all(word in done.stdout for word in words), done.stdout


def test_an_override_that_names_no_layer_is_told_each_name_once(tmp_path: Path) -> None:
    suite = GPTQ()
    super(IntegerConformance, suite).make_checkpoint(tmp_path, tie_word_embeddings=True)
    info = suite.resolve(tmp_path, max_model_len=64)
    context = build_context(info)
    method = quant_method(
        info, "int4_g32", context.ops, device="cpu", overrides={"lm_haed": "none"}
    )
    with pytest.raises(
        ConfigError, match=r"'lm_haed' is no linear layer.*it has lm_head"
    ) as caught:
        load_model(info, dataclasses.replace(context, quant=method))
    assert str(caught.value).count("lm_head") == 1
