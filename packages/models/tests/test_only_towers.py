"""Models of which an engine needs the towers only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from headrace_core.model import WeightRule
from headrace_models.loading.only_towers import layers_passed_over, with_one_layer


@dataclass(frozen=True)
class Context:
    config: dict[str, Any] = field(default_factory=dict)


def test_one_layer_is_left_and_lists_of_layers_are_cut() -> None:
    config = {
        "num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "layer_sizes": [1, 2],
        "eos_token_id": [1, 2, 3], "hidden_size": 8,
    }  # fmt: skip
    context: Any = Context(config)
    wanted = {**config, "num_hidden_layers": 1, "layer_types": ["a"]}
    assert with_one_layer(context).config == wanted
    for other in ({"num_hidden_layers": 1}, {"n_layer": 4}):
        context = Context(other)
        assert with_one_layer(context).config == other


def test_names_with_a_number_are_passed_over() -> None:
    rules = [WeightRule("model.layers.{}.mlp.up", "layers.{}.up"), WeightRule("lm_head", "head")]
    patterns = layers_passed_over(rules)

    def passed_over(name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    assert passed_over("model.layers.11.mlp.up.weight")
    assert not passed_over("model.layers.11.mlp.down.weight")
    assert not passed_over("lm_head.weight")
