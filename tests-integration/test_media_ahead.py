"""Images that come while others decode: towers run in slices between steps, and the results are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_checkpoints import picture, save_llava, save_qwen3_vl
from test_image_prompts import SETTINGS

from headrace import LLM, SamplingParams
from headrace_engine.encoder.vectors_ahead import VectorsAhead

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=["llava", "qwen3_vl"])
def seer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A checkpoint, and how it marks an image."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llava":
        save_llava(folder)
        return folder, "<image>"
    save_qwen3_vl(folder)
    return folder, "<|vision_start|><|image_pad|><|vision_end|>"


def answers(folder: Path, mark: str, **settings: Any) -> list[list[int]]:
    """A text that decodes for long, and beside it one image after the other."""
    llm = LLM(str(folder), **{**SETTINGS, "max_num_seqs": 2, **settings})
    images = [
        {"prompt": f"the water {mark} runs", "multi_modal_data": {"image": picture(seed)}}
        for seed in (1, 2, 1, 3)
    ]
    found = llm.generate(["in the race", *images], [LONG, *[SHORT] * 4], use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each item that a step reached and that is not kept: whether its vectors were made beside steps."""
    found: list[bool] = []
    take = VectorsAhead.take

    def spy(self: VectorsAhead, name: str) -> Any:
        vectors = take(self, name)
        found.append(vectors is not None)
        return vectors

    monkeypatch.setattr(VectorsAhead, "take", spy)
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 8}, {"async_scheduling": False}], ids=str
)
def test_results_do_not_depend_on_where_towers_pause(
    seer: tuple[Path, str], taken: list[bool], settings: dict[str, Any]
) -> None:
    sliced = answers(*seer, encoder_share=0.001, **settings)
    assert any(taken)
    assert sliced == answers(*seer, encoder_share=0, **settings)


def test_an_item_is_embedded_once(seer: tuple[Path, str], taken: list[bool]) -> None:
    """The first image may begin with the text; of the others, one is the same."""
    answers(
        *seer, encoder_share=1000.0
    )  # an item a step: the text goes on for longer than they take
    assert len(taken) == 3
    assert all(taken[1:])
