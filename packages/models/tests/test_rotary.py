"""Rotary tables against transformers' own frequencies, for every kind of scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace_core.errors import UnsupportedModel
from headrace_models.config.rope import (
    KINDS,
    by_rotary_dim,
    of_windows,
    respelled,
    rope_settings,
    scaled_context,
)
from headrace_models.layers.rotary import rotary_table, rows_by_axes

HEAD_DIM = 16
PLAIN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "rope_theta": 700.0,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 48},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn with all keys": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0,
                           "original_max_position_embeddings": 24, "attention_factor": 1.25},
    "yarn, mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3,
                     "original_max_position_embeddings": 24, "truncate": False},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 48,
                 "short_factor": [1.0 + i / 9 for i in range(8)],
                 "long_factor": [2.0 + i for i in range(8)]},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.4},
}  # fmt: skip


@dataclass
class Context:
    max_model_len: int
    device: str = "cpu"


def expected(config: dict[str, Any], length: int) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reference = LlamaConfig(**config)
    kind = reference.rope_parameters["rope_type"]
    if kind == "default":
        base = reference.rope_parameters["rope_theta"]
        frequencies, factor = 1.0 / base ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](reference, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def test_ntk_of_gte() -> None:
    """Base times factor, frequencies over ``factor ** (2 / dim)``: its authors' code, restated."""
    config = {**PLAIN, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    table = rotary_table(Context(96), rope_settings(config), HEAD_DIM)  # type: ignore[arg-type]
    base = 700.0 * 8.0
    frequencies = 1.0 / base ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(96).float(), frequencies / 8.0 ** (2 / HEAD_DIM))
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=-1))
    mixed = rope_settings({**PLAIN, "rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 2.0}})
    with pytest.raises(UnsupportedModel, match="mixed_b"):
        rotary_table(Context(8), mixed, HEAD_DIM)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [40, 96])
@pytest.mark.parametrize("name", [None, *SCALINGS])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_tables(name: str | None, length: int, spelling: str) -> None:
    config = dict(PLAIN)
    if name is not None:
        block = dict(SCALINGS[name])
        if spelling == "rope_parameters":
            block["rope_theta"] = config.pop("rope_theta")
        config[spelling] = block
    rope = rope_settings(config)
    table = rotary_table(Context(length), rope, HEAD_DIM, max_positions=96)  # type: ignore[arg-type]
    assert table.shape == (length, HEAD_DIM)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected(config, length), atol=2e-5, rtol=0)


def test_dynamic_beyond_the_trained_context_uses_one_base() -> None:
    config = {**PLAIN, "rope_scaling": SCALINGS["dynamic"]}
    table = rotary_table(Context(200), rope_settings(config), HEAD_DIM, max_positions=96)  # type: ignore[arg-type]
    torch.testing.assert_close(table, expected(config, 200), atol=5e-5, rtol=0)


