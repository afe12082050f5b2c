"""Composition, as far as it needs no model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import LLM
from headrace.assembly.front import check_shared_items, share_items
from headrace.assembly.served import tokenizer_info
from headrace.assembly.worker.context import tower_chooser
from headrace_attention.sdpa import SDPABackend
from headrace_core.attention import AttentionNeed
from headrace_core.errors import ConfigError, ModelError
from headrace_core.model import ModelInfo
from headrace_engine.clients.process import ProcessClient
from headrace_engine.config import EngineConfig, MultiModalConfig


def info(folder: Path) -> ModelInfo:
    return ModelInfo(
        name="m", path=folder, architecture="LlamaForCausalLM", config={}, generation_config={},
        dtype="bfloat16", max_model_len=1000, vocab_size=10, eos_token_ids=(1,),
    )  # fmt: skip


def test_what_tokenizer_info_shows(tmp_path: Path) -> None:
    assert tokenizer_info(info(tmp_path)) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
    assert tokenizer_info(info(tmp_path)) == {"tokenizer_class": "LlamaTokenizer", "legacy": False}


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b"[" * 100_000])
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        tokenizer_info(info(tmp_path))


def test_towers_have_the_attention_that_is_named_for_them() -> None:
    def resolved(name: str | None, processor: str = "x") -> Any:
        multimodal = MultiModalConfig(mm_encoder_attn_backend=name)
        return SimpleNamespace(
            config=SimpleNamespace(multimodal=multimodal), info=SimpleNamespace(processor=processor)
        )

    def need(kind: str) -> AttentionNeed:
        return AttentionNeed(
            head_dim=8, dtype="float32", kv_cache_dtype="auto", block_size=8, device="cpu",
            attention_type=kind,
        )  # fmt: skip

    def others(need: AttentionNeed) -> Any:
        return f"other {need.attention_type}"

    ops: Any = None
    assert tower_chooser(resolved(None, ""), ops, others) is others
    choose = tower_chooser(resolved("sdpa"), ops, others)
    assert isinstance(choose(need("encoder")), SDPABackend)
    assert choose(need("encoder")) is choose(need("encoder"))
    assert choose(need("encoder_only")) == "other encoder_only"
    with pytest.raises(ConfigError, match=r"mm_encoder_attn_backend: .*'paged' cannot serve"):
        tower_chooser(resolved("paged"), ops, others)(need("encoder"))
    with pytest.raises(ConfigError, match=r"mm_encoder_attn_backend = 'sdpa': .* no towers"):
        tower_chooser(resolved("sdpa", ""), ops, others)


def test_what_shared_memory_for_media_needs_is_named() -> None:
    shm: dict[str, Any] = {"mm_processor_cache_type": "shm"}
    with pytest.raises(ConfigError, match=r"'shm': must be 'lru'.*engine_process"):
        LLM("nowhere", **shm)  # before anything is looked for
    check_shared_items(EngineConfig(engine_process=True, multimodal=MultiModalConfig(**shm)))
    with pytest.raises(ConfigError, match=r"'shm': .*; must be 'lru' here"):
        share_items(ProcessClient("a:b", EngineConfig()),
                    MultiModalConfig(**shm, mm_processor_cache_gb=1e30))  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"mm_processor_cache_type": "disk"},
        {"mm_shm_cache_max_object_size_mb": 0},
        {"mm_processor_cache_gb": 0.1, "mm_processor_cache_type": "shm"},
        {"mm_processor_cache_gb": float("inf")},
        {"mm_encoder_tp_mode": "batch"},
        {"video_pruning_rate": 1.0},
    ],
)
def test_settings_of_media_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MultiModalConfig(**wrong)
