"""What published checkpoints hold, and their configs say, that no class of transformers writes today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_gpt_families as gpts
import test_latent_families as latent
import test_moe_families as moe
import test_other_recurrences as others
import test_recurrent_families as recurrent
import test_relaid_families as relaid
import torch
from relaid_conformance import add, alibi_mask, renamed, rewrite
from test_relaid_families import check
from torch import Tensor

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.layers.attention.alibi import alibi_slopes


class TestLayersBehindTheLast:
    """They predict further tokens, and are passed over."""

    @pytest.mark.parametrize(
        "suite", [moe.TestGlm4Moe, moe.TestHYV3, moe.TestBailingMoeV2, latent.TestDeepseekV3]
    )
    def test_as_many_as_the_config_says(self, suite: Any, tmp_path: Path) -> None:
        tests = suite()
        made = tests.make_checkpoint(tmp_path)
        behind = tests.hf_config().num_hidden_layers
        rewrite(tmp_path, num_nextn_predict_layers=1)
        add(tmp_path, {f"model.layers.{behind}.eh_proj.weight": torch.ones(4, 8)})
        check(tests, made, tmp_path)
        rewrite(tmp_path, num_nextn_predict_layers=0)
        with pytest.raises(WeightsError, match=r"eh_proj.* belongs to no layer"):
            tests.open(tmp_path)

    def test_under_a_name_of_their_own(self, tmp_path: Path) -> None:
        tests = recurrent.TestOlmoHybrid()
        made = tests.make_checkpoint(tmp_path)
        add(tmp_path, {"mtp.layers.0.input_layernorm.weight": torch.ones(4)})
        check(tests, made, tmp_path)


def test_llama4s_switch_is_a_number(tmp_path: Path) -> None:
    tests = latent.TestLlama4()
    made = tests.make_checkpoint(tmp_path)
    rewrite(tmp_path, attn_temperature_tuning=4)
    check(tests, made, tmp_path)


def test_llama4s_switch_is_off(tmp_path: Path) -> None:
    tests = latent.TestLlama4Dense()
    made = tests.make_checkpoint(tmp_path)
    rewrite(tmp_path, attn_temperature_tuning=0)
    check(tests, made, tmp_path)


def test_minimax_m2_counts_the_dimensions_that_turn(tmp_path: Path) -> None:
    tests = moe.TestMiniMaxM2()
    made = tests.make_checkpoint(tmp_path)
    rewrite(tmp_path, drop=("rope_parameters",), rope_theta=500.0, rotary_dim=12)
    check(tests, made, tmp_path)


class Stretched(gpts.TestJAIS):
    """Distances count less."""

    def mask(self, length: int) -> Tensor:
        return alibi_mask(alibi_slopes(6) / 2.5, length)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        scaling = {"type": "linear", "factor": 2.5}
        return {**super().config_of(config), "alibi_scaling": scaling}


class TestJais:
    def test_distances_are_divided(self, tmp_path: Path) -> None:
        made = Stretched().make_checkpoint(tmp_path)
        check(Stretched(), made, tmp_path)

    def test_not_within_the_trained_length(self, tmp_path: Path) -> None:
        tests = gpts.TestJAIS()
        made = tests.make_checkpoint(tmp_path)
        rewrite(tmp_path, alibi_scaling={"type": "linear", "train_seq_len": tests.max_model_len})
        check(tests, made, tmp_path)
        rewrite(tmp_path, alibi_scaling={"type": "linear", "train_seq_len": 10})
        with pytest.raises(UnsupportedModel, match="must be at most alibi_scaling's"):
            tests.open(tmp_path)

    def test_slopes_are_stored_and_the_prefix_is_not(self, tmp_path: Path) -> None:
        tests = gpts.TestJAIS()
        made = tests.make_checkpoint(tmp_path)
        renamed(tmp_path, lambda name: name.removeprefix("transformer."))
        add(tmp_path, {"relative_pe.slopes": torch.ones(6, 1)})
        check(tests, made, tmp_path)


class Lengthened(relaid.TestTeleChat2):
    """Trained first on 32 tokens, then on 64: the base is stretched by three."""

    def hf_config(self, **overrides: Any) -> Any:
        rope = {"rope_type": "default", "rope_theta": 10_000.0 * 3 ** (18 / 16)}
        return super().hf_config(**{"rope_parameters": rope, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        own = {"base_seqlen": 32, "training_seqlen": 64, "rope_parameters": None}
        return {**super().config_of(config), **own}


class Based(relaid.TestInternLM):
    """The base in an object of its own."""

    def hf_config(self, **overrides: Any) -> Any:
        rope = {"rope_type": "default", "rope_theta": 300.0}
        return super().hf_config(**{"rope_parameters": rope, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        own = {"rotary": {"base": 300, "type": "dynamic"}, "rope_parameters": None}
        return {**super().config_of(config), **own}


@pytest.mark.parametrize("suite", [Lengthened, Based])
def test_rotary_bases_in_other_places(suite: Any, tmp_path: Path) -> None:
    tests = suite()
    made = tests.make_checkpoint(tmp_path)
    check(tests, made, tmp_path)


@pytest.mark.parametrize(
    ("suite", "settings", "message"),
    [
        (relaid.TestDeci7B, {"num_key_value_heads_per_layer": [2]}, "a list of 3 integers"),
        (
            relaid.TestDeci,
            {"block_configs": [{"attention": {"window_length": 8}}] * 5},
            "window_length = 8: must be absent",
        ),
        (gpts.TestMpt, {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm': must be"),
        (recurrent.TestMiniMax, {"attn_type_list": [1, 0, 1, 0, 1, 0]}, "numbers, 0 or 1"),
        (moe.TestHunYuanMoEV1, {"moe_topk": [2]}, "a list of 3 integers"),
        (others.TestKimiLinear, {"mla_use_nope": False}, "mla_use_nope = False"),
    ],
)
def test_what_is_not_served_is_refused(
    suite: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tests = suite()
    tests.make_checkpoint(tmp_path)
    rewrite(tmp_path, **settings)
    with pytest.raises(UnsupportedModel, match=message):
        tests.open(tmp_path)
