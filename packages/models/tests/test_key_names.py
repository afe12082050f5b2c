"""Configs that say one thing under two names: what counts is what transformers reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.platform import CpuPlatform
from headrace_models.catalogue import ARCHITECTURES
from headrace_models.catalogue.key_names import SECOND_NAMES, by_first_names
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

TINY: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT = [5, 90, 17, 33, 2, 8, 120, 64, 7, 7, 41, 99, 3, 18, 77, 52, 6, 110, 13, 29, 31]
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}  # fmt: skip
NEW = {"rope_type": "default", "rope_theta": 10_000.0}
BOTH: dict[str, dict[str, Any]] = {
    "old block of another kind": {"rope_parameters": NEW, "rope_scaling": LINEAR},
    "old name of the kind": {"rope_parameters": NEW, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {"rope_parameters": NEW, "rope_scaling": YARN},
    "llama3": {"rope_parameters": NEW, "rope_scaling": LLAMA3},
    "two scalings": {"rope_parameters": {**NEW, **YARN}, "rope_scaling": LINEAR},
    "a base beside": {"rope_parameters": {**NEW, "rope_theta": 700.0}, "rope_scaling": LINEAR,
                      "rope_theta": 500.0},
    "a base in the old block": {"rope_parameters": {**NEW, "rope_theta": 700.0},
                                "rope_scaling": {**LINEAR, "rope_theta": 500.0}},
    "an empty old block": {"rope_parameters": {**NEW, **LINEAR}, "rope_scaling": {}, "rope_theta": 5.0},
    "a null old block": {"rope_parameters": {**NEW, **LLAMA3}, "rope_scaling": None},
    "the same twice": {"rope_parameters": {**NEW, **LINEAR}, "rope_scaling": {**NEW, **LINEAR}},
    "an old block by itself": {"rope_scaling": LINEAR, "rope_theta": 500.0},
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts for each token": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_intermediate_size": 24, "moe_k": 3, "moe_num_shared_experts": 1},
        {"num_experts_per_tok": 1},
    ),
    "experts under their second name": (
        "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 4, "num_local_experts": None},
    ),
    "dtype beside torch_dtype": ("Llama", {}, {"dtype": "float32", "torch_dtype": "bfloat16"}),
    "a base that a family has by default": (
        "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"rope_parameters": None, "rope_scaling": LINEAR},
    ),
}  # fmt: skip


class Tiny:
    """A checkpoint whose config.json is edited after it was saved."""

    def __init__(self, family: str, folder: Path, **settings: Any) -> None:
        import transformers

        self.model_class = getattr(transformers, f"{family}ForCausalLM")
        config = self.model_class.config_class(**{**TINY, **settings})
        self.folder = folder
        model = self.model_class(config).eval()
        randomise(model)
        model.save_pretrained(folder)

    def edit(self, **changes: Any) -> None:
        file = self.folder / "config.json"
        said = {**json.loads(file.read_text()), **changes}
        file.write_text(
            json.dumps({key: value for key, value in said.items() if value is not None})
        )

    def theirs(self) -> torch.Tensor:
        model = self.model_class.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
        return logits.log_softmax(-1)

    def ours(self) -> torch.Tensor:
        info = self.resolved()
        driver = PagedDriver(load_model(info, build_context(info)))
        return driver.step({"a": PROMPT}).log_softmax(-1)

    def resolved(self) -> Any:
        settings = ModelConfig(model=str(self.folder), dtype="float32", max_model_len=64)
        return resolve(settings, LoadConfig(), CpuPlatform())


def check_equal(tiny: Tiny) -> None:
    ours, theirs = tiny.ours(), tiny.theirs()
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.fixture(params=["Llama", "Qwen3", "Mistral"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Tiny:
    return Tiny(request.param, tmp_path)


@pytest.mark.parametrize("case", list(BOTH))
def test_both_blocks_are_read_as_transformers_reads_them(tiny: Tiny, case: str) -> None:
    without = {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}
    tiny.edit(**{**without, **BOTH[case]})
    check_equal(tiny)


@pytest.mark.parametrize("case", list(OTHERS))
def test_second_names_are_read_as_transformers_reads_them(tmp_path: Path, case: str) -> None:
    family, settings, changes = OTHERS[case]
    tiny = Tiny(family, tmp_path, **settings)
    tiny.edit(**changes)
    check_equal(tiny)


def test_the_base_of_the_new_block_is_not_lost(tmp_path: Path) -> None:
    """Qwen's pages tell people to extend a context so: in a config that transformers 5 saved, the scaling
    alone would bring the family's default base back."""
    tiny = Tiny("Qwen3", tmp_path)
    tiny.edit(rope_parameters={**NEW, "rope_theta": 1e6}, rope_scaling=YARN)
    with pytest.raises(UnsupportedModel) as refused:
        tiny.ours()
    for part in ("rope_scaling = {'rope_type': 'yarn'", "rope_parameters = {'rope_type': 'default'",
                 "rope_theta = 1000000.0", "10000 would be used"):  # fmt: skip
        assert part in str(refused.value)


