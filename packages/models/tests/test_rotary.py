"""Rotary tables against transformers' own frequencies, for every kind of scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import KINDS, rope_settings, scaled_context

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


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "spiral"}, "'spiral'.*default, linear"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "linear", "factor": "4"}, "factor = '4'"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, r"short_factor = \[1.0\]: must be 8"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor = nan"),
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


@pytest.mark.spec("CFG-MODEL")
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
