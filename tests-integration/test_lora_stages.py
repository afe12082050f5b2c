"""Adapters of an engine whose layers are on two stages: what one process computes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_over_ranks import ONE, TARGETS, Case, Said, made, picked, said
from modes import PROMPTS

from headrace import LLM, LoRARequest, SamplingParams
from headrace_core.errors import RequestError
from headrace_testing.model.adapters import write_adapter

pytestmark = pytest.mark.days(3)

STAGES = {**ONE, "pipeline_parallel_size": 2}
SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 32, "max_num_seqs": 7}
"""Prompts are computed in parts, several steps are under way, and requests are preempted."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("llama", tmp_path_factory.mktemp("lora-stages"), TARGETS)


@pytest.fixture(scope="module")
def whole(case: Case) -> Iterator[LLM]:
    with LLM(case.base, **ONE) as llm:
        yield llm


@pytest.fixture(scope="module")
def staged(case: Case) -> Iterator[LLM]:
    with LLM(case.base, **{**STAGES, **SMALL}) as llm:
        yield llm


def test_a_mixed_batch_says_what_one_process_says(case: Case, whole: LLM, staged: LLM) -> None:
    for which in ([None, 0, 1], [None], [1, None]):
        assert said(staged, picked(case, which)) == said(whole, picked(case, which))


def test_adapters_take_turns_and_every_stage_keeps_as_many(
    case: Case, whole: LLM, staged: LLM
) -> None:
    """Three adapters and two slots."""
    for _ in range(2):
        assert said(staged, case.adapters) == said(whole, case.adapters)
    for number in (1, 2, 3):
        staged.llm_engine.remove_lora(number)
    said(staged, case.adapters[1:2])
    assert said(staged, case.adapters[1:2]) == said(whole, case.adapters[1:2])
    assert staged.collective_rpc("report")[1]["adapters_kept"] == 1


def test_prompt_log_probabilities(case: Case, whole: LLM, staged: LLM) -> None:
    """Logits of more rows than those that are sampled."""
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    found = []
    for llm in (whole, staged):
        outputs = llm.generate(
            PROMPTS[3:7], scored, lora_request=picked(case, [0, None, 1, 0]), use_tqdm=False
        )
        found.append([(o.prompt_logprobs, o.outputs[0].token_ids) for o in outputs])
    assert found[0] == found[1]


def one_layer(case: Case, name: str, layer: int) -> LoRARequest:
    folder = Path(case.base).parent / name
    modules = {f"model.layers.{layer}.self_attn.o_proj": (64, 64)}
    write_adapter(folder, modules, 8, layer, scale=8.0)
    return LoRARequest(name, 20 + layer, str(folder))


def test_an_adapter_of_one_stage_alone(case: Case, whole: LLM, staged: LLM) -> None:
    """The other stage has nothing of it, and takes it all the same."""
    adapters = [one_layer(case, "first", 0), one_layer(case, "last", 3)]
    wanted = said(whole, adapters)
    assert said(staged, adapters) == wanted
    plain = said(whole, [None])
    assert all(one != other for one, other in zip(plain, wanted, strict=True))


def test_what_no_stage_has_is_refused(case: Case, staged: LLM) -> None:
    folder = Path(case.base).parent / "other"
    write_adapter(folder, {"model.layers.9.self_attn.o_proj": (64, 64)}, 8, 1)
    with pytest.raises(RequestError, match=r"no place in this model for .*layers\.9"):
        staged.generate(
            [PROMPTS[0]], SamplingParams(max_tokens=1), lora_request=LoRARequest("other", 31, str(folder)),
            use_tqdm=False,
        )  # fmt: skip
    assert said(staged, picked(case, [None, 1]))


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "fully_sharded_loras": True},
        {"pipeline_parallel_size": 3, "async_scheduling": False, "communicator": "gloo"},
    ],
    ids=["two-by-two", "three-gloo"],
)
def test_other_layouts(case: Case, whole: LLM, settings: dict[str, Any]) -> None:
    which = picked(case, [None, 0, 1])
    wanted: Said = said(whole, which)
    with LLM(case.base, **{**STAGES, **SMALL, **settings}) as llm:
        found = said(llm, which)
    assert [[t for t, _ in one] for one in found] == [[t for t, _ in one] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def test_experts(tmp_path: Path) -> None:
    """Memory that is taken once an adapter needs it, on the stage that has the layer."""
    case = made("mixtral", tmp_path, ("q_proj", "o_proj"))
    shapes = {"w1": (112, 64), "w2": (64, 112), "w3": (112, 64)}
    experts = {
        f"model.layers.{layer}.block_sparse_moe.experts.1.{name}": shape
        for name, shape in shapes.items()
        for layer in (0, 3)
    }
    write_adapter(tmp_path / "adapter-2", experts, 4, 7, scale=2.0)
    which = picked(case, [None, 0, 1])
    with LLM(case.base, **ONE) as llm:
        wanted = said(llm, which)
        assert wanted[2] != said(llm, [None])[2]
    with LLM(case.base, **STAGES) as llm:
        assert said(llm, which) == wanted
