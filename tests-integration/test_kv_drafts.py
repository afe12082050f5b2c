"""Guesses behind prompts that were loaded: a head's own keys and values come with the blocks, a draft model
computes what it lacks, and what is said is the same in any case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_heads import Guess, eagle
from families import save_model
from modes import SETTINGS
from posted import post
from servers import RunningServer, serving
from test_draft_heads import asked as asked  # a fixture
from test_draft_heads import check
from test_kv_ranks import PROMPTS, Said, agree, ask, counts, files, is_idle, transfer

from headrace import LLM, SamplingParams, demo

pytestmark = pytest.mark.days(2)

MOST = 3
SIZES: dict[str, dict[str, Any]] = {
    "one": {},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model("llama", folder)


@pytest.fixture(scope="module")
def wanted(llama: tuple[Path, Any]) -> Said:
    with LLM(str(llama[0]), **SETTINGS) as plain:
        return ask(plain)[0]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Guess]:
    folder = tmp_path_factory.mktemp("eagle")
    return folder, eagle(folder)


def guessing(
    folder: Path, method: str, drafts: Path, blocks: dict[str, Any], **changes: Any
) -> LLM:
    config = {
        "method": method, "model": str(drafts), "num_speculative_tokens": MOST, "adaptive": False,
    }  # fmt: skip
    return LLM(str(folder), **{**SETTINGS, **changes, **blocks}, speculative_config=config)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_head_guesses_behind_loaded_blocks_as_behind_its_own(
    llama: tuple[Path, Any],
    wanted: Said,
    head: tuple[Path, Guess],
    asked: Any,
    tmp_path: Path,
    sizes: str,
) -> None:
    """Each guess is that of the plain recurrence, which has seen the whole prompt."""
    (folder, model), (own, guess) = llama, head
    blocks = files(tmp_path)
    with guessing(folder, "eagle", own, blocks, **SIZES[sizes]) as first:
        agree(ask(first)[0], wanted)
    asked.found.clear()
    with guessing(folder, "eagle", own, blocks, **SIZES[sizes]) as second:
        said, computed = ask(second)
        agree(said, wanted)
        assert computed == 6
        assert counts(second)["failed_blocks"] == 0
        assert is_idle(second)
    check(model, guess, asked.found, 10)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_draft_model_catches_up_with_loaded_blocks(
    llama: tuple[Path, Any], wanted: Said, tmp_path: Path, sizes: str
) -> None:
    """It is the model itself, so it is always right, if it has seen the whole prompt. Its layers stay where
    they are: an engine without it has the same blocks."""
    folder, _ = llama
    blocks = files(tmp_path)
    with LLM(str(folder), **{**SETTINGS, **SIZES[sizes], **blocks}) as first:
        agree(ask(first)[0], wanted)
    with guessing(folder, "draft_model", folder, blocks, **SIZES[sizes]) as second:
        said, computed = ask(second)
        agree(said, wanted)
        assert computed == 6
        stats = second.engine.stats()
        assert sum(stats.num_accepted_per_position) == stats.num_draft_tokens > 10
        further = [prompt[::-1] for prompt in PROMPTS]
        found = ask(second, further)[0]
    with LLM(str(folder), **{**SETTINGS, **SIZES[sizes], **blocks}) as third:
        said, computed = ask(third, further)
        agree(said, found)
        assert computed == 6, "what the engine with a draft model has saved"


def test_blocks_of_another_head_are_not_taken(
    llama: tuple[Path, Any], wanted: Said, head: tuple[Path, Guess], tmp_path: Path
) -> None:
    """An engine without a head takes those of one with it; not the reverse."""
    (folder, _), (own, _) = llama, head
    blocks, other = files(tmp_path / "blocks"), tmp_path / "head"
    eagle(other, bias=True)
    with guessing(folder, "eagle", own, blocks) as first:
        ask(first)
    with LLM(str(folder), **{**SETTINGS, **blocks}) as plain:
        assert ask(plain) == (wanted, 6)
    with guessing(folder, "eagle", other, blocks) as second:
        assert ask(second) == (wanted, 150)


def test_a_head_whose_blocks_went_to_memory(
    llama: tuple[Path, Any], wanted: Said, head: tuple[Path, Guess], asked: Any
) -> None:
    """The small cache has given them up."""
    (folder, model), (own, guess) = llama, head
    few = {"num_gpu_blocks_override": 20, "max_num_seqs": 1}
    memory = transfer("offload", cpu_bytes_to_use=64 << 20)
    with guessing(folder, "eagle", own, memory, **few) as engine:
        assert ask(engine)[0] == wanted
        asked.found.clear()
        assert ask(engine) == (wanted, 6)
    check(model, guess, asked.found, 10)


BODY = {"model": "demo", "prompt": list(range(40, 140)), "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[RunningServer]:
    drafts = {"method": "draft_model", "model": str(demo.path()), "num_speculative_tokens": 3}
    words = ("-tp", "2", "--dtype", "float32", "--served-model-name", "demo",
             "--speculative-config", json.dumps(drafts), "--kv-transfer-config",
             json.dumps(files(shared)["kv_transfer_config"]))  # fmt: skip
    with serving(*words) as running:
        yield running


def test_a_served_model_with_a_draft_model_saves_for_one_without(
    server: RunningServer, shared: Path
) -> None:
    answer = post(f"{server.api}/completions", BODY)
    two = {"tensor_parallel_size": 2}
    with LLM(dtype="float32", **two, **files(shared)) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        [output] = llm.generate([BODY["prompt"]], params, use_tqdm=False)
        assert output.outputs[0].text == answer["choices"][0]["text"]
        assert output.num_cached_tokens > 0
        assert counts(llm)["loaded_blocks"] > 0
