"""Blocks of the cache that go to a store and come from one: equal outputs, less to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import SETTINGS
from together import together

from headrace import LLM, SamplingParams

BLOCK = SETTINGS["block_size"]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
KINDS = ("llama", "mistral", "gemma3", "deepseek_v3")
"""Full attention with grouped queries, a window, both in one model, latent attention."""
Said = list[list[tuple[int, float]]]


def prompts(count: int, length: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(3, VOCAB_SIZE, (count, length), generator=generator)
    return [list(row) for row in draw.tolist()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        save_model(kind, folder)
    return folders


@pytest.fixture
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


def transfer(connector: str, role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    policy = changes.pop("kv_load_failure_policy", "recompute")
    stated = {"kv_connector": connector, "kv_role": role, "kv_load_failure_policy": policy}
    return {"kv_transfer_config": {**stated, "kv_connector_extra_config": changes}}


def files(folder: Path, role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    return transfer("file", role, shared_storage_path=str(folder), **changes)


def memory(**changes: Any) -> dict[str, Any]:
    return transfer("offload", **{"cpu_bytes_to_use": 64 << 20, **changes})


@contextmanager
def engine(folder: Path, **changes: Any) -> Iterator[LLM]:
    with LLM(str(folder), **{**SETTINGS, **changes}) as model:
        yield model


def ask(model: LLM, asked: Sequence[list[int]]) -> tuple[Said, int]:
    """What is said to prompts, with log-probabilities, and how many of their tokens were computed."""
    outputs = model.generate(list(asked), PARAMS, use_tqdm=False)
    said = []
    for output in outputs:
        one = output.outputs[0]
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        said.append([(token, entry[token].logprob) for token, entry in pairs])
    computed = sum(len(p) - o.num_cached_tokens for p, o in zip(asked, outputs, strict=True))
    return said, computed


def counts(model: LLM) -> dict[str, int]:
    return dict(model.engine.stats().kv_transfer)


def is_idle(model: LLM) -> bool:
    stats = model.engine.stats()
    return stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_finds_what_the_first_computed(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    asked = prompts(3, 50)
    with engine(checkpoints[kind]) as plain:
        wanted, every = ask(plain, asked)
    assert every == 150
    with engine(checkpoints[kind], **files(tmp_path, "kv_producer")) as first:
        assert ask(first, asked) == (wanted, every)
        assert counts(first)["saved_blocks"] > 0
    with engine(checkpoints[kind], **files(tmp_path, "kv_consumer")) as second:
        assert ask(second, asked) == (wanted, 6), "two tokens of each: 48 are 6 blocks"
        told = counts(second)
        assert told["loaded_tokens"] == 144
        assert told["failed_blocks"] == told["saved_blocks"] == 0
        assert is_idle(second)
        # With what was said, too: those blocks were saved as they became full.
        longer = [[*p, *(t for t, _ in s), 5, 6] for p, s in zip(asked, wanted, strict=True)]
        said, computed = ask(second, longer)
        assert computed == 3 * (61 - 56)
    with engine(checkpoints[kind]) as plain:
        assert ask(plain, longer)[0] == said


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "one by one": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "engine process": {"engine_process": True},
    "guesses": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
        },
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(llama: Path, tmp_path: Path, mode: str) -> None:
    asked = prompts(5, 41)
    with engine(llama) as plain:
        wanted, _ = ask(plain, asked)
    with engine(llama, **files(tmp_path), **MODES[mode]) as first:
        assert ask(first, asked) == (wanted, 205)
    with engine(llama, **files(tmp_path), **MODES[mode]) as second:
        assert ask(second, asked) == (wanted, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_working_set_of_four_pools(checkpoints: dict[str, Path], kind: str) -> None:
    asked, few = prompts(8, 65), {"num_gpu_blocks_override": 24, "max_num_seqs": 2}
    if kind == "gemma3":
        few["num_gpu_blocks_override"] = 60
        asked = prompts(16, 65)
    with engine(checkpoints[kind], **few) as plain:
        wanted, _ = ask(plain, asked)
        said, without = ask(plain, asked)
        assert said == wanted
    with engine(checkpoints[kind], **few, **memory()) as model:
        assert ask(model, asked)[0] == wanted
        for _ in range(2):
            said, computed = ask(model, asked)
            assert said == wanted
            assert computed * 3 <= without
        assert is_idle(model)


def test_preempted_requests_take_their_blocks_back(llama: Path) -> None:
    asked = prompts(6, 40)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(llama) as plain:
        wanted = [o.outputs[0].token_ids for o in plain.generate(asked, params, use_tqdm=False)]
    with engine(llama, num_gpu_blocks_override=24, max_num_seqs=6, **memory()) as model:
        with together(model, len(asked)):
            outputs = model.generate(asked, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == wanted
        assert model.engine.stats().num_preemptions > 0
        assert counts(model)["loaded_blocks"] > 0
        assert is_idle(model)
