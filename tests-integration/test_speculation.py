"""Speculative decoding through the whole engine: whatever is guessed, outputs are the same bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import openai
import pytest
import torch
from families import STATE_FAMILIES, save_model
from modes import MODES, PROMPTS, run
from servers import serving

from headrace import LLM, SamplingParams
from headrace import demo as demo_model
from headrace.logits_process import LogitsProcessor, process_dict_updates
from headrace.sampling_params import StructuredOutputsParams
from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginNotFound, UnsupportedFeature
from headrace_core.speculation import DraftProposer, DraftTask
from headrace_engine.speculation import draft_model

KINDS = {
    "llama": "full", "mistral": "window", "gemma3": "windows and full", "gemma4": "shared caches",
    "deepseek_v3": "latent", "glm_moe_dsa": "picked tokens", "bloom": "linear biases",
    "gpt2": "learned positions", "mixtral": "experts",
}  # fmt: skip
"""Family -> its kind of attention."""
TELLER = {"method": "teller", "num_speculative_tokens": 4, "adaptive": False}


class Teller(DraftProposer):
    """Guesses what it was told, now and then wrongly, at random places."""

    told: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    """Prompt -> output."""
    num_asked: ClassVar[int] = 0

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._random = random.Random(settings.get("seed", 5))

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        Teller.num_asked += 1
        return [self._guess(task) for task in tasks]

    def _guess(self, task: DraftTask) -> list[int]:
        ids = task.token_ids.tolist()
        output = self.told.get(tuple(ids[: task.num_prompt_tokens]), [])
        right = output[len(ids) - task.num_prompt_tokens :][: self._random.randint(0, task.most)]
        return [token if self._random.random() < 0.8 else (token + 1) % 90 for token in right]


@pytest.fixture(scope="module", autouse=True)
def teller():
    for proposer in (Teller, Odd, Sure):
        plugins.register("headrace.draft_proposers", proposer.__name__.lower(), proposer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return checkpoint("llama", tmp_path_factory)


def checkpoint(family: str, factory):
    """A checkpoint and its outputs without guesses, of which the teller is told."""
    folder = factory.mktemp(f"{family}-")
    save_model(family, folder)
    alone = run(folder, alone=True)
    Teller.told = {tuple(p): [t for t, _ in pairs] for p, pairs in zip(PROMPTS, alone, strict=True)}
    return folder, alone


@pytest.mark.parametrize("mode", [m for m in MODES if m != "engine-process"])
def test_every_mode_gives_the_same_bits(llama, mode):
    folder, alone = llama
    before = Teller.num_asked
    assert run(folder, speculative_config=TELLER, **MODES[mode]) == alone
    assert Teller.num_asked > before


@pytest.mark.parametrize("family", [family for family in KINDS if family != "llama"])
def test_every_kind_of_attention_gives_the_same_bits(family, tmp_path_factory):
    folder, alone = checkpoint(family, tmp_path_factory)
    assert run(folder, speculative_config=TELLER, **MODES["chunked"]) == alone


STATES = ["bamba", "mamba2", *STATE_FAMILIES]
"""Families with recurrent layers, whose states a wrong guess must not move on."""


@pytest.mark.keep(4)
@pytest.mark.parametrize("family", STATES)
def test_states_stay_where_guesses_were_wrong(family, tmp_path_factory):
    folder, alone = checkpoint(family, tmp_path_factory)
    before = Teller.num_asked
    assert run(folder, speculative_config=TELLER, **MODES["chunked"]) == alone
    assert Teller.num_asked > before


@pytest.fixture(scope="module")
def bamba(tmp_path_factory):
    return checkpoint("bamba", tmp_path_factory)


@pytest.mark.keep(3)
@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("engine-process", "chunked")])
def test_states_in_every_mode(bamba, mode):
    folder, alone = bamba
    Teller.told = {tuple(p): [t for t, _ in pairs] for p, pairs in zip(PROMPTS, alone, strict=True)}
    assert run(folder, speculative_config=TELLER, **MODES[mode]) == alone


def test_states_save_steps(bamba):
    """The state takes turns in two blocks as long as all guesses are right."""
    folder, alone = bamba
    Teller.told = {tuple(PROMPTS[2]): [token for token, _ in alone[2]]}
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
                "kv_cache_memory_bytes": 32 << 20, "enable_prefix_caching": False}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), speculative_config={**TELLER, "method": "sure"}, **settings) as llm:
        (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        stats = llm.engine.stats()
    assert output.outputs[0].token_ids == [token for token, _ in alone[2]]
    # One token by the prompt, then twice four guesses and one more; one for the end.
    assert stats.num_accepted_per_position == [2, 2, 2, 2]
    assert stats.num_steps == 4
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(("family", "blocks"), [("bamba", 60), ("recurrent_gemma", 20)])
def test_states_beside_long_outputs(family, blocks, tmp_path_factory):
    """Windows keep what is computed again, whatever others write; and what is found later in the cache is
    right, though guesses were wrong beside it."""
    folder = tmp_path_factory.mktemp(f"{family}-")
    save_model(family, folder)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "block_size": 8,
                "num_threads": 1, "max_num_seqs": 3, "async_scheduling": False}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(str(folder), kv_cache_memory_bytes=32 << 20, **settings) as llm:
        told = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        longer = [p + out[:n] for p, out in zip(PROMPTS, told) for n in (7, 16, 25, 31, 40)]
        after = [o.outputs[0].token_ids for o in llm.generate(longer, params, use_tqdm=False)]
    Teller.told = {tuple(prompt): out for prompt, out in zip(PROMPTS + longer, told + after)}
    with LLM(
        str(folder), speculative_config=TELLER, num_gpu_blocks_override=blocks, **settings
    ) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert found == told
        again = llm.generate(longer, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == after
        assert any(o.num_cached_tokens for o in again)


def test_steps_are_saved_and_counted(llama):
    folder, alone = llama
    Teller.told = {tuple(PROMPTS[2]): [token for token, _ in alone[2]]}
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
                "kv_cache_memory_bytes": 32 << 20}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), speculative_config={**TELLER, "method": "sure"}, **settings) as llm:
        llm.generate([PROMPTS[2]], params, use_tqdm=False)
        stats = llm.engine.stats()
    # One token by the prompt, then twice four guesses and one more; one for the end.
    assert (stats.num_drafts, stats.num_draft_tokens) == (2, 8)
    assert stats.num_accepted_per_position == [2, 2, 2, 2]
    assert stats.num_steps == 4
    assert stats.generation_tokens == 12


class Banning(LogitsProcessor):
    """Bans a request's last token again after every ``ban``-th one."""

    def __init__(self, config, device, is_pin_memory):
        self.rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        def wanted(params, prompt_ids, output_ids):
            every = (params.extra_args or {}).get("ban")
            return every and (every, output_ids)

        process_dict_updates(self.rows, batch_update, wanted)

    def apply(self, logits):
        for row, (every, output) in self.rows.items():
            if output and len(output) % every == 0:
                logits[row, output[-1]] = -torch.inf
        return logits


