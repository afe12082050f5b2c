"""Videos in the families that take them, beside transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import test_vision_eagle as eagle
import test_vision_idefics3 as idefics3
import test_vision_internvl as internvl
import test_vision_internvl_chat as internvl_chat
import test_vision_language as language
import test_vision_llava_next as llava_next
import test_vision_nemotron_vl as nemotron_vl
import test_vision_qwen3_vl as qwen3
import torch
from test_vision_language import drawn
from torch import Tensor
from video_conformance import VALUES, VIDEO, VideoConformance
from vision_conformance import IMAGE

GRID = "video_grid_thw"
SECONDS = "second_per_grid_ts"


class Qwen(VideoConformance):
    """Videos that are longer in space than in time: there the library's places are the paper's."""

    shapes: ClassVar[Sequence[tuple[int, int, int]]] = ((2, 4, 6), (3, 8, 2))
    numbers = 3 * 2 * 4 * 4

    def videos(self) -> Sequence[dict[str, Tensor]]:
        return [self.video(seed, *shape) for seed, shape in enumerate(self.shapes)]

    def video(self, seed: int, t: int, h: int, w: int) -> dict[str, Tensor]:
        values = drawn(10 + seed, t * h * w, self.numbers)
        return {VALUES: values, GRID: torch.tensor([t, h, w])}

    def hf_config(self) -> Any:
        config = super().hf_config()
        config.video_token_id = VIDEO
        return config

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("pixel_values", VALUES):
            given = [item[name] for item in images if name in item]
            found |= {name: torch.cat(given)} if given else {}
        for name in ("image_grid_thw", GRID):
            given = [item[name] for item in images if name in item]
            found |= {name: torch.stack(given)} if given else {}
        seconds = [item[SECONDS] for item in images if SECONDS in item]
        return found | ({SECONDS: torch.cat(seconds)} if seconds else {})


class LongQwen(Qwen):
    """Text goes on behind the longest side, which may be time (arXiv:2409.12191, section 2.1). transformers 5
    looks at space alone, so it is told the places of a long video."""

    long: ClassVar[tuple[int, int, int]] = (6, 4, 2)

    def test_a_video_that_is_longest_in_time(self, reference: Any, model: Any) -> None:
        items = [self.images()[0], self.video(5, *self.long)]
        laid = self.laid(model, items)
        places = self.by_hand(items, laid.tokens)
        assert model.mrope_positions(len(laid.tokens), laid.media).tolist() == places.tolist()
        expected = self.expected(reference, laid, items, position_ids=places[:, None])
        found = self.in_pieces(model, laid, [5, len(laid.tokens) - 5])
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def by_hand(self, items: Sequence[dict[str, Tensor]], tokens: list[int]) -> Tensor:
        """Places of an image, a token of text and a video, one by one."""
        image, (time, height, width) = items[0]["image_grid_thw"], self.long
        rows: list[tuple[int, int, int]] = [(0, 0, 0), (1, 1, 1)]
        begin = 2
        for t, h, w, step in (
            (1, int(image[1]), int(image[2]), 1), (time, height, width, self.step(items[1])),
        ):  # fmt: skip
            rows += [
                (begin + int(i * step), begin + y, begin + x)
                for i in range(t)
                for y in range(h // 2)
                for x in range(w // 2)
            ]
            begin = max(max(row) for row in rows) + 1
            rows.append((begin,) * 3)
            begin += 1
        rows += [(begin + i,) * 3 for i in range(len(tokens) - len(rows))]
        return torch.tensor(rows).T

    def step(self, video: dict[str, Tensor]) -> float:
        return 1


class TestQwen2VL(LongQwen, language.TestQwen2VL):
    """A frame is a place."""


class TestQwen2_5VL(LongQwen, language.TestQwen2_5VL):
    """A frame's two seconds are one and a half places."""

    shapes = ((2, 8, 6), (3, 12, 2))
    seconds: ClassVar[float] = 0.375

    def video(self, seed: int, t: int, h: int, w: int) -> dict[str, Tensor]:
        return {**super().video(seed, t, h, w), SECONDS: torch.tensor([self.seconds])}

    def step(self, video: dict[str, Tensor]) -> float:
        return 4 * self.seconds


class TestQwen3VL(Qwen, qwen3.TestQwen3VL):
    """Each two frames stand behind a text."""

    shapes = ((4, 4, 6), (3, 8, 2))

    def times(self, video: dict[str, Tensor]) -> int:
        return int(video[GRID][0])


class LlavaVideos(VideoConformance):
    num_frames: ClassVar[int] = 3

    def videos(self) -> Sequence[dict[str, Tensor]]:
        side = self.images()[0]["pixel_values"].shape[-1]
        return [{VALUES: drawn(seed, self.num_frames, 3, side, side)} for seed in (1, 2)]

    def hf_config(self) -> Any:
        config = super().hf_config()
        config.video_token_index = config.video_token_id = VIDEO
        return config

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        pictures = [item for item in images if VALUES not in item]
        found = super().hf_inputs(pictures) if pictures else {}
        videos = [item[VALUES] for item in images if VALUES in item]
        return found | ({VALUES: torch.stack(videos)} if videos else {})


class TestLlavaOnevision(LlavaVideos, llava_next.TestLlavaOnevision):
    pass


class TestLlavaNextVideo(LlavaVideos, llava_next.TestLlavaNextVideo):
    pass


class TestVideoLlava(LlavaVideos, language.TestVideoLlava):
    num_frames = 2


class InternVLVideos(VideoConformance):
    placeholders = (IMAGE, IMAGE)

    def videos(self) -> Sequence[dict[str, Tensor]]:
        shape = self.images()[0]["pixel_values"].shape[1:]
        return [{VALUES: drawn(seed, 3, *shape)} for seed in (1, 2)]

    def times(self, video: dict[str, Tensor]) -> int:
        return len(video[VALUES])

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        tiles = [item.get(VALUES, item.get("pixel_values")) for item in images]
        return {"pixel_values": torch.cat(tiles)}  # type: ignore[arg-type]


class TestInternVL(InternVLVideos, internvl.TestInternVL):
    pass


class TestInternVLChat(InternVLVideos, internvl_chat.TestInternVLChat):
    """As published."""

    architecture = "InternVLChatModel"


class TestSmolVLM(VideoConformance, idefics3.TestSmolVLM):
    placeholders = (IMAGE, IMAGE)

    def videos(self) -> Sequence[dict[str, Tensor]]:
        return [{VALUES: drawn(seed, 3, 3, self.side, self.side)} for seed in (1, 2)]

    def times(self, video: dict[str, Tensor]) -> int:
        return len(video[VALUES])

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        tiles = [item.get(VALUES, item.get("pixel_values")) for item in images]
        return {"pixel_values": torch.cat(tiles)[None]}  # type: ignore[arg-type]


class PlainTiles(InternVLVideos):
    """Beside plain readings, for which a frame is a tile."""

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        tiles = [item.get(VALUES, item.get("pixel_values")) for item in images]
        return {"images": [{"pixel_values": own} for own in tiles]}


class TestEagle(PlainTiles, eagle.Eagle):
    layer, architecture = -1, "Eagle2_5_VLForConditionalGeneration"


class TestNemotronVL2(PlainTiles, nemotron_vl.NemotronVL2):
    architecture = "NemotronH_Nano_VL_V2"
