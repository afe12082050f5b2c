"""Models that pool, from checkpoint to result: in batches, chunks, with cached beginnings, preempted,
in another process, always what transformers computes for one prompt alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_checkpoints import bert, qwen3, states, text

from headrace import LLM, AsyncLLM, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from headrace_core.errors import RequestError
from headrace_kernels.cpu.graph import NativeStepGraph

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "block_size": 8, "kv_cache_memory_bytes": 16 << 20,
    "use_tqdm_on_load": False,
}  # fmt: skip
LENGTHS = (1, 40, 7, 90, 23, 3, 64)
TEXTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]
SHARED = text(96, 50)


def make(path: Path, **changes: Any) -> LLM:
    return LLM(str(path), **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("bert")
    return path, bert(path)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, qwen3(path)


@pytest.fixture(scope="module")
def embedder(encoder: tuple[Path, Any]) -> Iterator[LLM]:
    with make(encoder[0]) as llm:
        yield llm


def normal(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def expected(made: tuple[Path, Any], token_ids: list[int]) -> torch.Tensor:
    """The embedding of one prompt, by transformers."""
    rows = states(made[1], token_ids)
    return normal(rows.mean(0) if made[1].config.model_type == "bert" else rows[-1])


def check(made: tuple[Path, Any], outputs: Any) -> None:
    for output in outputs:
        want = expected(made, output.prompt_token_ids)
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def vectors(outputs: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_an_encoder_s_batch_is_each_text_alone(encoder: Any, embedder: LLM) -> None:
    outputs = embedder.embed(TEXTS, use_tqdm=False)
    check(encoder, outputs)
    alone = [embedder.embed(one, use_tqdm=False)[0] for one in TEXTS]
    assert torch.equal(vectors(outputs), vectors(alone))
    assert {output.num_cached_tokens for output in outputs} == {0}


def test_rows_of_an_encoder_s_tokens(encoder: Any, embedder: LLM) -> None:
    for output in embedder.encode(TEXTS, pooling_task="token_embed", use_tqdm=False):
        want = normal(states(encoder[1], output.prompt_token_ids))
        assert isinstance(output.outputs.data, torch.Tensor)
        torch.testing.assert_close(output.outputs.data, want, atol=1e-4, rtol=1e-4)


def test_rows_fed_are_the_prompts_tokens(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_models.families.encoder.bert import BertModel

    with make(encoder[0], enforce_eager=True) as llm:
        fed: list[int] = []
        forward = BertModel.forward

        def counting(model: Any, batch: Any) -> Any:
            fed.append(batch.num_tokens)
            return forward(model, batch)

        monkeypatch.setattr(BertModel, "forward", counting)
        outputs = llm.embed(TEXTS, use_tqdm=False)
    assert sum(fed) == sum(len(output.prompt_token_ids) for output in outputs)


@pytest.mark.parametrize(
    ("labels", "pooling"),
    [(None, {"pooling_type": "MEAN"}), (None, {"pooling_type": "CLS"}), (3, None)],
    ids=["mean", "cls", "labels"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_in_parts_give_the_same_bits(
    labels: int | None,
    pooling: dict[str, str] | None,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads divide full steps; one thread computes them whole."""
    bert(tmp_path) if labels is None else bert(tmp_path, labels=labels)
    texts = [text(3 + 29 * i % 71, i) for i in range(70)]
    whole, divided = NativeStepGraph.replay, NativeStepGraph.replay_parts
    ways: list[int] = []
    all_added = threading.Event()

    def replay(*args: Any) -> torch.Tensor:
        """The first step waits for all requests, so that the next ones are full."""
        assert all_added.wait(60)
        ways.append(1)
        return whole(*args)

    def replay_parts(*args: Any) -> torch.Tensor:
        ways.append(len(args[2]) - 1)
        return divided(*args)

    monkeypatch.setattr(NativeStepGraph, "replay", replay)
    monkeypatch.setattr(NativeStepGraph, "replay_parts", replay_parts)
    task = PoolingParams(task="embed" if labels is None else "classify")
    found = []
    for threads in (1, 2):
        settings = {**SETTINGS, "dtype": dtype, "num_threads": threads, "pooler_config": pooling}
        all_added.set()  # for what is run while starting
        with LLMEngine(EngineArgs(model=str(tmp_path), **settings)) as engine:
            ways.clear()
            all_added.clear()
            for index, one in enumerate(texts):
                engine.add_request(str(index), one, task)
            all_added.set()
            outputs: dict[str, torch.Tensor] = {}
            while engine.has_unfinished_requests():
                outputs |= {each.request_id: each.outputs.data for each in engine.step()}
        assert (max(ways) == 1) == (threads == 1)
        found.append(torch.stack([outputs[str(i)] for i in range(len(texts))]))
    assert torch.equal(found[0], found[1])


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "small steps": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "no overlap": {"async_scheduling": False},
    "another process": {"engine_process": True},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_in_every_mode(mode: str, encoder: Any, embedder: LLM) -> None:
    with make(encoder[0], **MODES[mode]) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    check(encoder, outputs)
    assert torch.equal(vectors(outputs), vectors(embedder.embed(TEXTS, use_tqdm=False)))


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_in_every_mode(mode: str, decoder: Any) -> None:
    """Small steps cut prompts into chunks."""
    with make(decoder[0], **MODES[mode]) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    check(decoder, outputs)