def test_partial_rotary() -> None:
    config = {**PLAIN, "partial_rotary_factor": 0.5}
    table = rotary_table(Context(9), rope_settings(config), HEAD_DIM)  # type: ignore[arg-type]
    assert table.shape == (9, HEAD_DIM // 2)


@pytest.mark.parametrize("kind", [None, *ROPE_INIT_FUNCTIONS])
def test_every_kind_of_transformers_is_known(kind: str | None) -> None:
    assert (kind or "default") in KINDS
    assert kind is None or any(block["rope_type"] == kind for block in SCALINGS.values())


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_in_time_height_and_width(interleaved: bool) -> None:
    """Against the tables of Qwen2-VL, and of Qwen3-VL, whose axes take turns."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VLRotaryEmbedding,
        Qwen2VLTextConfig,
    )
    from transformers.models.qwen3_vl.modeling_qwen3_vl import (
        Qwen3VLTextConfig,
        Qwen3VLTextRotaryEmbedding,
    )

    sections = [4, 2, 2] if interleaved else [3, 2, 3]
    block = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": sections}
    config = {**PLAIN, "head_dim": HEAD_DIM, "rope_parameters": block}
    if interleaved:
        reference = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**config))
    else:
        reference = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**config))
    positions = torch.stack([torch.arange(11) * step for step in (1, 3, 7)])
    cosines, sines = reference(torch.zeros(1), positions[:, None])

    rope = rope_settings({**PLAIN, "rope_parameters": {**block, "mrope_interleaved": interleaved}})
    table = rotary_table(Context(96), rope, HEAD_DIM)  # type: ignore[arg-type]
    rows = rows_by_axes(table, positions, rope)
    expected = torch.cat((cosines[0, :, : HEAD_DIM // 2], sines[0, :, : HEAD_DIM // 2]), dim=-1)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=0)


def test_text_stands_at_one_place_on_all_axes() -> None:
    block = {"type": "mrope", "mrope_section": [2, 3, 3]}
    rope = rope_settings({**PLAIN, "rope_scaling": block})
    table = rotary_table(Context(20), rope, HEAD_DIM)  # type: ignore[arg-type]
    assert torch.equal(rows_by_axes(table, torch.arange(9).expand(3, 9), rope), table[:9])
    wrong = rope_settings({**PLAIN, "rope_scaling": {**block, "mrope_section": [2, 3, 4]}})
    with pytest.raises(UnsupportedModel, match="must be 8 frequencies"):
        rows_by_axes(table, torch.arange(9).expand(3, 9), wrong)


def test_layers_with_windows_are_never_scaled() -> None:
    old = {**PLAIN, "rope_scaling": SCALINGS["yarn"]}
    assert rope_settings(old).kind == "yarn"
    local = rope_settings(of_windows(old, 33.0), "sliding_attention")
    assert (local.kind, local.theta) == ("default", 33.0)
    new = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}}  # fmt: skip
    assert rope_settings(of_windows(new, 33.0), "sliding_attention").theta == 5.0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "spiral"}, "'spiral'.*default, linear"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "linear", "factor": "4"}, "factor = '4'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, r"short_factor = \[1.0\]: must be 8"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor = nan"),
        ({"rope_type": "proportional", "partial_rotary_factor": 3}, "partial_rotary_factor = 3"),
        ({"mrope_section": [1, 2]}, r"mrope_section = \[1, 2\]: must be 3"),
    ],
)
def test_wrong_settings_are_named(block: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        rotary_table(Context(9), rope_settings({**PLAIN, "rope_scaling": block}), HEAD_DIM)  # type: ignore[arg-type]


extremes = st.sampled_from([0, -1, 1, 1e-300, 1e300, 2.0, 1e9, None, "4", True, 10**400])
NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "rope_theta", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip
FACTORS = st.lists(extremes, min_size=8, max_size=8)
blocks = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(KINDS)},
    optional={**dict.fromkeys(NUMBERS, extremes), "short_factor": FACTORS, "long_factor": FACTORS},
)


@pytest.mark.req("SEC-22")
@settings(max_examples=300, deadline=None)
@given(block=blocks)
def test_extreme_settings_give_a_finite_table_or_an_error(block: dict[str, Any]) -> None:
    try:
        config = {**PLAIN, "rope_parameters": block}
        assert 1 <= scaled_context(config, 96) < 2**31
        table = rotary_table(Context(40), rope_settings(config), HEAD_DIM, max_positions=96)  # type: ignore[arg-type]
    except UnsupportedModel:
        return
    assert bool(table.isfinite().all())


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 96),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 384),
        ({"rope_scaling": SCALINGS["llama3"]}, 96),
        ({"rope_scaling": SCALINGS["longrope"]}, 96),
        ({"rope_scaling": SCALINGS["dynamic"]}, 96),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 96),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
                              "sliding_attention": {"rope_type": "default"}}}, 96),
    ],
)  # fmt: skip
def test_context_by_scaling(config: dict[str, Any], length: int) -> None:
    assert scaled_context({**PLAIN, **config}, 96) == length


NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
OLD = {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (NEW, {"rope_theta": 7.0}, {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}),
        (NEW, {"rope_scaling": {"type": "yarn"}},
         {"rope_parameters": {"type": "yarn", "rope_type": "yarn"}}),
        (OLD, {"rope_parameters": {"rope_type": "yarn"}}, {"rope_scaling": {"rope_type": "yarn"}}),
        (OLD, {"rope_theta": 7.0}, {"rope_theta": 7.0}),
        (OLD, {"rope_scaling": None}, {"rope_scaling": None}),
        ({}, {"rope_scaling": {"type": "yarn"}}, {"rope_scaling": {"type": "yarn"}}),
        ({"text_config": NEW}, {"text_config": {"rope_scaling": {"rope_type": "yarn"}}},
         {"text_config": {"rope_parameters": {"rope_type": "yarn"}}}),
        (NEW, {"hidden_size": 8}, {"hidden_size": 8}),
    ],
)  # fmt: skip
def test_overrides_take_the_config_s_spelling(config, overrides, expected) -> None:
    assert respelled(overrides, config) == expected


def test_a_number_of_dimensions_comes_to_as_many() -> None:
    """Also where their share of a head, times the head, is a little less than that number."""
    config = {"rotary_dim": 30, "rope_theta": 500.0}
    rope = rope_settings(by_rotary_dim(config, 44))
    assert int(44 * (30 / 44)) == 29
    assert int(44 * rope.partial_rotary_factor) == 30
