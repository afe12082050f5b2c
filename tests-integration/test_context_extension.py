"""Contexts beyond the trained one: by rope scaling in ``hf_overrides``, and by the user's word alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, PromptTooLong, UnsupportedModel

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 1e6,
}  # fmt: skip
PROMPT = [3 + i * 7 % 300 for i in range(200)]


def make(folder: Path, **settings: Any) -> transformers.LlamaForCausalLM:
    """A model trained on 64 positions."""
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **settings},
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.12)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What transformers answers to the long prompt with YaRN."""
    model = make(tmp_path_factory.mktemp("scaled"), rope_parameters=YARN)
    return greedy(model)


def greedy(model: transformers.LlamaForCausalLM, count: int = 6) -> list[int]:
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        enable_prefix_caching=False, **settings,
    )  # fmt: skip


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def length(llm: LLM) -> int:
    return llm.engine.model.max_model_len


class TestYarn:
    @pytest.mark.parametrize(
        "overrides",
        [
            {"rope_parameters": YARN, "max_model_len": 256},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},  # the rest is kept
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},  # as configs of old said it
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 64}},
        ],
        ids=["whole", "merged", "old-names", "old-block"],
    )  # fmt: skip
    def test_an_override_extends_the_context(
        self, checkpoint: Path, scaled: list[int], overrides: dict[str, Any]
    ) -> None:
        with engine(checkpoint, hf_overrides=overrides) as llm:
            assert length(llm) == 256
            assert answer(llm) == scaled

    @pytest.mark.parametrize("engine_process", [False, True])
    def test_a_function_extends_it_too(
        self, checkpoint: Path, scaled: list[int], engine_process: bool
    ) -> None:
        def stretched(config: dict[str, Any]) -> None:
            config["rope_parameters"] |= YARN

        with engine(checkpoint, hf_overrides=stretched, engine_process=engine_process) as llm:
            assert length(llm) == 256
            assert answer(llm) == scaled
            shown = msgspec.to_builtins(llm.engine_config)["model"]["hf_overrides"]
            assert shown["rope_parameters"] == YARN

    def test_what_a_function_takes_out_cannot_cross(self, checkpoint: Path) -> None:
        def shorter(config: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in config.items() if key != "transformers_version"}

        with engine(checkpoint, hf_overrides=shorter) as llm:
            assert length(llm) == 64
        with pytest.raises(ConfigError, match=r"hf_overrides: .*engine_process.* None instead"):
            engine(checkpoint, hf_overrides=shorter, engine_process=True)

    def test_a_checkpoint_of_the_old_spelling(
        self, checkpoint: Path, tmp_path: Path, scaled: list[int]
    ) -> None:
        for file in checkpoint.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        del config["rope_parameters"]
        config |= {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with engine(tmp_path) as llm:
            assert length(llm) == 128
        with engine(tmp_path, hf_overrides={"rope_parameters": YARN}) as llm:
            assert length(llm) == 256
            assert answer(llm) == scaled

    def test_the_base_alone(self, checkpoint: Path, tmp_path: Path) -> None:
        """Beside the block that the checkpoint has it in."""
        model = make(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
        prompt = PROMPT[:50]
        with torch.inference_mode():
            expected = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        with engine(checkpoint, hf_overrides={"rope_theta": 500.0}) as llm:
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == [expected]

    def test_without_it_the_prompt_is_refused(self, checkpoint: Path) -> None:
        with engine(checkpoint) as llm:
            assert length(llm) == 64
            with pytest.raises(PromptTooLong, match="64"):
                answer(llm)

    def test_what_is_no_scaling_is_refused_by_name(self, checkpoint: Path) -> None:
        overrides = {"rope_parameters": {"rope_type": "yarm", "factor": 4.0}}
        with pytest.raises(UnsupportedModel, match="rope_type = 'yarm': must be one of"):
            engine(checkpoint, hf_overrides=overrides)
        with pytest.raises(UnsupportedModel, match="factor = 0"):
            engine(checkpoint, hf_overrides={"rope_parameters": {"rope_type": "yarn", "factor": 0}})


class TestLongerThanDerived:
    def test_an_error_that_names_the_way(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match=r"256: must be at most 64.*ALLOW_LONG"):
            engine(checkpoint, max_model_len=256)

    def test_many_chunks_are_one(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN", "1")
        found = {}
        with caplog.at_level(logging.WARNING):
            for budget in (20, 256):
                with engine(
                    checkpoint, max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=1
                ) as llm:
                    assert length(llm) == 256
                    before = llm.engine.stats().num_steps
                    found[budget] = answer(llm)
                    steps = llm.engine.stats().num_steps - before
                    assert steps == len(PROMPT) // min(budget, len(PROMPT)) + 5
        assert found[20] == found[256]
        assert "max_model_len 256 is above the model's own limit 64" in caplog.text