def test_a_cached_beginning_changes_nothing(decoder: Any) -> None:
    texts = [f"{SHARED} {text(5, seed)}" for seed in range(4)]
    with make(decoder[0]) as llm:
        cold = llm.embed(texts[0], use_tqdm=False)
        warm = llm.embed(texts[1:], use_tqdm=False)
        again = llm.embed(texts[0], use_tqdm=False)
        rows = llm.encode(texts[0], pooling_task="token_embed", use_tqdm=False)
    assert cold[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens >= 88 for output in [*warm, *again])
    check(decoder, [*cold, *warm, *again])
    torch.testing.assert_close(vectors(again), vectors(cold), atol=1e-5, rtol=1e-5)
    assert rows[0].num_cached_tokens == 0
    assert len(rows[0].outputs.data) == len(rows[0].prompt_token_ids)


def test_preempted_prompts_are_computed_again(decoder: Any) -> None:
    """Room for one long prompt and a little more; four run side by side, in chunks."""
    texts = [text(100, seed) for seed in range(4)]
    settings = {
        "num_gpu_blocks_override": 18, "kv_cache_memory_bytes": None, "max_model_len": 128,
        "enable_prefix_caching": False, "max_num_batched_tokens": 32, "max_num_seqs": 4,
        "max_num_partial_prefills": 4, "max_long_partial_prefills": 4,
        "long_prefill_token_threshold": 8,
    }  # fmt: skip
    with make(decoder[0], **settings) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
    check(decoder, outputs)


def test_64_requests_of_all_kinds_at_once(decoder: Any) -> None:
    async def run() -> list[Any]:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(model=str(decoder[0]), **SETTINGS, max_num_batched_tokens=64, max_num_seqs=8)
        )
        try:
            kinds = itertools.cycle(("embed", "token_embed"))
            calls = [
                engine.encode(text(1 + 3 * i % 97, i), None, f"r{i}", pooling_task=task)
                for i, task in zip(range(64), kinds)
            ]
            return await asyncio.gather(*calls)
        finally:
            await engine.shutdown()

    for output in asyncio.run(run()):
        rows = normal(states(decoder[1], output.prompt_token_ids))
        data = output.outputs.data
        want = rows if data.dim() == 2 else rows[-1]
        torch.testing.assert_close(data, want, atol=1e-4, rtol=1e-4)


