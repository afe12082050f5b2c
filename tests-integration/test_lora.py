"""Low-rank adapters of a real tiny model: any mix of them gives each request the bits that it has alone."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import random
import shutil

import pytest
import torch
from families import VOCAB_SIZE, save_model
from together import together

from headrace import LLM, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from headrace.sampling_params import BeamSearchParams
from headrace_core.errors import RequestError
from headrace_testing.model.adapters import linear_modules, merged, write_adapter

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 8,
    "num_threads": 1, "kv_cache_memory_bytes": 32 << 20, "use_tqdm_on_load": False,
    "enable_lora": True, "max_loras": 8,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head")
KINDS = [
    (4, ("q_proj", "v_proj")), (1, ("q_proj", "v_proj")), (16, EVERY), (8, ATTENTION),
    (2, ("down_proj",)), (4, ("gate_proj",)), (3, ("lm_head",)), (16, ("k_proj", "up_proj")),
]  # fmt: skip
"""Ranks and targets of the eight adapters."""
SCALE = 2.0
"""Of their products, so that each changes the answers."""


def modules_of(model, targets):
    """The linear modules whose names end so."""
    return {name: s for name, s in linear_modules(model).items() if name.endswith(targets)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "llama-fp32"
    folder.mkdir()
    return folder, save_model("llama", folder)


@pytest.fixture(scope="module")
def adapters(checkpoint):
    """The base (None) and eight adapters; and what each adds to the weights."""
    folder, model = checkpoint
    requests, added = [None], [{}]
    for number, (rank, targets) in enumerate(KINDS, 1):
        path = folder.parent / f"adapter-{number}"
        modules = modules_of(model, targets)
        added.append(write_adapter(path, modules, rank, number, scale=SCALE))
        requests.append(LoRARequest(path.name, number, str(path)))
    return requests, added


def _prompts(count):
    generator = torch.Generator().manual_seed(3)

    def draw(length):
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = draw(24)
    return [shared + draw(1 + 5 * (i % 4)) for i in range(count)]


PROMPTS = _prompts(18)


def _pairs(output):
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    return [
        (token, entry[token].logprob)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def same(llm, found, wanted):
    """True if these are the same bits; numbers alike where kernels look at what else is in a step."""
    if llm.collective_rpc("report")[0]["batch_invariant"]:
        return found == wanted
    return _alike(found, wanted)


def _alike(found, wanted):
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_alike, found, wanted))
    return found == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(scope="module")
def alone(checkpoint, adapters):
    """Each prompt with its adapter, one request at a time."""
    requests, _ = adapters
    with LLM(str(checkpoint[0]), **SETTINGS) as llm:
        return [
            _pairs(llm.generate(prompt, PARAMS, lora_request=lora, use_tqdm=False)[0])
            for prompt, lora in _mixed(requests)
        ]


def _mixed(requests):
    return [(prompt, requests[i % len(requests)]) for i, prompt in enumerate(PROMPTS)]


def test_each_adapter_computes_what_merged_weights_compute(checkpoint, adapters, alone):
    _, model = checkpoint
    requests, added = adapters
    for index in range(len(requests)):
        tokens = [token for token, _ in alone[index]]
        whole = merged(model, added[index])
        with torch.no_grad():
            logits = whole(torch.tensor([PROMPTS[index] + tokens])).logits[0].log_softmax(-1)
        start = len(PROMPTS[index]) - 1
        for step, (token, logprob) in enumerate(alone[index]):
            assert abs(logits[start + step, token].item() - logprob) < 1e-3
    assert len({str(found[:2]) for found in alone[:9]}) == 9


MODES = {
    "batched": {},
    "simple-loop": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preempted": {"max_num_seqs": 18, "num_gpu_blocks_override": 48},
    "engine-process": {"engine_process": True},
    "two-slots": {"max_loras": 2},
    "guesses": {"speculative_config": {"num_speculative_tokens": 3, "adaptive": False}},
}
"""Settings; guesses are the base model's, which an adapter's are not."""


@pytest.mark.parametrize("mode", MODES)
def test_a_mix_of_adapters_has_the_bits_of_each_alone(checkpoint, adapters, alone, mode):
    mixed = _mixed(adapters[0])
    prompts, requests = [p for p, _ in mixed], [r for _, r in mixed]
    settings = {**SETTINGS, **MODES[mode]}
    if mode == "guesses":
        settings["speculative_config"] = {
            **MODES[mode]["speculative_config"],
            "model": str(checkpoint[0]),
        }
    with LLM(str(checkpoint[0]), **settings) as llm:
        for lora in requests[1:9]:  # reading one waits for the loop, which `together` holds
            llm.llm_engine.add_lora(lora)
        waiting = together(llm, len(prompts)) if mode == "preempted" else contextlib.nullcontext()
        with waiting:
            outputs = llm.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        stats = llm.engine.stats()
        assert (stats.num_preemptions > 0) == (mode == "preempted")
        assert same(llm, [_pairs(output) for output in outputs], alone)
    assert [output.lora_request for output in outputs] == requests
    assert [output.outputs[0].lora_request for output in outputs] == requests


def test_five_adapters_through_two_slots(checkpoint, adapters, alone):
    """No wrong answer, and none starves; the host's memory holds two adapters."""
    requests = adapters[0][:6]
    order = [(17 * i) % 36 for i in range(40)]
    with LLM(str(checkpoint[0]), **{**SETTINGS, "max_loras": 2, "max_cpu_loras": 2}) as llm:
        outputs = llm.generate(
            [PROMPTS[i % 6] for i in order],
            PARAMS,
            lora_request=[requests[i % 6] for i in order],
            use_tqdm=False,
        )
        stats = llm.engine.stats()
        assert same(llm, [_pairs(output) for output in outputs], [alone[i % 6] for i in order])
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)


