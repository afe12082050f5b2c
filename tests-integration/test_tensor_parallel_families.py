"""Models of each kind divided over two processes: mixtures, latent attention, states, integers, images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_model
from image_checkpoints import data_url, picture, save_qwen2_vl
from modes import PROMPTS, SETTINGS
from quantized_checkpoints import save_gptq

from headrace import LLM, SamplingParams
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
DIVIDED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 7,
}
KINDS = ("qwen3_moe", "deepseek_v3", "bamba", "qwen3_next")


def said(llm: LLM, prompts: Any) -> list[list[tuple[int, float]]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [
        [(t, entry[t].logprob) for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def agree(left: Any, right: Any, tolerance: float = 1e-4) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=tolerance)


@pytest.mark.parametrize("family", todays(KINDS, days=2))
def test_two_ranks_say_what_one_says(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    check(tmp_path, SETTINGS)


def check(folder: Path, settings: dict[str, Any]) -> None:
    with LLM(str(folder), **settings) as llm:
        whole = said(llm, PROMPTS)
    with LLM(str(folder), **settings, **DIVIDED) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        batched = said(llm, PROMPTS)
    agree(alone, whole)
    assert batched == alone


def test_four_bits(tmp_path: Path) -> None:
    save_gptq(tmp_path, hidden_size=128, intermediate_size=192)
    check(tmp_path, {**SETTINGS, "quantization_activations": "float"})


def test_a_group_that_would_be_cut_is_refused(tmp_path: Path) -> None:
    save_gptq(tmp_path, hidden_size=128, intermediate_size=96)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj.*tensor_parallel_size"):
        LLM(str(tmp_path), **SETTINGS, **DIVIDED)


def test_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_qwen2_vl(tmp_path)
    settings = {**SETTINGS, "skip_tokenizer_init": False, "max_model_len": 256}
    chats = [
        [{"role": "user", "content": [
            {"type": "text", "text": "the "},
            *({"type": "image_url", "image_url": {"url": data_url(picture(n))}} for n in numbers),
        ]}]
        for numbers in ([1], [2, 3], [])
    ]  # fmt: skip

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
        return [
            [(t, e[t].logprob) for t, e in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)]
            for o in outputs
        ]

    with LLM(str(tmp_path), **settings) as llm:
        whole = answers(llm)
    with LLM(str(tmp_path), **settings, **DIVIDED) as llm:
        divided = answers(llm)
    agree(divided, whole)


def test_embeddings(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def vectors(**settings: Any) -> torch.Tensor:
        with LLM(str(tmp_path), **SETTINGS, runner="pooling", convert="embed", **settings) as llm:
            return torch.tensor([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])

    torch.testing.assert_close(vectors(**DIVIDED), vectors(), atol=1e-4, rtol=0)
