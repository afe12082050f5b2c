"""``tools/convert_reranker.py``: the new checkpoint scores as the old one does with overrides."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError

ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 6, 7, 8, 9], [10], [30, 20, 10]]
VOCABULARY = {"no": 11, "yes": 12, "Yes": 13, "<pad>": 3}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "convert_reranker", ROOT / "tools/convert_reranker.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(folder: Path, *, tied: bool, shard: str = "1GB") -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from headrace_testing.model.decoders import randomise

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
    ).eval()  # fmt: skip
    randomise(model)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = {"model": {"type": "BPE", "vocab": VOCABULARY}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return model


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_reranker.py", *options])
    tool.main()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_two_tokens(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tied: bool, shard: str
) -> None:
    """transformers' own class gives the same logit."""
    from transformers import AutoModelForSequenceClassification

    model = make_model(tmp_path / "model", tied=tied, shard=shard)
    run(
        tool, monkeypatch,
        "--model_name", str(tmp_path / "model"), "--path", str(tmp_path / "converted"),
        "--classifier_from_tokens", '["no", "yes"]', "--method", "from_2_way_softmax",
        "--use-pad-token",
    )  # fmt: skip
    config = json.loads((tmp_path / "converted/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert (config["use_pad_token"], config["pad_token_id"]) == (True, 3)
    converted = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "converted", dtype=torch.float32
    ).eval()
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
            score = converted(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(score, logits[[12]] - logits[[11]], atol=1e-5, rtol=0)
        ours = scores(tmp_path / "converted", prompt)
        torch.testing.assert_close(ours, torch.sigmoid(score), atol=1e-5, rtol=0)


def scores(folder: Path, prompt: list[int]) -> torch.Tensor:
    from headrace_core.batch import ForwardBatch
    from headrace_core.config import LoadConfig, ModelConfig
    from headrace_core.model import PoolingBatch
    from headrace_core.platform import CpuPlatform
    from headrace_core.pooling import PoolingParams
    from headrace_models.loading.loader import load_model
    from headrace_models.resolve import resolve
    from headrace_testing.model.decoders import PagedDriver, build_context

    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    assert info.tasks == ("classify", "score", "token_classify")
    model: Any = load_model(info, build_context(info))
    batch: ForwardBatch = PagedDriver(model).batch({"a": prompt}, rows=[len(prompt) - 1])
    params = PoolingParams(task="score", use_activation=True)
    with torch.inference_mode():
        hidden = model.forward(batch)
        result: torch.Tensor = model.pooler(
            PoolingBatch(hidden, torch.tensor([0, 1]), [params], [prompt])
        )[0]
    return result


def test_default_is_one_token(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", tied=False)
    run(
        tool, monkeypatch,
        "--model_name", str(tmp_path / "model"), "--path", str(tmp_path / "converted"),
    )  # fmt: skip
    config = json.loads((tmp_path / "converted/config.json").read_text())
    assert config["id2label"] == {"0": "Yes"}
    assert "use_pad_token" not in config
    with torch.inference_mode():
        logit = model(torch.tensor([PROMPTS[0]])).logits[0, -1, 13]
    ours = scores(tmp_path / "converted", PROMPTS[0])
    torch.testing.assert_close(ours, torch.sigmoid(logit)[None], atol=1e-5, rtol=0)


def test_refusals(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied=True)
    with pytest.raises(ConfigError, match="'YES' is not one token"):
        tool.convert(tmp_path / "model", tmp_path / "new", ["YES"], "no_post_processing")
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    options = ("--model_name", str(tmp_path / "model"), "--path", str(tmp_path / "there"))
    with pytest.raises(SystemExit, match="exists"):
        run(tool, monkeypatch, *options)