@pytest.mark.parametrize("block", ["rope_parameters", "rope_scaling"])
def test_unknown_kinds_are_refused_in_either_block(tmp_path: Path, block: str) -> None:
    tiny = Tiny("Llama", tmp_path)
    tiny.edit(**{"rope_parameters": NEW, "rope_scaling": NEW, block: {**NEW, "rope_type": "ntk2"}})
    with pytest.raises(UnsupportedModel, match=r"'ntk2': must be one of default, linear, .*yarn"):
        tiny.resolved()


def test_an_unknown_kind_of_one_layer_type_is_refused(tmp_path: Path) -> None:
    tiny = Tiny("Llama", tmp_path)
    tiny.edit(rope_parameters={"full_attention": NEW, "sliding_attention": {"rope_type": "ntk2"}})
    with pytest.raises(UnsupportedModel, match="'ntk2': must be one of"):
        tiny.resolved()


def test_a_scaling_beside_settings_by_layer_type_is_refused(tmp_path: Path) -> None:
    tiny = Tiny("Llama", tmp_path)
    tiny.edit(
        rope_parameters={"full_attention": NEW, "sliding_attention": NEW}, rope_scaling=LINEAR
    )
    with pytest.raises(
        UnsupportedModel, match=r"rope_scaling = .*'linear'.* contradicts rope_param"
    ):
        tiny.resolved()
    tiny.edit(rope_parameters={"full_attention": {**NEW, **LINEAR}, "sliding_attention": NEW})
    tiny.resolved()


def test_which_block_counts_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = Tiny("Llama", tmp_path)
    tiny.edit(rope_parameters=NEW, rope_scaling=LINEAR)
    with caplog.at_level(logging.WARNING):
        tiny.resolved()
    [line] = [r.message for r in caplog.records if "has both" in r.message]
    assert "rope_scaling = {'rope_type': 'linear'" in line
    assert "counts, as in transformers" in line


def test_two_names_with_two_values_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = by_first_names("MixtralForCausalLM", {"num_experts": 8, "num_local_experts": 4})
    assert found == {"num_experts": 8, "num_local_experts": 8}
    assert "num_experts = 8 and num_local_experts = 4 are two names" in caplog.text
    assert by_first_names("MixtralForCausalLM", {"num_experts": None, "num_local_experts": 4}) == {
        "num_experts": None, "num_local_experts": 4,
    }  # fmt: skip


NOT_OF_TEXT = {"Llama4ForCausalLM", "MllamaForCausalLM", "WhisperForConditionalGeneration"}
"""Second names of marks of images, and of an encoder's settings."""


def test_the_table_is_that_of_transformers() -> None:
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeTextConfig,
    )

    theirs: dict[str, dict[str, str]] = {}
    for table in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ):  # fmt: skip
        for kind, found in table.items():
            for name in [found] if isinstance(found, str) else found:
                if name in ARCHITECTURES and not name.startswith("Llama"):
                    names = dict(CONFIG_MAPPING[kind].attribute_map)
                    theirs[name] = {**theirs.get(name, {}), **names}
    theirs["Ernie4_5_VLMoeForCausalLM"] = dict(Ernie4_5_VLMoeTextConfig.attribute_map)
    wanted = {name: names for name, names in theirs.items() if names and name not in NOT_OF_TEXT}
    assert {name: dict(names) for name, names in SECOND_NAMES.items()} == wanted
