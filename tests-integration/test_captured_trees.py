"""Steps of transformers' trees: replayed with the bits of eager ones, or eager for the published reason."""

from __future__ import annotations

import captured_trees
import every_causal_lm
import pytest
import transformers
from captured_trees import CAPTURED
from every_causal_lm import SERVED

pytestmark = [
    pytest.mark.spec("MODEL-TRANSFORMERS-BACKEND"),
    pytest.mark.filterwarnings("ignore"),  # of model code that is not ours
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    known = every_causal_lm.model_types()
    kinds = [
        kind
        for kind, outcome in every_causal_lm.stored().items()
        if outcome.result == SERVED and kind in known
    ]
    return dict(captured_trees.outcomes(tmp_path_factory.mktemp("trees"), kinds))


def test_replayed_steps_have_the_bits_of_eager_ones(found):
    assert {kind: why for kind, why in found.items() if why.startswith("DIFFERS")} == {}


def test_the_published_table_is_what_was_found(found):
    stored = every_causal_lm.stored_captures()
    assert found == {kind: stored[kind] for kind in found}


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
     "gpt_neox", "gpt2", "phi3", "cohere2", "olmo2", "starcoder2", "deepseek_v3"],
)  # fmt: skip
def test_common_trees_are_captured(found, kind):
    assert found[kind] == CAPTURED


def test_most_are_captured(found):
    assert sum(why == CAPTURED for why in found.values()) >= 80
