"""Models that take images beside transformers' on tiny checkpoints: towers, places, prompts with images in
one pass and in pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from adapter_files import merge_files, stored_modules, with_adapters
from torch import Tensor

from headrace_core.arrays import PackedArray
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.model import (
    INPUT_EMBEDS,
    MROPE_POSITIONS,
    InputEmbeds,
    SupportsMRoPE,
    SupportsMultiModal,
)
from headrace_core.multimodal import MediaInput
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.lora.files import Factors
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import write_adapter
from headrace_testing.model.decoders import PagedDriver, build_context, randomise
from headrace_testing.sampling import turns

IMAGE = 120
"""Placeholder."""


@turns(3)
class VisionConformance:
    """What a subclass must say: the class, its tiny config, and two images as the model takes them."""

    tolerance: ClassVar[float] = 1e-4
    sees_whole: ClassVar[bool] = False
    """Tokens of an image all see each other: prompts are cut between images only."""
    tower_adapters: ClassVar[bool] = True
    """False: no layer of the towers takes adapters, or the files have names that adapters never have."""
    chooses_vectors: ClassVar[bool] = False
    """The towers choose rows of a table, which need not be others with an adapter."""
    names_of_towers: ClassVar[tuple[str, ...]]
    """Beginnings of the names of tensors that text alone does without."""

    def hf_class(self) -> Any:
        raise NotImplementedError

    def hf_config(self) -> Any:
        raise NotImplementedError

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of different sizes, if the family has such."""
        raise NotImplementedError

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """The same for transformers' ``forward``."""
        return {"pixel_values": torch.stack([image["pixel_values"] for image in images])}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("vision")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path) -> Any:
        torch.manual_seed(0)
        reference = cls().hf_class()(cls().hf_config()).eval()
        randomise(reference)
        cls().save(reference, folder)
        return reference

    def save(self, reference: Any, folder: Path) -> None:
        """Write the checkpoint that is loaded."""
        reference.save_pretrained(folder)

    def with_config(self, folder: Path, into: Path, **changed: Any) -> Path:
        """The checkpoint with other values in its config; an object's values are added to those there."""
        config = json.loads((folder / "config.json").read_text())
        for key, value in changed.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (into / "config.json").write_text(json.dumps(config))
        (into / "model.safetensors").symlink_to(folder / "model.safetensors")
        return into

    def load(self, folder: Path, *, with_slots: bool = False, **settings: Any) -> Any:
        """The model, with its towers whether or not a package with processors is installed; with slots for
        adapters both."""
        config = ModelConfig(model=str(folder), **settings)
        info = resolve(config, LoadConfig(), CpuPlatform())
        if "limit_mm_per_prompt" not in settings:
            info = replace(info, processor=info.architecture)
        if not with_slots:
            return load_model(info, build_context(info))
        context, slots = with_adapters(build_context(info), towers=True)
        return load_model(info, context), slots

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, reference: Any, folder: Path) -> Any:
        return cls().load(folder)

    def embed(self, model: Any, images: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        with torch.inference_mode():
            return list(model.embed_media("image", images))

    def prompt(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """(tokens with text in front of, between and behind images; offsets of images)."""
        tokens, offsets = [5, 6], []
        for index, count in enumerate(counts):
            offsets.append(len(tokens))
            tokens += [IMAGE] * count + [7 + index]
        return [*tokens, 11, 12], offsets

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        ids = torch.tensor([tokens])
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            given |= self.hf_inputs(images)
            given["mm_token_type_ids"] = (ids == IMAGE).int()
        with torch.inference_mode():
            try:
                logits = reference(**given).logits[0]
            except TypeError:
                del given["mm_token_type_ids"]
                logits = reference(**given).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def rows(self, offset: int, count: int) -> list[int]:
        """Places of an image's vectors in the prompt."""
        return list(range(offset, offset + count))

    def last_keys(self, spans: Sequence[tuple[int, int]], first: int, number: int) -> Tensor:
        """See :func:`last_keys`."""
        return last_keys(spans, first, number)

    def borders(self, offsets: Sequence[int]) -> Sequence[int]:
        """Where a prompt may be cut that has images at these offsets, tokens of which see each other."""
        return offsets

    def forward(
        self,
        model: Any,
        tokens: list[int],
        offsets: list[int],
        images: Sequence[dict[str, Tensor]],
        pieces: Sequence[int],
    ) -> Tensor:
        """Log-probabilities of a prompt that is computed in pieces."""
        vectors = self.embed(model, images) if images else []
        driver, found, done = PagedDriver(model), [], 0
        rows = [
            row
            for offset, v in zip(offsets, vectors, strict=True)
            for row in self.rows(offset, len(v))
        ]
        values = torch.cat(vectors) if vectors else torch.zeros(0, 1)
        axes = None
        if isinstance(model, SupportsMRoPE):
            media = [
                MediaInput("image", packed(image), str(i), len(v), offset)
                for i, (image, v, offset) in enumerate(zip(images, vectors, offsets, strict=True))
            ]
            axes = model.mrope_positions(len(tokens), media)
        for size in pieces:
            extra: dict[str, Any] = {}
            mine = [i for i, row in enumerate(rows) if done <= row < done + size]
            if mine:
                at = torch.tensor([rows[i] - done for i in mine])
                extra[INPUT_EMBEDS] = InputEmbeds(at, values[mine])
            if axes is not None:
                extra[MROPE_POSITIONS] = axes[:, done : done + size]
            batch = driver.batch({"a": tokens[done : done + size]})
            if self.sees_whole:
                spans = [(o, o + len(v)) for o, v in zip(offsets, vectors, strict=True)]
                last = self.last_keys(spans, done, size)
                batch = driver.prepared(replace(batch, last_keys=last))
            with torch.inference_mode():
                hidden = model.forward(replace(batch, extra=extra))
                found.append(model.compute_logits(hidden).float())
            done += size
        assert done == len(tokens)
        return torch.log_softmax(torch.cat(found), dim=-1)

    def test_it_takes_images(self, model: Any) -> None:
        assert isinstance(model, SupportsMultiModal)
        assert "image" in model.modalities

    def test_text_alone(self, reference: Any, model: Any) -> None:
        tokens = [5, 6, 7, 8, 9]
        found = self.forward(model, tokens, [], [], [5])
        torch.testing.assert_close(
            found, self.logprobs(reference, tokens, []), atol=self.tolerance, rtol=0
        )

    @turns(1)
    def test_two_images_in_a_prompt(self, reference: Any, model: Any) -> None:
        images = self.images()
        tokens, offsets = self.prompt([len(v) for v in self.embed(model, images)])
        found = self.forward(model, tokens, offsets, images, [len(tokens)])
        expected = self.logprobs(reference, tokens, images)
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def test_pieces_that_end_within_an_image(self, reference: Any, model: Any) -> None:
        images = self.images()
        tokens, offsets = self.prompt([len(v) for v in self.embed(model, images)])
        pieces = [3, 2, len(tokens) - 7, 1, 1]
        if self.sees_whole:
            borders = [0, 1, *self.borders(offsets), len(tokens) - 2, len(tokens) - 1, len(tokens)]
            pieces = [end - begin for begin, end in itertools.pairwise(borders)]
        found = self.forward(model, tokens, offsets, images, pieces)
        expected = self.logprobs(reference, tokens, images)
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def test_images_do_not_see_each_other(self, model: Any) -> None:
        together = self.embed(model, self.images())
        for index, image in enumerate(self.images()):
            (alone,) = self.embed(model, [image])
            torch.testing.assert_close(alone, together[index], atol=1e-5, rtol=1e-5)

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        first = self.images()[0]
        changed = {**first, "pixel_values": first["pixel_values"].flip(0, -1)}
        (own,), (other,) = self.embed(model, [first]), self.embed(model, [changed])
        assert float((own - other).abs().max()) > 1e-3

    def test_an_adapter_of_the_tower(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        """In a slot it makes the vectors of a checkpoint with its products in the tower's weights."""
        if not self.tower_adapters:
            with pytest.raises((ConfigError, AssertionError)):
                assert self.tower_modules(folder, self.load(folder, with_slots=True)[1])
            return
        own, slots = self.load(folder, with_slots=True)
        modules = self.tower_modules(folder, slots)
        assert modules
        added = write_adapter(tmp_path / "adapter", modules, scale=0.5)
        slots.place(1, slots.read(str(tmp_path / "adapter")))
        slots.choose_media(1)
        (tmp_path / "merged").mkdir()
        merge_files(folder, tmp_path / "merged", slots, added)
        images = self.images()
        plain = self.embed(model, images)
        wanted = self.embed(self.load(tmp_path / "merged"), images)
        for found, expected, before in zip(self.embed(own, images), wanted, plain, strict=True):
            assert self.chooses_vectors or float((expected - before).abs().max()) > 1e-3
            largest = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(found, expected, atol=2e-4 * largest, rtol=0)

    def tower_modules(self, folder: Path, slots: Adapters) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the towers' modules that take adapters, by the checkpoint's names."""
        return {
            name: (outputs, inputs)
            for name, (outputs, inputs) in stored_modules(folder, slots).items()
            if is_of_tower(slots, name, outputs, inputs)
        }

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        model = self.load(folder, limit_mm_per_prompt={"image": 0, "video": 0})
        assert not isinstance(model, SupportsMultiModal)
        tokens = [5, 6, 7, 8, 9]
        found = self.forward(model, tokens, [], [], [5])
        torch.testing.assert_close(
            found, self.logprobs(reference, tokens, []), atol=self.tolerance, rtol=0
        )


def last_keys(spans: Sequence[tuple[int, int]], first: int, number: int) -> Tensor:
    """See :attr:`headrace_core.batch.ForwardBatch.last_keys`, of tokens ``first`` and the next."""
    last = torch.arange(first, first + number, dtype=torch.int32)
    for begin, end in spans:
        last[(last >= begin) & (last < end)] = end - 1
    return last


def is_of_tower(slots: Adapters, name: str, outputs: int, inputs: int) -> bool:
    """True if a module of this shape has a place, and that is in a tower."""
    assert slots.names is not None
    blank = Factors(torch.empty(1, inputs), torch.empty(outputs, 1), 1.0)
    try:
        pieces = slots.names.pieces(name, blank, Path(name))
    except WeightsError:
        return False
    return bool(pieces) and all(piece.place.rows is slots.media for piece in pieces)


def packed(image: dict[str, Tensor]) -> dict[str, PackedArray]:
    return {
        name: PackedArray(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numpy().tobytes())
        for name, t in image.items()
    }
