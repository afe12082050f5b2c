"""Pruned videos beside transformers, which is shown the whole ones with the dropped tokens masked out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_vision_videos as videos
import torch
from torch import Tensor
from video_conformance import VIDEO, Laid, VideoConformance
from vision_conformance import packed

from headrace_core.multimodal import MediaInput
from headrace_models.layers.vision.video_pruning import (
    RETAINED,
    UNPRUNED,
    most_dissimilar,
    with_indices,
    without_indices,
)
from headrace_testing.model.decoders import randomise

FAMILIES = {
    "qwen2_vl": videos.TestQwen2VL,
    "qwen2_5_vl": videos.TestQwen2_5VL,
    "qwen3_vl": videos.TestQwen3VL,
}


class Family(NamedTuple):
    """A family's conformance class, its model by the library, and headrace's."""

    conformance: VideoConformance
    reference: Any
    model: Any


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    made: Any = FAMILIES[request.param]()
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    reference = made.hf_class()(made.hf_config()).eval()
    randomise(reference)
    made.save(reference, folder)
    return Family(made, reference, made.load(folder))


def most_alike(vectors: list[list[float]], per: int, number: int) -> set[int]:
    """The tokens that are most like the one at their place in the frame before, one by one."""

    def cosine(a: list[float], b: list[float]) -> float:
        norms = math.hypot(*a) * math.hypot(*b)
        return sum(x * y for x, y in zip(a, b, strict=True)) / norms

    alike = {i: cosine(vectors[i], vectors[i - per]) for i in range(per, len(vectors))}
    return set(sorted(alike, key=lambda i: -alike[i])[:number])


def pruned(family: Family, whole: Laid, item: dict[str, Tensor], dropped: set[int]) -> Laid:
    """The prompt without the dropped tokens of its video, as the engine has it."""
    image, video = whole.media
    number, model = video.num_tokens - len(dropped), family.model
    inputs = {**item, RETAINED: torch.tensor([number])}
    if family.conformance.times(item) > 1:
        span = whole.tokens[video.offset : video.offset + video.num_tokens]
        inputs[UNPRUNED] = torch.tensor([-1 if token == VIDEO else token for token in span])
    kept = MediaInput("video", packed(inputs), "p", number, video.offset)
    tokens = [token for i, token in enumerate(whole.tokens) if i not in dropped]
    with torch.inference_mode():
        (made,) = model.embed_media("video", [inputs])
    vectors, places = model.retained_places(kept, made)
    axes = model.mrope_positions(len(tokens), [image, kept])
    begin, end = kept.offset, kept.offset + number
    assert axes[:, begin:end].max() == axes[:, end - 1].max()
    axes[:, begin:end] = axes[:, begin : begin + 1] + places
    model.mrope_positions = lambda *_: axes
    rows = [*whole.rows[: image.num_tokens], *range(begin, end)]
    return Laid(tokens, [image, kept], rows, torch.cat([whole.values[: image.num_tokens], vectors]))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_pruned_videos_are_whole_ones_without_some_tokens(family: Family, share: float) -> None:
    check, model = family.conformance, family.model
    items = [check.images()[0], check.videos()[0]]
    whole = check.laid(model, items)
    places = model.mrope_positions(len(whole.tokens), whole.media)
    first = whole.media[0].num_vectors
    vectors, frames = whole.values[first:], int(items[1]["video_grid_thw"][0])
    per = len(vectors) // frames
    number = min(round(share * len(vectors)), len(vectors) - per)
    alike = most_alike(vectors.tolist(), per, number)
    dropped = {whole.rows[first + index] for index in alike}
    kept = [i for i in range(len(whole.tokens)) if i not in dropped]
    mask = torch.tensor([[i not in dropped for i in range(len(whole.tokens))]]).long()
    expected = check.expected(
        family.reference, whole, items, attention_mask=mask, position_ids=places[:, None]
    )[kept]
    own = pruned(family, whole, items[1], dropped)
    try:
        assert model.mrope_positions(0, []).tolist() == places[:, kept].tolist()
        count = len(own.tokens)
        for pieces in ([count], [3, 2, count - 7, 1, 1]):
            found = check.in_pieces(model, own, pieces)
            torch.testing.assert_close(found, expected, atol=check.tolerance, rtol=0)
    finally:
        del model.mrope_positions


def test_the_first_frame_is_kept_and_of_equal_tokens_the_earlier() -> None:
    still = torch.eye(4, 8).expand(5, 4, 8).clone()
    still[3, 2] = -still[3, 2]
    assert most_dissimilar(still.flatten(0, 1), 5, 4).tolist() == [0, 1, 2, 3]
    assert most_dissimilar(still.flatten(0, 1), 5, 6).tolist() == [0, 1, 2, 3, 14, 18]
    assert most_dissimilar(still.flatten(0, 1), 5, 7).tolist() == [0, 1, 2, 3, 4, 14, 18]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_indices_travel_in_every_dtype(dtype: torch.dtype) -> None:
    indices = torch.tensor([0, 1, 255, 256, 257, 65_535, 65_536, 9_999_999])
    vectors = torch.randn(len(indices), 6).to(dtype)
    found, back = without_indices(with_indices(vectors, indices))
    assert torch.equal(found, vectors)
    assert back.tolist() == indices.tolist()
