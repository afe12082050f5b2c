"""Models by transformers' code through the whole engine, with the kernels of this machine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace_core.errors import HeadraceError, UnsupportedFeature
from headrace_testing.model.decoders import randomise

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 80, "num_threads": 1,
    "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 96,
}  # fmt: skip


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def _prompts(count: int) -> list[dict[str, Any]]:
    chooser = random.Random(3)
    lengths = [1 + chooser.randrange(50) for _ in range(count)]
    return [{"prompt_token_ids": [chooser.randrange(3, 131) for _ in range(n)]} for n in lengths]


def _model(name: str, folder: Path, **sizes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.float32)
    randomise(model.eval())
    model.save_pretrained(folder)
    return model


def _ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    _model("Llama", folder)
    return folder


def test_each_implementation_gives_the_same(llama: Path) -> None:
    """64 requests of unequal lengths, in steps of 96 tokens."""
    found, names = [], []
    for wanted in ("auto", "headrace", "transformers"):
        with LLM(str(llama), model_impl=wanted, **SETTINGS) as llm:
            found.append(_ids(llm.generate(_prompts(64), _greedy(6), use_tqdm=False)))
            names += [made.__name__ for made in llm.apply_model(type)]
    assert found[0] == found[1] == found[2]
    assert names == ["LlamaForCausalLM", "LlamaForCausalLM", "TransformersForCausalLM"]


def test_together_equals_alone(llama: Path) -> None:
    with LLM(str(llama), model_impl="transformers", **SETTINGS) as llm:
        prompts = _prompts(24)
        together = _ids(llm.generate(prompts, _greedy(8), use_tqdm=False))
        alone = [_ids(llm.generate(one, _greedy(8), use_tqdm=False))[0] for one in prompts]
    assert together == alone


def test_an_architecture_that_headrace_does_not_have(tmp_path: Path) -> None:
    model = _model("DiffLlama", tmp_path)
    prompt = _prompts(1)[0]["prompt_token_ids"]
    sequence = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    with pytest.raises(HeadraceError, match="not supported"):
        LLM(str(tmp_path), model_impl="headrace", **SETTINGS)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        [output] = llm.generate({"prompt_token_ids": prompt}, _greedy(12), use_tqdm=False)
        assert llm.model_info.source == "transformers"
    assert list(output.outputs[0].token_ids) == sequence[len(prompt) :]


def test_quantized_linear_layers(llama: Path) -> None:
    """Methods that round weights while loading apply to the tree's layers, too."""
    with LLM(str(llama), model_impl="transformers", quantization="int8", **SETTINGS) as llm:
        methods = llm.apply_model(
            lambda model: {
                type(x.method).__name__ for x in model.leaves.values() if hasattr(x, "method")
            }
        )
        outputs = _ids(llm.generate(_prompts(3), _greedy(4), use_tqdm=False))
    with LLM(str(llama), model_impl="headrace", quantization="int8", **SETTINGS) as llm:
        assert outputs == _ids(llm.generate(_prompts(3), _greedy(4), use_tqdm=False))
    assert len(methods[0]) == 1


def test_embeddings(llama: Path) -> None:
    vectors = []
    for wanted in ("headrace", "transformers"):
        with LLM(str(llama), model_impl=wanted, runner="pooling", **SETTINGS) as llm:
            outputs = llm.embed(_prompts(5), use_tqdm=False)
            vectors.append(torch.tensor([output.outputs.embedding for output in outputs]))
    torch.testing.assert_close(*vectors, atol=1e-5, rtol=0)


def test_functions_do_not_cross_processes(llama: Path) -> None:
    with (
        LLM(str(llama), engine_process=True, **SETTINGS) as llm,
        pytest.raises(UnsupportedFeature, match="process"),
    ):
        llm.apply_model(type)
