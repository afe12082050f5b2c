"""Steps of transformers' trees: replayed with the bits of eager ones, or eager for the published reason."""

from __future__ import annotations

import logging
import os
import random

import captured_trees
import every_causal_lm
import pytest
import transformers
from captured_trees import CAPTURED
from every_causal_lm import SERVED

from headrace import LLM

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours

COMMON = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "gpt_neox", "gpt2", "phi3", "cohere2", "olmo2", "starcoder2", "deepseek_v3",
)  # fmt: skip
NUM_OTHERS = 15
"""Models besides that are enough where long tails are sampled (headrace_testing/sampling.py)."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    transformers.logging.set_verbosity_error()
    known = every_causal_lm.model_types()
    kinds = [
        kind
        for kind, outcome in every_causal_lm.stored().items()
        if outcome.result == SERVED and kind in known
    ]
    if os.environ.get("HEADRACE_TESTS", "full") == "sampled":
        others = [kind for kind in kinds if kind not in COMMON]
        seen = random.Random(os.environ["HEADRACE_TEST_SEED"]).sample(others, NUM_OTHERS)
        kinds = [*COMMON, *seen]
    return dict(captured_trees.outcomes(tmp_path_factory.mktemp("trees"), kinds))


def test_replayed_steps_have_the_bits_of_eager_ones(found):
    assert {kind: why for kind, why in found.items() if why.startswith("DIFFERS")} == {}


def test_the_published_table_is_what_was_found(found):
    stored = every_causal_lm.stored_captures()
    assert found == {kind: stored[kind] for kind in found}


@pytest.mark.parametrize("kind", COMMON)
def test_common_trees_are_captured(found, kind):
    assert found[kind] == CAPTURED


def test_most_are_captured():
    """As the table has it, which is what was found."""
    assert sum(why == CAPTURED for why in every_causal_lm.stored_captures().values()) >= 80


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "ModernBertModel", "Qwen3Model"])
def test_vectors_of_captured_steps_have_the_bits_of_eager_ones(name, tmp_path, caplog):
    model_class = getattr(transformers, name)
    config = every_causal_lm.tiny_config(model_class.config_class, name)
    config.is_decoder = False
    model_class(config).save_pretrained(tmp_path)
    found = []
    for eager in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "headrace_engine"):
            llm = LLM(
                str(tmp_path), runner="pooling", model_impl="transformers", enforce_eager=eager,
                skip_tokenizer_init=True, max_model_len=64, dtype="bfloat16", num_threads=1,
                use_tqdm_on_load=False,
            )  # fmt: skip
        assert ("captured steps of up to" in caplog.text) is not eager
        prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 9, 1, 20)]
        found.append([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)])
    assert found[0] == found[1]