def test_prompt_logprobs_of_a_mix(checkpoint, adapters):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    requests = [adapters[0][3], None, adapters[0][7]]
    with LLM(str(checkpoint[0]), **SETTINGS) as llm:
        single = [
            llm.generate(prompt, params, lora_request=lora, use_tqdm=False)[0].prompt_logprobs
            for prompt, lora in zip(PROMPTS, requests)
        ]
        mixed = llm.generate(PROMPTS[:3], params, lora_request=requests, use_tqdm=False)
    assert [output.prompt_logprobs for output in mixed] == single


def test_cached_blocks_are_an_adapters_own(checkpoint, adapters):
    _, first, second, *_ = adapters[0]
    twin = LoRARequest("twin", 77, first.lora_path)
    with LLM(str(checkpoint[0]), **SETTINGS) as llm:
        found = [
            llm.generate(PROMPTS[0], PARAMS, lora_request=lora, use_tqdm=False)[0].num_cached_tokens
            for lora in (first, second, None, first, second, None, twin)
        ]
    assert found == [0, 0, 0, 24, 24, 24, 24]


def test_an_adapter_that_is_removed_serves_those_under_way(checkpoint, adapters, tmp_path, alone):
    path = tmp_path / "copied"
    shutil.copytree(adapters[0][1].lora_path, path)
    lora = LoRARequest("copied", 5, str(path))
    with LLMEngine(
        EngineArgs(model=str(checkpoint[0]), **{**SETTINGS, "max_num_seqs": 1})
    ) as engine:
        assert engine.add_lora(lora)
        assert not engine.add_lora(lora)
        for name in ("a", "b"):
            engine.add_request(name, PROMPTS[1], PARAMS, lora_request=lora)
        engine.step()
        assert engine.remove_lora(5)
        assert engine.list_loras() == set()
        shutil.rmtree(path)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        assert [_pairs(found[name]) for name in ("a", "b")] == [alone[1]] * 2
        with pytest.raises(RequestError, match="copied"):
            engine.add_request("c", PROMPTS[1], PARAMS, lora_request=lora)
        assert not engine.remove_lora(5)


def test_what_cannot_be_used_is_refused_by_name(checkpoint, adapters, tmp_path):
    folder, model = checkpoint
    first = adapters[0][1]
    write_adapter(tmp_path / "large", modules_of(model, ATTENTION), rank=17)
    with LLM(str(folder), **SETTINGS) as llm:
        llm.generate(PROMPTS[0], PARAMS, lora_request=first, use_tqdm=False)
        other = LoRARequest("other", first.lora_int_id, str(tmp_path / "large"))
        with pytest.raises(RequestError, match="lora_int_id = 1: must be another one"):
            llm.generate(PROMPTS[0], PARAMS, lora_request=other, use_tqdm=False)
        large = LoRARequest("large", 9, str(tmp_path / "large"))
        with pytest.raises(RequestError, match=r"large.*rank 17.*max_lora_rank = 16"):
            llm.generate(PROMPTS[0], PARAMS, lora_request=large, use_tqdm=False)
        missing = LoRARequest("missing", 10, str(tmp_path / "missing"))
        with pytest.raises(RequestError, match="missing"):
            llm.generate(PROMPTS[0], PARAMS, lora_request=missing, use_tqdm=False)
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_weights_that_are_read_again_keep_their_adapters(checkpoint, adapters, alone):
    first = adapters[0][1]
    with LLM(str(checkpoint[0]), **SETTINGS) as llm:
        before = llm.generate(PROMPTS[1], PARAMS, lora_request=first, use_tqdm=False)[0]
        llm.collective_rpc("reload_weights")
        after = llm.generate(PROMPTS[1], PARAMS, lora_request=first, use_tqdm=False)[0]
    assert _pairs(before) == _pairs(after) == alone[1]