def test_pairs_of_a_cross_encoder(tmp_path: Path) -> None:
    model = bert(tmp_path, labels=1)
    query, documents = text(5, 1), [text(9, 2), text(30, 3), text(5, 1)]
    with make(tmp_path) as llm:
        scores = llm.score(query, documents, use_tqdm=False)
        single = llm.classify([query], use_tqdm=False)
        tokenizer: Any = llm.get_tokenizer()
        for document, score in zip(documents, scores, strict=True):
            pair = tokenizer.encode_pair(query, document)
            assert score.prompt_token_ids == pair.token_ids
            with torch.no_grad():
                given = {
                    "input_ids": torch.tensor([pair.token_ids]),
                    "token_type_ids": torch.tensor([pair.token_type_ids]),
                }
                want = model(**given).logits.sigmoid()[0, 0]
            assert score.outputs.score == pytest.approx(float(want), abs=1e-4)
    assert single[0].outputs.num_classes == 1


def test_pairs_of_an_embedder(encoder: Any, embedder: LLM) -> None:
    scores = embedder.score([TEXTS[1], TEXTS[2]], [TEXTS[2], TEXTS[2]], use_tqdm=False)
    a, b = vectors(embedder.embed(TEXTS[1:3], use_tqdm=False))
    assert [s.outputs.score for s in scores] == pytest.approx([float(a @ b), 1.0], abs=1e-5)