REPEATING = ["a b c d a b c d a b", "one two three one two three one", "The sun"]
LIST = {
    "type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9,
}  # fmt: skip
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filters": {"temperature": 0.8, "seed": 1, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.4,
                  "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "biases": {"temperature": 0, "logit_bias": {20: 3.0, 21: -2.0}, "bad_words": ["b"]},
    "stop strings": {"temperature": 0, "stop": ["c d a"], "min_tokens": 9},
    "stop tokens": {"temperature": 0.5, "seed": 4, "stop_token_ids": [35, 40], "min_tokens": 3},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "all log-probabilities": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 1},
    "processor": {"temperature": 0, "extra_args": {"ban": 2}},
    "json": {"temperature": 0, "structured_outputs": StructuredOutputsParams(json=LIST)},
    "regex": {"temperature": 0.9, "seed": 8,
              "structured_outputs": StructuredOutputsParams(regex="(ab ){4,20}c")},
}  # fmt: skip


def demo(**settings: Any) -> LLM:
    """The demo model, which has a tokenizer."""
    return LLM(
        max_model_len=256, kv_cache_memory_bytes=32 << 20, logits_processors=[Banning], **settings
    )


def outputs(llm: LLM, name: str) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 40, "logprobs": 1, **PARAMS[name]})
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason,
         [{i: p.logprob for i, p in entry.items()} for entry in one.logprobs])
        for output in llm.generate(REPEATING, params, use_tqdm=False)
        for one in output.outputs
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    with demo() as llm:
        return {name: outputs(llm, name) for name in PARAMS}


