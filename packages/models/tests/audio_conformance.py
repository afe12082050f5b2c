"""Models that take recordings beside transformers on tiny checkpoints: :mod:`vision_conformance`, with
recordings in the place of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.model import SupportsMultiModal


class Heard(VisionConformance):
    """Recordings, which stand for the suite's images."""

    takes: ClassVar[tuple[str, ...]] = ("audio",)
    """Modalities of the model."""

    def embed(self, model: Any, images: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        with torch.inference_mode():
            return list(model.embed_media("audio", images))

    def test_it_takes_images(self, model: Any) -> None:
        assert isinstance(model, SupportsMultiModal)
        assert set(model.modalities) == set(self.takes)

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """What is played backwards is."""
        first = self.images()[0]
        turned = {**first, "input_features": first["input_features"].flip(-2)}
        own, other = self.embed(model, [first, turned])
        assert float((own - other).abs().max()) > 1e-3

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        model = self.load(folder, limit_mm_per_prompt=dict.fromkeys(self.takes, 0))
        assert not isinstance(model, SupportsMultiModal)
        tokens = [5, 6, 7, 8, 9]
        found = self.forward(model, tokens, [], [], [5])
        torch.testing.assert_close(
            found, self.logprobs(reference, tokens, []), atol=self.tolerance, rtol=0
        )


class HeardAlone(Heard):
    """transformers encodes each recording by itself, where it would hear the silence behind shorter ones."""

    divisor: ClassVar[float] = 1.0
    """Of logits, where transformers' class forgets it."""

    def features(self, reference: Any, image: dict[str, Tensor]) -> Tensor:
        """Vectors of a recording [vectors, hidden], by transformers."""
        raise NotImplementedError

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            vectors = reference.get_input_embeddings()(ids)
            if images:
                heard = torch.cat([self.features(reference, image) for image in images])
                vectors[ids == IMAGE] = heard
            logits = reference(inputs_embeds=vectors, attention_mask=torch.ones_like(ids)).logits[0]
        return torch.log_softmax(logits.float() / self.divisor, dim=-1)