def test_classes(tmp_path: Path) -> None:
    model = bert(tmp_path, labels=3)
    with make(tmp_path) as llm:
        outputs = llm.classify(TEXTS, use_tqdm=False)
        raw = PoolingParams(use_activation=False)
        logits = llm.classify(TEXTS, pooling_params=raw, use_tqdm=False)
    for output, other in zip(outputs, logits, strict=True):
        with torch.no_grad():
            want = model(input_ids=torch.tensor([output.prompt_token_ids])).logits[0]
        torch.testing.assert_close(torch.tensor(other.outputs.probs), want, atol=1e-4, rtol=1e-4)
        probs = torch.tensor(output.outputs.probs)
        torch.testing.assert_close(probs, want.softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("process", [False, True])
def test_long_texts(process: bool, encoder: Any) -> None:
    config = {"enable_chunked_processing": True, "max_embed_len": 3_072_000}
    long = text(1000, 9)
    with make(encoder[0], pooler_config=config, engine_process=process) as llm:
        outputs = llm.embed([TEXTS[1], long], use_tqdm=False)
    check(encoder, outputs[:1])
    ids = outputs[1].prompt_token_ids
    windows = [ids[i : i + 128] for i in range(0, len(ids), 128)]
    sums = [states(encoder[1], window).mean(0) * len(window) for window in windows]
    want = normal(torch.stack(sums).sum(0))
    torch.testing.assert_close(vectors(outputs[1:])[0], want, atol=1e-4, rtol=1e-4)


def test_calls_of_the_other_runner_name_it(encoder: Any, embedder: LLM, decoder: Any) -> None:
    for call in (lambda: embedder.generate("text"), lambda: embedder.chat([{"role": "user"}])):
        with pytest.raises(ValueError, match=r"LLM\..*runner pooling.*--runner generate"):
            call()
    with pytest.raises(ValueError, match=r"LLM\.classify.*its tasks are embed.*--convert classify"):
        embedder.classify("text")
    with pytest.raises(ValueError, match=r"LLM\.embed \(embed\).*pooling_task|pooling_task = None"):
        embedder.encode("text")
    with make(decoder[0], runner="generate") as llm:
        names = ("embed", "classify", "reward", "score", "encode")
        for name in names:
            arguments = ("a", "b") if name == "score" else ("a",)
            with pytest.raises(
                ValueError, match=rf"LLM\.{name}.*runner generate.*--runner pooling"
            ):
                getattr(llm, name)(*arguments)
        (output,) = llm.generate("a quick", SamplingParams(max_tokens=2, temperature=0))
        assert output.finished


def test_parameters_of_single_requests(encoder: Any) -> None:
    args = EngineArgs(model=str(encoder[0]), **SETTINGS)
    wrong: Any = {"task": "embed"}
    with LLMEngine(args) as engine:
        for params, said in (
            (wrong, r"params = \{'task': 'embed'\}: must be SamplingParams, or PoolingParams"),
            (None, "params = None: must be"),
            (PoolingParams(), "task = None: must be one of .*: embed, token_embed"),
        ):
            with pytest.raises(RequestError, match=said):
                engine.add_request("a", "the sea", params)

    async def refused() -> None:
        llm = AsyncLLM.from_engine_args(args)
        try:
            said = r"pooling_params = \{'task': 'embed'\}: must be a PoolingParams"
            with pytest.raises(RequestError, match=said):
                await llm.encode("the sea", wrong, "a")
            with pytest.raises(RequestError, match=said):
                await llm.score("the sea", "the sea", "b", pooling_params=wrong)
            with pytest.raises(RequestError, match="2 given; must be one PoolingParams"):
                await llm.encode("the sea", [PoolingParams()] * 2, "c")  # type: ignore[arg-type]
            options = {"add_special_tokens": False, "truncate_prompt_tokens": 2}
            whole = await llm.encode("the sea", None, "d", pooling_task="embed")
            for given in ({"tokenization_kwargs": options},
                          {"tokenization_kwargs": {"add_special_tokens": False},
                           "truncate_prompt_tokens": 2}):  # fmt: skip
                cut = await llm.encode("the sea", None, "e", pooling_task="embed", **given)
                assert cut.prompt_token_ids == whole.prompt_token_ids[1:-1][-2:]
            with pytest.raises(RequestError, match=r"kwargs: .*padding.* cannot be served"):
                await llm.encode("the sea", None, "f", tokenization_kwargs={"padding": True})
        finally:
            await llm.shutdown()

    asyncio.run(refused())


def test_step_by_step(encoder: Any) -> None:
    with LLMEngine.from_engine_args(EngineArgs(model=str(encoder[0]), **SETTINGS)) as engine:
        for index, one in enumerate(TEXTS):
            engine.add_request(str(index), one, PoolingParams(task="embed"))
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
    assert sorted(outputs) == [str(i) for i in range(len(TEXTS))]
    for output in outputs.values():
        want = expected(encoder, output.prompt_token_ids)
        torch.testing.assert_close(output.outputs.data, want, atol=1e-4, rtol=1e-4)


def test_progress_is_shown(embedder: LLM) -> None:
    shown: list[int] = []

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            self.total = total

        def set_postfix_str(self, *_: Any, **__: Any) -> None: ...

        def update(self, count: int) -> None:
            shown.append(count)

        def close(self) -> None:
            shown.append(-self.total)

    embedder.embed(TEXTS, use_tqdm=Bar)
    assert shown == [1] * len(TEXTS) + [-len(TEXTS)]


def test_texts_and_pairs_are_tokenized_as_transformers_does(encoder: Any, embedder: LLM) -> None:
    from transformers import AutoTokenizer

    ours: Any = embedder.get_tokenizer()
    for side in ("right", "left"):
        theirs = AutoTokenizer.from_pretrained(encoder[0], truncation_side=side)
        cases = itertools.product(
            (None, text(4, 1), text(30, 2)), (text(3, 3), text(25, 4)), (8, 21, 99)
        )
        for second, first, length in cases:
            want = theirs(
                first, second, truncation=True, max_length=length, return_token_type_ids=True
            )
            found = ours.encode_pair(first, second, max_length=length, truncation_side=side)
            assert found.token_ids == want["input_ids"]
            assert found.token_type_ids == want["token_type_ids"]
    keep = embedder.embed(TEXTS[1], truncate_prompt_tokens=9, use_tqdm=False)
    assert keep[0].prompt_token_ids == theirs(TEXTS[1], truncation=True, max_length=9)["input_ids"]


PLAIN = {"add_special_tokens": False, "truncate_prompt_tokens": 5}


def test_how_texts_are_tokenized_for_an_embedder(embedder: LLM) -> None:
    words = {"tokenization_kwargs": PLAIN, "use_tqdm": False}
    tokenizer: Any = embedder.get_tokenizer()
    a, b = (tokenizer.encode(one, add_special_tokens=False)[-5:] for one in TEXTS[1:3])
    embedded = embedder.embed(TEXTS[1:3], truncate_prompt_tokens=9, **words)
    assert [output.prompt_token_ids for output in embedded] == [a, b]
    (score,) = embedder.score(TEXTS[1], TEXTS[2], **words)
    assert score.prompt_token_ids == a + b
    with pytest.raises(RequestError, match=r"tokenization_kwargs: .*'max_length'"):
        embedder.embed("text", tokenization_kwargs={"max_length": 5})


def test_how_texts_are_tokenized_for_a_classifier(tmp_path: Path) -> None:
    bert(tmp_path, labels=1)
    words = {"tokenization_kwargs": PLAIN, "use_tqdm": False}
    with make(tmp_path) as llm:
        tokenizer: Any = llm.get_tokenizer()
        plain = tokenizer.encode(TEXTS[1], add_special_tokens=False)[-5:]
        for call in (llm.classify, llm.reward):
            (output,) = call(TEXTS[1], **words)
            assert output.prompt_token_ids == plain
            with pytest.raises(RequestError, match=r"tokenization_kwargs: .*'max_length'"):
                call("text", tokenization_kwargs={"max_length": 5})
        (score,) = llm.score("a", TEXTS[1], tokenization_kwargs={"truncate_prompt_tokens": 7})
        assert len(score.prompt_token_ids) == 7
        with pytest.raises(RequestError, match="add_special_tokens = False: must be True or left"):
            llm.score("a", "b", **words)
        with pytest.raises(RequestError, match="tokenization_kwargs = 'x': must be a mapping"):
            llm.score("a", "b", tokenization_kwargs="x")


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_a_prompt_that_is_not_pooled(mode: str, encoder: Any, tmp_path: Path) -> None:
    """``include_prompt: false``, as Sentence Transformers itself computes it."""
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    plain = tmp_path / "plain"  # without the modules that the fixture has
    shutil.copytree(encoder[0], plain, ignore=shutil.ignore_patterns("modules.json"))
    modules = [Transformer(str(plain)), Pooling(32, mode, include_prompt=False)]
    prompts = {"query": "the water of the"}
    theirs = st.SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    theirs.save(str(tmp_path / "st"))
    texts = [text(5, 1), text(17, 2)]
    with LLM(str(tmp_path / "st"), **SETTINGS) as llm:
        for name in ("query", None):
            found = llm.embed(texts, prompt_name=name, use_tqdm=False)
            ours = torch.tensor([output.outputs.embedding for output in found])
            want = torch.tensor(theirs.encode(texts, prompt_name=name, normalize_embeddings=True))
            torch.testing.assert_close(normal(ours), want, atol=1e-4, rtol=0)


def test_several_http_processes_share_one_engine(encoder: Any, embedder: LLM) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from urllib.request import Request, urlopen

    from servers import serving

    flags = ("--dtype", "float32", "--num-threads", "1", "--api-server-count", "2")
    with serving("--model", str(encoder[0]), *flags) as server:

        def post(one: str) -> list[float]:
            body = json.dumps({"model": str(encoder[0]), "input": one}).encode()
            request = Request(
                server.api + "/embeddings", body, {"content-type": "application/json"}
            )
            with urlopen(request, timeout=60) as response:
                found: list[float] = json.load(response)["data"][0]["embedding"]
            return found

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(post, TEXTS * 4))
    want = vectors(embedder.embed(TEXTS * 4, use_tqdm=False))
    torch.testing.assert_close(torch.tensor(found), want, atol=1e-6, rtol=1e-6)
