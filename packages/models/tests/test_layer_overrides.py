"""Methods for layers that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_families as families

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod
from headrace_models.layer_overrides import LayerOverrides
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import PagedDriver, build_context

SUITE = families.TestLlama()
PROMPT = SUITE.prompt(9)


class Named(QuantMethod):
    """Notes the layers that it is asked for; its methods are another's."""

    name = "named"

    def __init__(self, plain: QuantMethod) -> None:
        self.plain = plain
        self.layers: list[str] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: Any) -> QuantMethod:
        raise NotImplementedError

    @classmethod
    def refuse(cls, need: Any) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        self.layers.append(spec.name)
        return self.plain.for_layer(spec)


def load(path: Path, *entries: str) -> tuple[Named, list[Named], Any]:
    info = SUITE.resolve(path, max_model_len=64)
    context = build_context(info)
    default = Named(context.quant)
    methods = [Named(context.quant) for _ in entries]
    quant = LayerOverrides(default, list(zip(entries, methods, strict=True)))
    return default, methods, load_model(info, build_context(info, quant=quant))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SUITE.make_checkpoint(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False).path


def test_the_first_entry_counts(path: Path) -> None:
    default, [down, layer, head], model = load(
        path, r"re:.*\.down_proj$", "model.layers.0", "lm_head"
    )
    assert {name.rpartition(".")[2] for name in down.layers} == {"down_proj"}
    assert head.layers == ["lm_head"]
    assert all(name.startswith("model.layers.0.") for name in layer.layers)
    assert len(layer.layers) == 3, "query, key and value; output; gate and up"
    assert not any(name.startswith("model.layers.0.") for name in default.layers)
    assert default.layers
    assert PagedDriver(model).step({"a": PROMPT}).isfinite().all()


def test_the_beginning_of_a_name_ends_at_a_dot(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model.layer' is no linear layer of the model; it has"):
        load(path, "model.layer")


def test_a_name_that_is_nearly_right(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'lm_haed' is no linear layer.*lm_head"):
        load(path, "lm_haed")


def test_some_parts_of_a_fused_layer(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"q_proj: 're:.*q_proj', .*k_proj: no entry"):
        load(path, "re:.*q_proj")


def test_what_is_no_pattern(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'re:\*' is not a pattern"):
        load(path, "re:*")
