"""Adapters of an engine whose layers are divided over two processes: what one rank computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lora_over_ranks import ONE, PARAMS, TARGETS, Case, Said, agree, made, picked, said
from modes import PROMPTS

from headrace import LLM, LoRARequest
from headrace_core.errors import RequestError
from headrace_testing.model.adapters import write_adapter

pytestmark = pytest.mark.days(3)

TWO = {**ONE, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("lora-ranks")
    return made("llama", folder, TARGETS)


@pytest.fixture(scope="module")
def whole(case: Case) -> Iterator[Callable[[Sequence[int | None]], Said]]:
    """What one rank says with adapters by index."""
    with LLM(case.base, **ONE) as llm:
        yield lambda which: said(llm, picked(case, which))


@pytest.fixture(scope="module")
def divided(case: Case) -> Iterator[LLM]:
    """Two ranks that keep two adapters, in as many slots."""
    with LLM(case.base, **TWO) as llm:
        yield llm


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fully_sharded_loras": True},
        {"fully_sharded_loras": True, "communicator": "gloo", "async_scheduling": False},
        {"enforce_eager": True, "max_num_batched_tokens": 13, "max_num_seqs": 4},
    ],
    ids=["recorded", "fully-sharded", "fully-sharded-gloo", "chunked"],
)
def test_a_mixed_batch_says_what_one_rank_says(
    case: Case, whole: Callable[[Sequence[int | None]], Said], settings: dict[str, Any]
) -> None:
    wanted = whole([None, 0, 1])
    assert len({str(tokens) for tokens in (whole([i])[0] for i in (None, 0, 1))}) == 3
    with LLM(case.base, **{**TWO, **settings}) as llm:
        agree(said(llm, picked(case, [None, 0, 1])), wanted)
        agree(said(llm, [None]), whole([None]))
        agree(said(llm, picked(case, [1, None])), whole([1, None]))


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_experts(tmp_path: Path, fully_sharded: bool) -> None:
    """Steps with adapters of experts are never replayed, on no rank."""
    case = made("mixtral", tmp_path, ("q_proj", "o_proj"))
    expert = {
        f"model.layers.0.block_sparse_moe.experts.1.{name}": shape
        for name, shape in expert_shapes(case.base).items()
    }
    write_adapter(tmp_path / "adapter-2", expert, 4, 7, scale=2.0)
    which = picked(case, [None, 0, 1])
    with LLM(case.base, **ONE) as llm:
        wanted = said(llm, which)
        assert wanted[2] != said(llm, [None])[2]
    with LLM(case.base, **TWO, fully_sharded_loras=fully_sharded) as llm:
        agree(said(llm, which), wanted)


def expert_shapes(base: str) -> dict[str, tuple[int, int]]:
    import json

    config = json.loads((Path(base) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}


def test_adapters_take_turns_and_every_rank_keeps_as_many(
    case: Case, whole: Callable[[Sequence[int | None]], Said], divided: LLM
) -> None:
    """Three adapters and two slots: one leaves the memory of every rank and is read again."""
    for _ in range(2):
        agree(said(divided, case.adapters), whole([0, 1, 2]))
    said(divided, case.adapters[:1])
    assert divided.collective_rpc("report")[1]["adapters_kept"] <= 3
    for number in (1, 2, 3):
        divided.llm_engine.remove_lora(number)
    said(divided, case.adapters[1:2])
    agree(said(divided, case.adapters[1:2]), whole([1]))
    assert divided.collective_rpc("report")[1]["adapters_kept"] == 1


def test_files_that_only_rank_0_has(case: Case, divided: LLM) -> None:
    """The request fails, and nobody else's."""
    handle = os.open(case.adapters[0].lora_path, os.O_RDONLY)
    try:
        gone = LoRARequest("gone", 11, f"/proc/self/fd/{handle}")
        with pytest.raises(RequestError, match="'gone': rank 1 cannot read what rank 0 has read"):
            divided.generate([PROMPTS[0]], PARAMS, lora_request=gone, use_tqdm=False)
    finally:
        os.close(handle)
    assert said(divided, picked(case, [None, 1]))


def test_other_files_than_rank_0_has(
    case: Case, divided: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is in a folder of its own, and reads what lies there."""
    here = LoRARequest("here", 12, "/proc/self/cwd/adapter-1")
    folder = Path(case.base).parent
    other = folder / "elsewhere"
    other.mkdir()
    (other / "adapter-1").symlink_to(case.adapters[1].lora_path)
    monkeypatch.chdir(folder)
    with LLM(case.base, **TWO) as llm:
        monkeypatch.chdir(other)
        with pytest.raises(RequestError, match="rank 1 reads other content there"):
            llm.generate([PROMPTS[0]], PARAMS, lora_request=here, use_tqdm=False)
        monkeypatch.chdir(folder)
        named = [LoRARequest("relative", 13, "adapter-1")]
        monkeypatch.chdir(folder)
        assert said(llm, named) == said(llm, case.adapters[:1])