def test_beams_of_an_adapter(checkpoint, adapters):
    first, params = adapters[0][1], BeamSearchParams(beam_width=2, max_tokens=4)
    settings = {**SETTINGS, "max_logprobs": 64}
    with LLM(str(checkpoint[0]), **settings) as llm:
        mixed = llm.beam_search(PROMPTS[:2], params, lora_request=[first, None])
        single = [
            llm.beam_search(PROMPTS[i], params, lora_request=lora)[0]
            for i, lora in enumerate([first, None])
        ]
        assert mixed[0].sequences[0].lora_request == first
        for together_, alone_ in zip(mixed, single):
            found, wanted = (
                [(s.tokens, s.score) for s in one.sequences] for one in (together_, alone_)
            )
            assert same(llm, found, wanted)


def test_vectors_of_adapters(checkpoint, adapters):
    requests = [adapters[0][number] for number in (0, 1, 2, 4, 5, 6)]
    settings = {**SETTINGS, "runner": "pooling", "max_loras": 2}
    with LLM(str(checkpoint[0]), **settings) as llm:
        single = [
            llm.embed(PROMPTS[i], lora_request=lora, use_tqdm=False)[0].outputs.embedding
            for i, lora in enumerate(requests)
        ]
        mixed = llm.embed(PROMPTS[:6], lora_request=requests, use_tqdm=False)
        assert same(llm, [output.outputs.embedding for output in mixed], single)
    assert len({tuple(vector) for vector in single}) == 6


def test_steps_with_adapters_are_replayed(checkpoint, adapters, alone):
    replayed = []

    def count(worker):
        graph = worker._runner.adapter_graph
        if graph is not None:
            replay = graph.replay
            graph.replay = lambda *step: (replayed.append(step), replay(*step))[1]
        return graph is not None

    with LLM(str(checkpoint[0]), **SETTINGS) as llm:
        if not llm.collective_rpc("report")[0]["batch_invariant"]:
            pytest.skip("no native kernels, whose calls are recorded")
        assert llm.collective_rpc(count) == [True]
        output = llm.generate(PROMPTS[1], PARAMS, lora_request=adapters[0][1], use_tqdm=False)[0]
        llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)
    assert _pairs(output) == alone[1]
    assert len(replayed) == NUM_TOKENS


@pytest.mark.req("REL-17")
@pytest.mark.req("F11")
def test_adapters_come_and_go_under_load(checkpoint, adapters, alone):
    """Requests with six adapters through two slots, while adapters are removed and requests aborted: who is
    answered has the right answer."""
    requests, draw = adapters[0][:7], random.Random(5)
    settings = {**SETTINGS, "max_loras": 2, "max_num_seqs": 8}

    async def run():
        engine = AsyncLLM.from_engine_args(EngineArgs(model=str(checkpoint[0]), **settings))

        async def answer(number, which, leaves):
            last = None
            outputs = engine.generate(
                PROMPTS[which], PARAMS, f"r{number}", lora_request=requests[which]
            )
            async for output in outputs:
                last = output
                if leaves:
                    await outputs.aclose()
                    return None
            return _pairs(last)

        async def churn():
            for _ in range(30):
                await engine.remove_lora(draw.randrange(1, 7))
                await engine.reset_prefix_cache(reset_running_requests=True)

        asked = [(draw.randrange(7), draw.random() < 0.2) for _ in range(80)]
        answers = [answer(number, *one) for number, one in enumerate(asked)]
        *found, _ = await asyncio.gather(*answers, churn())
        stats = await engine.stats()
        exact = (await engine.collective_rpc("report"))[0]["batch_invariant"]
        await engine.shutdown()
        return [which for which, _ in asked], found, stats, exact

    asked, found, stats, exact = asyncio.run(run())
    answered = [(which, pairs) for which, pairs in zip(asked, found) if pairs is not None]
    assert len(answered) > 50
    alike = operator.eq if exact else _alike
    assert all(alike(pairs, alone[which]) for which, pairs in answered)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