@pytest.fixture(scope="module", params=["ngram", "suffix", "adaptive"])
def guessing(request):
    config: dict[str, Any] = {"method": "suffix", "adaptive": request.param == "adaptive"}
    if request.param == "ngram":
        config |= {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
    with demo(speculative_config=config) as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_has_the_same_outputs(plain, guessing, name):
    assert outputs(guessing, name) == plain[name]


def test_offline_metrics_count_by_position():
    with demo(speculative_config={"method": "suffix"}, disable_log_stats=False) as llm:
        outputs(llm, "greedy")
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        stats = llm.engine.stats()
    by_position = metrics["headrace:spec_decode_num_accepted_tokens_per_pos"]
    assert by_position.values == stats.num_accepted_per_position
    accepted = metrics["headrace:spec_decode_num_accepted_tokens"].value
    assert accepted == sum(by_position.values) > 0


def test_guesses_came_true(guessing):
    outputs(guessing, "greedy")
    stats = guessing.engine.stats()
    assert stats.num_drafts > 0
    assert sum(stats.num_accepted_per_position) > stats.num_drafts / 4


class Sure(Teller):
    """Guesses all that it was told."""

    def _guess(self, task: DraftTask) -> list[int]:
        prompt, output = next(iter(self.told.items()))
        return output[len(task.token_ids) - len(prompt) :][: task.most]


class Odd(Teller):
    guess: ClassVar[Any] = None

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        return [self.guess for _ in tasks]


@pytest.mark.parametrize("guess", [[-1, 5], [1 << 40], [3] * 100, ["a"], None])
def test_what_is_no_guess_is_left_out(llama, guess, monkeypatch):
    folder, alone = llama
    monkeypatch.setattr(Odd, "guess", guess)
    assert run(folder, speculative_config={**TELLER, "method": "odd"}) == alone


def test_an_unknown_method_is_named():
    with pytest.raises(PluginNotFound, match=r"speculative_config\.method.*telepathy.*suffix"):
        LLM(speculative_config={"method": "telepathy", "num_speculative_tokens": 2})


def test_over_http(server):
    """Streamed through the engine of another process; `/metrics` counts."""
    config = '{"method": "suffix", "adaptive": false}'
    asked = {"model": "headrace-demo", "prompt": REPEATING[0], "max_tokens": 40, "temperature": 0}
    with serving("--engine-process", "--speculative-config", config) as guessing:
        with openai.OpenAI(base_url=guessing.api, api_key="none", max_retries=0) as client:
            whole = client.completions.create(**asked)
            pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
        counts = [
            guessing.metric(f"spec_decode_num_{name}_total")
            for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        ]
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        expected = client.completions.create(**asked)
    assert whole.choices[0].text == "".join(pieces) == expected.choices[0].text
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    assert details.rejected_prediction_tokens >= 0
    assert expected.usage.completion_tokens_details is None
    assert whole.usage.completion_tokens == expected.usage.completion_tokens == 40
    assert counts[1] >= counts[0] > 0
    assert counts[2] == counts[3] > 10


class TestDraftModels:
    """A model of the same vocabulary guesses."""

    CONFIG: ClassVar = {"num_speculative_tokens": 4, "adaptive": False}

    @pytest.mark.parametrize("mode", ["batched", "chunked", "preempted", "prefix-hits", "eager"])
    def test_bad_guesses_change_nothing(self, llama, other, mode):
        folder, alone = llama
        config = {**self.CONFIG, "model": str(other)}
        assert run(folder, speculative_config=config, **MODES[mode]) == alone

    def test_the_model_itself_is_always_right(self, llama):
        folder, alone = llama
        config = {**self.CONFIG, "model": str(folder)}
        settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
                    "kv_cache_memory_bytes": 32 << 20, "block_size": 8}  # fmt: skip
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
        with LLM(str(folder), **settings) as llm:
            expected = llm.generate(PROMPTS, drawn, use_tqdm=False)
        with LLM(str(folder), speculative_config=config, **settings) as llm:
            outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [[t for t, _ in a] for a in alone]
            outputs = llm.generate(PROMPTS, drawn, use_tqdm=False)
            stats = llm.engine.stats()
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
        assert sum(stats.num_accepted_per_position) == stats.num_draft_tokens > 50

    def test_prompt_log_probabilities_leave_it_guessing(self, llama):
        """Their rows stand behind those that the draft model draws from."""
        folder, alone = llama
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
        settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
                    "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}  # fmt: skip
        config = {**self.CONFIG, "model": str(folder)}
        with LLM(str(folder), speculative_config=config, **settings) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            stats = llm.engine.stats()
        assert [o.outputs[0].token_ids for o in outputs] == [[t for t, _ in a] for a in alone]
        assert sum(stats.num_accepted_per_position) == stats.num_draft_tokens > 50

    def test_a_long_prompt_is_caught_up_with_in_pieces(self, llama, monkeypatch):
        monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 16)
        folder, alone = llama
        assert run(folder, speculative_config={**self.CONFIG, "model": str(folder)}) == alone

    def test_another_vocabulary_is_refused(self, llama):
        folder, _ = llama
        with pytest.raises(ConfigError, match=r"speculative_config\.model.*vocabulary of \d+"):
            run(folder, speculative_config={**self.CONFIG, "model": str(demo_model.path())})

    def test_a_model_with_states(self, llama, bamba):
        folder, alone = bamba
        assert run(folder, speculative_config={**self.CONFIG, "model": str(llama[0])}) == alone

    @pytest.mark.parametrize("family", ["gemma3", "mamba2"])
    def test_layers_that_give_up_what_they_saw_are_refused(self, llama, family, tmp_path_factory):
        small = tmp_path_factory.mktemp(f"{family}-draft-")
        save_model(family, small)
        with pytest.raises(UnsupportedFeature, match=r"the draft model has .*: must be"):
            run(llama[0], speculative_config={**self.CONFIG, "model": str(small)})

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("qwen3-draft-")
        save_model("qwen3", folder)
        return folder
