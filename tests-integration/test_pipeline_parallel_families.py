"""Models of each kind on stages: experts, latent attention, states, windows, integers, images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_model
from image_checkpoints import data_url, picture, save_qwen2_vl
from modes import PROMPTS, SETTINGS
from quantized_checkpoints import save_gptq
from test_tensor_parallel_families import GREEDY, said

from headrace import LLM
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

STAGED: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 7,
}
KINDS = {"qwen3_moe": 2, "deepseek_v3": 3, "bamba": 2, "qwen3_next": 3, "gemma3": 3}
"""Family -> stages."""


@pytest.mark.parametrize("family", todays(tuple(KINDS), days=3))
def test_stages_say_what_one_process_says(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    check(tmp_path, {**SETTINGS, "pipeline_parallel_size": KINDS[family]})


def check(folder: Path, settings: dict[str, Any]) -> None:
    with LLM(str(folder), **{**settings, "pipeline_parallel_size": 1}) as llm:
        whole = said(llm, PROMPTS)
    with LLM(str(folder), **{**STAGED, **settings}) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        batched = said(llm, PROMPTS)
    assert alone == whole
    assert batched == alone


def test_four_bits(tmp_path: Path) -> None:
    save_gptq(tmp_path, hidden_size=128, intermediate_size=192)
    check(tmp_path, {**SETTINGS, "quantization_activations": "float"})


def test_images(tmp_path: Path) -> None:
    """Towers are on the first stage; places in images are every stage's."""
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
        outputs = [output.outputs[0] for output in llm.chat(chats, GREEDY, use_tqdm=False)]
        return [[(t, e[t].logprob) for t, e in zip(o.token_ids, o.logprobs)] for o in outputs]

    with LLM(str(tmp_path), **settings) as llm:
        whole = answers(llm)
    with LLM(str(tmp_path), **settings, **STAGED) as llm:
        assert answers(llm) == whole


def test_embeddings(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def vectors(**settings: Any) -> torch.Tensor:
        with LLM(str(tmp_path), **SETTINGS, runner="pooling", convert="embed", **settings) as llm:
            return torch.tensor([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])

    assert torch.equal(vectors(**STAGED), vectors())
