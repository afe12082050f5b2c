"""Structured output end to end: random weights, temperature 1, independent oracles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path

import constrained
import pytest
from constrained import CHOICES, EOS, KINDS, PERSON, SETTINGS, closing_bias, params, valid
from together import together

from headrace import LLM, AsyncLLM, EngineArgs
from headrace_core.errors import ConfigError, MissingDependency, RequestError, UnsupportedFeature

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
FREE = ["the quick", "brown fox", "jumps over", "a lazy dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("constrained")
    constrained.save(made)
    return str(made)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def bias(llm):
    return closing_bias(llm)


def generate(llm, prompts, wanted):
    return llm.generate(prompts, wanted, use_tqdm=False)


def texts(outputs):
    return [(o.finish_reason, o.text) for output in outputs for o in output.outputs]


def mixed(bias, seeds=3):
    """(prompts, parameters): constrained requests of every kind, and free ones in between."""
    wanted, prompts = [], []
    for seed in range(seeds):
        for kind, (constraint, _) in KINDS.items():
            wanted.append(params(seed, bias=bias, **constraint))
            prompts.append(f"{kind} {seed}: ")
        wanted.append(params(seed, ignore_eos=True, max_tokens=20, logprobs=1))
        prompts.append(FREE[seed % len(FREE)])
    return prompts, wanted


@pytest.mark.parametrize("kind", KINDS)
def test_every_finished_output_satisfies_its_constraint(llm, bias, kind):
    constraint, oracle = KINDS[kind]
    wanted = [params(seed, bias=bias, max_tokens=120, **constraint) for seed in range(60)]
    outputs = texts(generate(llm, ["It is: "] * 60, wanted))
    finished = [text for reason, text in outputs if reason == "stop"]
    assert len(finished) >= 30, outputs[:5]
    assert len(set(finished)) > 1
    for text in finished:
        assert oracle(text), text
    assert {reason for reason, _ in outputs} <= {"stop", "length"}


@pytest.fixture(scope="module")
def expected(llm, bias):
    prompts, wanted = mixed(bias)
    return [output.outputs[0].token_ids for output in generate(llm, prompts, wanted)]


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize(
    "changes",
    [
        {"async_scheduling": False},
        {"max_num_batched_tokens": 13, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 40, "enable_prefix_caching": False, "preempted": True},
        {"engine_process": True},
        {"enforce_eager": True},
        {"structured_outputs_config": {"prepare_at_start": True}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_mode_gives_the_same_tokens(folder, bias, expected, changes):
    """Chunked prompts, preemption, the engine in a process: a mask is where its tokens are."""
    changes = dict(changes)
    preempted = changes.pop("preempted", False)
    prompts, wanted = mixed(bias)
    with LLM(folder, **{**SETTINGS, **changes}) as other:
        if preempted:  # compiled before, constraints keep nobody waiting: all run side by side
            generate(other, prompts, wanted)
        with together(other, len(prompts)) if preempted else contextlib.nullcontext():
            outputs = generate(other, prompts, wanted)
        stats = other.engine.stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not preempted or stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_free_neighbours_are_unchanged(llm, bias):
    prompts, wanted = mixed(bias, seeds=4)
    together = generate(llm, prompts, wanted)
    for prompt, one, output in zip(prompts, wanted, together):
        if one.structured_outputs is None:
            [alone] = generate(llm, prompt, one)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_half_precision(folder, bias):
    with LLM(folder, **{**SETTINGS, "dtype": "bfloat16"}) as other:
        prompts, wanted = mixed(bias)
        together = generate(other, prompts, wanted)
        for prompt, one, output in zip(prompts, wanted, together):
            if one.structured_outputs is None:
                [alone] = generate(other, prompt, one)
                assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    kinds = [*KINDS, None] * 3
    for kind, (reason, text) in zip(kinds, texts(together)):
        assert kind is None or reason != "stop" or KINDS[kind][1](text), (kind, text)


def test_several_completions(llm, bias):
    [output] = generate(llm, "pick: ", params(5, bias=bias, n=24, regex="[a-z]{3}[0-9]?"))
    found = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{3}[0-9]?", text) for text in found)
    assert len(set(found)) > 10


def test_logprobs_penalties_and_bad_words(llm, bias):
    wanted = [
        params(seed, bias=bias, regex="[a-d]{12}", logprobs=3, repetition_penalty=1.3,
               frequency_penalty=0.5, presence_penalty=0.5, top_p=0.9, top_k=20, min_p=0.01,
               bad_words=["a"])
        for seed in range(8)
    ]  # fmt: skip
    for output in generate(llm, ["x"] * 8, wanted):
        [completion] = output.outputs
        assert re.fullmatch("[b-d]{12}", completion.text), completion.text
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(
            token in entry for token, entry in zip(completion.token_ids, completion.logprobs)
        )


def test_logprobs_are_those_of_the_model(llm):
    """Raw values do not know of the mask: forced text is as unlikely as the model finds it."""
    [forced] = generate(llm, "x", params(choice=["zzzz"], logprobs=0))
    total = sum(next(iter(e.values())).logprob for e in forced.outputs[0].logprobs[:-1])
    assert forced.outputs[0].text == "zzzz"
    assert total < -5


def test_stop_strings_and_stop_tokens_still_end(llm, bias):
    wanted = [params(seed, bias=bias, regex="[ab]{6,}\n", stop=["\n"]) for seed in range(6)]
    for reason, text in texts(generate(llm, ["x"] * 6, wanted)):
        assert reason in ("stop", "length")
        assert re.fullmatch("[ab]*", text)
    token = llm.get_tokenizer().encode("b", add_special_tokens=False)[0]
    wanted = [params(seed, regex="[ab]{50}", stop_token_ids=[token]) for seed in range(6)]
    for reason, text in texts(generate(llm, ["x"] * 6, wanted)):
        assert reason == "stop"
        assert re.fullmatch("a*b", text)


def test_min_tokens_keeps_on_where_the_constraint_lets_it(llm, bias):
    wanted = [params(seed, bias=bias, regex="[a-z ]+", min_tokens=30) for seed in range(6)]
    for output in generate(llm, ["x"] * 6, wanted):
        assert len(output.outputs[0].token_ids) >= 30


def test_what_leaves_nothing_ends_that_request_alone(llm, bias):
    prompts, wanted = mixed(bias, seeds=1)
    alone = generate(llm, prompts, wanted)
    token = llm.get_tokenizer().encode("z", add_special_tokens=False)[0]
    bad = [
        params(choice=["yes"], allowed_token_ids=[token]),
        params(regex="yes", min_tokens=40),
    ]
    together = generate(llm, [*prompts, "x", "x"], [*wanted, *bad])
    form = "the constraint on the form (structured_outputs, response_format or tools)"
    ended = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in together[-2:]]
    assert ended == [
        ("error", f"no token is possible with {form} and {field}")
        for field in ("allowed_token_ids", "min_tokens")
    ]
    assert [o.outputs[0].text for o in together[-2:]] == ["", "yes"]
    for one, other in zip(alone, together):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": ["yes"], "min_tokens": 40}, "min_tokens = 40: must be at most 3"),
        ({"regex": "a{1000000}"}, r"structured_outputs\.regex: backend guidance"),
        ({"allowed_token_ids": [70], "logit_bias": {70: float("-inf")}},
         "allowed_token_ids: with logit_bias, none of its tokens is possible"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids: with min_tokens"),
        ({"json": {"maximum": -1e30}}, "'maximum' at '#': -1e.30: must be at least -9000"),
    ],
)  # fmt: skip
def test_fields_that_exclude_each_other_are_refused_by_name(llm, fields, message):
    before = llm.engine.stats().num_steps
    with pytest.raises(RequestError, match=message):
        generate(llm, "x", params(**fields))
    assert llm.engine.stats().num_steps == before


def test_an_ambiguous_grammar_ends_alone_and_early(llm):
    """The cost grows with the square of the length; a neighbour gets all of its tokens."""
    grammar = 's ::= s s | "a" | s s s | ""'
    wanted = [
        params(0, grammar=f"root ::= s\n{grammar}", max_tokens=240, bias={EOS: -100.0}),
        params(0, max_tokens=240, ignore_eos=True),
    ]
    slow, free = (o.outputs[0] for o in generate(llm, ["x", "y"], wanted))
    assert slow.finish_reason == "error"
    assert "matching the constraint takes too long" in slow.stop_reason
    assert len(slow.token_ids) < 200
    assert (free.finish_reason, len(free.token_ids)) == ("length", 240)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"items": {"not": {}}}}, r"'not' at '#/items'"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": 'root ::= "a" b'}, "there is no rule 'b'"),
        ({"json": "{"}, "line 1 column 2"),
    ],
)
def test_what_cannot_be_served_is_refused_before_generation(llm, constraint, message):
    before = llm.engine.stats().num_steps
    with pytest.raises(RequestError, match=message):
        generate(llm, "x", params(**constraint))
    assert llm.engine.stats().num_steps == before


def test_ignore_eos_is_refused_by_name(llm):
    with pytest.raises(RequestError, match="ignore_eos"):
        generate(llm, "x", params(choice=["a"], ignore_eos=True))


def test_settings_at_start(folder, monkeypatch):
    with pytest.raises(ConfigError, match="disable_additional_properties"):
        LLM(folder, **SETTINGS | {"structured_outputs_config": {
            "backend": "xgrammar", "disable_additional_properties": True}})  # fmt: skip
    from headrace_engine.structured import backend_loading

    monkeypatch.setattr(backend_loading, "is_installed", lambda backend: False)
    with pytest.raises(MissingDependency, match="pip install"):
        LLM(folder, **SETTINGS | {"structured_outputs_config": {"backend": "outlines"}})


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "outlines", "lm-format-enforcer"])
def test_the_same_schema_on_every_backend(folder, bias, backend):
    pytest.importorskip({"guidance": "llguidance", "outlines": "outlines_core",
                         "lm-format-enforcer": "lmformatenforcer"}.get(backend, backend))  # fmt: skip
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"type": "string", "enum": ["a", "b"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    config = {"backend": backend, "disable_fallback": True, "compile_processes": 1}
    with LLM(folder, **SETTINGS | {"structured_outputs_config": config}) as other:
        wanted = [params(seed, bias=bias, json=schema, max_tokens=120) for seed in range(12)]
        wanted += [params(seed, bias=bias, choice=CHOICES[:2]) for seed in range(6)]
        outputs = texts(generate(other, ["x"] * 18, wanted))
        with pytest.raises(UnsupportedFeature, match="'not' at '#/items'"):
            generate(other, "x", params(json={"type": "array", "items": {"not": {}}}))
    finished = [text for reason, text in outputs[:12] if reason == "stop"]
    assert len(finished) > 3
    assert all(valid(schema, json.loads(text)) for text in finished)
    assert all(text in CHOICES for _, text in outputs[12:])


def test_the_constraint_begins_where_the_reasoning_ends(folder, llm):
    pytest.importorskip("headrace_server")
    ids = {text: llm.get_tokenizer().encode(text)[0] for text in ("</think>", "<think>")}
    config = SETTINGS["structured_outputs_config"] | {"reasoning_parser": "qwen3"}
    with LLM(folder, **SETTINGS | {"structured_outputs_config": config}) as other:
        wanted = [
            params(seed, bias={ids["</think>"]: 8.0, EOS: 4.0}, regex="[0-9]{3}", max_tokens=120,
                   skip_special_tokens=False)
            for seed in range(12)
        ]  # fmt: skip
        reasoned = texts(generate(other, ["think<think>"] * 12, wanted))
        done = texts(generate(other, ["no<think></think>"] * 12, wanted))
    ended = [text for reason, text in reasoned if reason == "stop" and "</think>" in text]
    assert len(ended) > 5
    assert any(not re.match("[0-9]*</think>", text) for text in ended)
    for text in ended:
        assert re.fullmatch("[0-9]{3}</s>", text.split("</think>", 1)[1]), text
    assert all(re.fullmatch("[0-9]{3}</s>", text) for _, text in done)


async def test_a_compiling_constraint_blocks_nobody(folder):
    """A compilation of seconds, ended by its limit: free and known requests do not wait for it."""
    pytest.importorskip("outlines_core")
    config = {"backend": "outlines", "disable_fallback": True, "compile_seconds": 10.0,
              "compile_processes": 1}  # fmt: skip
    args = EngineArgs(model=folder, **SETTINGS | {"structured_outputs_config": config})
    engine = AsyncLLM.from_engine_args(args)

    async def run(name, wanted):
        async for output in engine.generate("x", wanted, name):
            last = output
        return last.outputs[0].text

    try:
        assert await run("known", params(choice=["yes"])) == "yes"
        slow = asyncio.create_task(run("slow", params(regex="[ab]*a[ab]{24}")))
        for i in range(5):
            await run(f"free {i}", params(i, max_tokens=5))
            assert await run(f"again {i}", params(i, choice=["yes"])) == "yes"
        assert not slow.done(), "they waited for it"
        with pytest.raises(RequestError, match=r"within 10 s|memory"):
            await slow
        assert await run("after", params(choice=["no"])) == "no"
    finally:
        await engine.shutdown()


def test_outputs_of_the_corpus_validate_or_the_schema_is_refused(llm, bias):
    """Schemas in the manner of the public test suite, function calls and pydantic's: all that is
    served is enforced."""
    cases = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    assert len(cases) >= 300
    served, wanted, refusals = [], [], {}
    for index, case in enumerate(cases):
        try:
            made = [params(1000 * index + seed, bias=bias, json=json.dumps(case["schema"]),
                           max_tokens=100) for seed in range(2)]  # fmt: skip
            llm.engine._front.input_processor.admit(made[0])
        except RequestError as error:
            refusals[case["name"]] = str(error)
            continue
        served += [case] * 2
        wanted += made
    outputs = texts(generate(llm, ["x"] * len(wanted), wanted))
    finished = 0
    for case, (reason, text) in zip(served, outputs):
        assert reason in ("stop", "length"), case["name"]
        if reason == "stop":
            finished += 1
            assert valid(case["schema"], json.loads(text)), (case["name"], text)
    assert len(refusals) + len(served) // 2 == len(cases)
    assert len(refusals) < 0.25 * len(cases)
    assert not [r for r in refusals.items() if " at '#" not in r[1] and "no text" not in r[1]]
    assert finished > 0.6 * len(outputs)
    assert valid(PERSON, {"name": "a", "age": 3}), "the oracle itself"


def test_schema_check_says_what_each_backend_supports(tmp_path, capsys):
    from headrace.cli.main import run

    def check(name, text, *words):
        (tmp_path / name).write_text(text)
        status = run("schema", ["check", str(tmp_path / name), *words])
        return status, capsys.readouterr()

    status, said = check("good.json", json.dumps(PERSON), "--backend", "llguidance")
    assert status == 0
    assert re.search(r"guidance +yes", said.out)
    status, said = check("bad.json", '{"items": {"not": {}}}', "--backend", "guidance", "outlines")
    assert status == 1
    assert said.out.count("'not' at '#/items'") == 2
    status, said = check("zip.regex", "[0-9]{5}\n", "--backend", "guidance", "--json")
    assert status == 0
    assert json.loads(said.out)[0]["supported"] is True
    assert check("some.ebnf", 'root ::= "a" b', "--backend", "guidance")[0] == 1
    status, said = check("broken.json", "{")
    assert status == 2
    assert "line 1 column 2" in said.err
    status, said = check("odd.txt", "a")
    assert status == 2
    assert "--kind" in said.err
