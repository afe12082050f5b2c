"""Latent attention to the tokens that an indexer picks: fewer than the prompt has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from model_families_conformance import FamilyConformance
from test_latent_families import EXPERTS, TINY, YARN

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import SparseIndexerSpec
from headrace_core.model import CausalLM
from headrace_testing.model.decoders import Checkpoint, PagedDriver

# With so many heads no score is 0, of which several would be equal.
INDEXER: dict[str, Any] = {"index_topk": 11, "index_head_dim": 18, "index_n_heads": 24}


class TestDeepseekV32Picking(FamilyConformance):
    """Contexts up to 64 tokens, of which 11 are seen."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import DeepseekV32ForCausalLM

        return DeepseekV32ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV32Config

        own = {"first_k_dense_replace": 1, "rope_parameters": YARN, "attention_bias": True}
        return DeepseekV32Config(**{**TINY, **EXPERTS, **INDEXER, **own, **overrides})

    def test_picking_matters(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        prompt = self.prompt(self.prompt_len)
        topk_indices = PagedDriver(model).step({"a": prompt})
        more = self.open(checkpoint.path, hf_overrides={"index_topk": 64})
        assert len(more.attention_layers()) == 3  # the indexer would pick all, and is not there
        everything = PagedDriver(more).step({"a": prompt})
        top_k = INDEXER["index_topk"]
        torch.testing.assert_close(topk_indices[:top_k], everything[:top_k], atol=1e-4, rtol=0)
        assert float((topk_indices[top_k:] - everything[top_k:]).abs().max()) > 0.1

    def test_keys_are_cached_beside_latents(self, model: CausalLM) -> None:
        specs = [layer.kv_spec for layer in model.attention_layers().values()]
        assert specs.count(SparseIndexerSpec(8, 1, 18, "float32")) == 3
        assert len(specs) == 6


class TestGlmMoeDsa(TestDeepseekV32Picking):
    """The second layer attends to what the first one's indexer picks."""

    no_stages = "has picked"

    def hf_class(self) -> Any:
        from transformers import GlmMoeDsaForCausalLM

        return GlmMoeDsaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GlmMoeDsaConfig

        own = {"first_k_dense_replace": 1, "rope_parameters": {"rope_theta": 300.0},
               "attention_bias": True, "indexer_types": ["full", "shared", "full"]}  # fmt: skip
        return GlmMoeDsaConfig(**{**TINY, **EXPERTS, **INDEXER, **own, **overrides})

    def test_keys_are_cached_beside_latents(self, model: CausalLM) -> None:
        specs = [layer.kv_spec for layer in model.attention_layers().values()]
        assert specs.count(SparseIndexerSpec(8, 1, 18, "float32")) == 2
        assert len(specs) == 5

    @pytest.mark.parametrize(
        ("said", "count"),
        [
            ({"index_topk_pattern": "FFS"}, 2),
            ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, 1),
            ({"index_topk_freq": 1}, 3),
            ({}, 3),
        ],
    )
    def test_ways_to_say_which_layers_share(
        self, checkpoint: Checkpoint, said: dict[str, Any], count: int, tmp_path: Any
    ) -> None:
        config = json.loads((checkpoint.path / "config.json").read_text())
        config = {**config, **said, "indexer_types": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        info = self.resolve(tmp_path, max_model_len=self.max_model_len)
        from headrace_testing.model.decoders import build_context

        model = self.load(info, build_context(info), load_format="dummy")
        assert len(model.attention_layers()) == 3 + count

    def test_published_configs_say_how_the_indexer_rotates(
        self, checkpoint: Checkpoint, model: CausalLM
    ) -> None:
        prompt = self.prompt(self.prompt_len)
        logits = PagedDriver(model).step({"a": prompt})
        for interleaved in (True, False):
            said = {"indexer_rope_interleave": interleaved}
            other = self.open(checkpoint.path, hf_overrides=said)
            assert torch.equal(PagedDriver(other).step({"a": prompt}), logits) == interleaved

    def test_heads_that_cannot_turn_are_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="index_head_dim = 2: must be at least"):
            self.open(checkpoint.path, hf_overrides={"index_head_dim": 2})

    def test_a_first_layer_that_shares_is_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match=r"indexer_types = .* the first of them full"):
            self.open(checkpoint.path, hf_overrides={"indexer_types": ["shared", "full", "full"]})
