"""The language model of Chameleon beside transformers' whole class."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from relaid_conformance import RelaidConformance
from test_relaid_families import TINY
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint

NAMES = ("A", "B", "C", "D", "BA", "BB")
PIECES = {f"IMGIMG{letters}Z": 100 + number for number, letters in enumerate(NAMES)}
VOCABULARY = {"<image>": 120, "the": 5, **PIECES}
TOWER: dict[str, Any] = {
    "embed_dim": 8, "num_embeddings": 4, "latent_channels": 32, "resolution": 16, "base_channels": 32,
    "channel_multiplier": [1, 1], "num_res_blocks": 1,
}  # fmt: skip


class TestChameleon7B(RelaidConformance):
    published = "ChameleonTextForCausalLM"
    flips_ties = False
    swin_norm: ClassVar[bool] = False

    def hf_class(self) -> Any:
        from transformers import ChameleonForConditionalGeneration

        return ChameleonForConditionalGeneration

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ChameleonConfig

        own = {"vq_config": TOWER, "vocabulary_map": VOCABULARY, "swin_norm": self.swin_norm}
        return ChameleonConfig(**{**TINY, **own, **overrides})

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if ".vqmodel." not in name}

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        return super().logits(model, ids, mask).clamp(min=-3e4)

    @pytest.mark.parametrize(
        ("change", "named"),
        [({"vocabulary_map": None}, "vocabulary_map"), ({"tie_word_embeddings": True}, "tie_word"),
         ({"vocabulary_map": {"IMGIMGAxZ": 3}}, "IMGIMGAxZ"),
         ({"vocabulary_map": {"IMGIMGAAZ": 300}}, "beyond vocab_size")],
    )  # fmt: skip
    def test_refused(self, checkpoint: Checkpoint, change: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.open(checkpoint.path, hf_overrides=change)


class TestChameleon34B(TestChameleon7B):
    swin_norm = True
