"""A request's constraint in the worker: end tokens, replay, and the text that it waits for."""

import random

import numpy as np
import pytest

from headrace_core.errors import UnsupportedFeature
from headrace_core.grammar import Constraint, GrammarSpec, Vocabulary
from headrace_engine.structured import reasoning
from headrace_engine.structured.matching import ConstraintMaker, fill_masks
from headrace_engine.structured.spelling import spell
from headrace_engine.structured.store import GrammarStore
from headrace_testing.engine.grammars import BYTES, bits

END, THINK_END = 256, 257
TOKENS = [*BYTES, b"</s>", b"</think>", b">\n", b">{", b"x</think>a", b"</th", b"ink>", b"ab"]
VOCABULARY = Vocabulary(TOKENS, frozenset({END, THINK_END}))


@pytest.fixture(scope="module")
def store():
    made = GrammarStore(lambda: VOCABULARY, 1 << 26)
    yield made
    made.close()


def make(store, regex, output=(), start_after="", may_begin_with=""):
    spec = GrammarSpec("guidance", "regex", regex)
    return ConstraintMaker(store).make(
        Constraint(spec, (END,), start_after, may_begin_with), list(output)
    )


def mask(constraint):
    """The tokens that may be next; None: any that is not banned."""
    fill_masks([constraint])
    return None if constraint.words is None else bits(constraint.words)


def banned(constraint):
    fill_masks([constraint])
    return set(constraint.banned)


def test_end_tokens_are_possible_where_the_output_is_complete_and_only_there(store):
    constraint = make(store, "ab?")
    assert mask(constraint) == [ord("a"), TOKENS.index(b"ab")]
    constraint.observe(ord("a"))
    assert mask(constraint) == [ord("b"), END]
    constraint.observe(ord("b"))
    assert mask(constraint) == [END]
    constraint.observe(END)
    assert mask(constraint) is None, "a step may be under way already: anything goes"


def test_several_end_tokens(store):
    spec = GrammarSpec("guidance", "regex", "a")
    constraint = ConstraintMaker(store).make(Constraint(spec, (END, 300, THINK_END)), [97])
    assert mask(constraint) == [END, THINK_END]


def test_a_resumed_request_continues_where_it_was(store):
    fresh = make(store, "(ab|cd)+")
    for token in b"abcda":
        fresh.observe(token)
    assert mask(make(store, "(ab|cd)+", b"abcda")) == mask(fresh) == [ord("b")]


def test_a_token_that_the_mask_forbade_leaves_nothing(store, caplog):
    constraint = make(store, "ab")
    constraint.observe(ord("z"))
    assert mask(constraint) == []
    assert "which its mask allowed" in caplog.text


def test_rows_of_one_step(store):
    constraints = [make(store, regex) for regex in ("a", "b", "[cd]")] + [make(store, "a", b"a")]
    fill_masks(constraints)
    found = [bits(c.words) for c in constraints]
    assert found == [[97], [98], [99, 100], [END]]


@pytest.mark.parametrize(
    "spelling",
    [
        [THINK_END],
        list(b"</think>"),
        [TOKENS.index(b"</th"), TOKENS.index(b"ink>")],
        [*b"</thi</think>"],
    ],
)
def test_the_constraint_begins_behind_the_marker(store, spelling):
    constraint = make(store, "[0-9]{2}", start_after="</think>")
    assert mask(constraint) is None
    assert banned(constraint) >= {END}
    for token in [*b"any reasoning < / > ", *spelling]:
        constraint.observe(token)
    assert mask(constraint) == list(b"0123456789")
    for token in b"42":
        constraint.observe(token)
    assert mask(constraint) == [END]


def test_text_behind_the_marker_in_the_same_token_counts(store):
    constraint = make(store, "\\{[0-9]\\}", start_after="</think>")
    for token in b"so </think":
        constraint.observe(token)
    wrong = TOKENS.index(b">\n")  # the grammar does not allow the line end
    assert banned(constraint) == {wrong, END, TOKENS.index(b"x</think>a")}
    constraint.observe(TOKENS.index(b">{"))
    assert mask(constraint) == list(b"0123456789")


def test_a_token_that_holds_the_whole_marker(store):
    assert TOKENS.index(b"x</think>a") in banned(make(store, "[0-9]", start_after="</think>"))
    constraint = make(store, "ab", start_after="</think>")
    constraint.observe(TOKENS.index(b"x</think>a"))
    assert mask(constraint) == [ord("b")]


def test_a_model_that_would_end_in_its_reasoning_closes_it_instead(store):
    """Else a forced call, say, would never come."""
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from headrace_engine.sampling.masks import apply_constraints

    constraint = make(store, "[0-9]", b"so", start_after="</think>")
    assert END in banned(constraint)
    assert constraint.closes == THINK_END
    logits = torch.zeros(1, len(TOKENS))
    logits[0, END], logits[0, ord("x")] = 7.0, 3.0
    apply_constraints(
        logits, SimpleNamespace(rules=[(0, SimpleNamespace(constraint=constraint), None)])
    )
    assert logits[0].argmax() == THINK_END
    assert logits[0, END] == -torch.inf
    assert logits[0, ord("x")] == 3.0
    constraint.observe(THINK_END)
    assert mask(constraint) == list(b"0123456789")
    assert constraint.closes is None


def test_after_an_end_anything_goes(store):
    constraint = make(store, "[0-9]", start_after="</think>")
    constraint.observe(END)
    assert mask(constraint) is None
    assert not banned(constraint)


class Marked:
    start_marker = "<think>"
    end_marker = "</think>"
    begins_reasoning = False

    @classmethod
    def may_reason(cls, chat_template_kwargs):
        return True


class Begun(Marked):
    begins_reasoning = True


class Switched(Begun):
    @classmethod
    def may_reason(cls, chat_template_kwargs):
        return bool(chat_template_kwargs.get("thinking"))


class Unmarked:
    start_marker = ""
    end_marker = ""


@pytest.mark.parametrize(
    ("tail", "begins_answer", "expected"),
    [
        ("<|assistant|>", True, ("</think>", "<think>")),
        ("<|assistant|><think>\n", True, ("</think>", "")),
        ("<|assistant|><think>\n\n</think>\n\n", True, ("", "")),
        ("<think>old</think>answer<|user|>more<|assistant|>", True, ("</think>", "<think>")),
        ("<|assistant|><think>done</think>The ans", False, ("", "")),
        ("<|assistant|><think>done</think>The ans<think>", False, ("</think>", "")),
        ("<|assistant|><think>not done", False, ("</think>", "")),
        ("plain text", False, ("", "")),
    ],
)
def test_where_the_prompt_has_ended_the_reasoning(tail, begins_answer, expected):
    assert reasoning.start_of(Marked, tail, begins_answer=begins_answer) == expected
    assert reasoning.start_of(None, tail, begins_answer=begins_answer) == ("", "")
    begun = reasoning.start_of(Begun, tail, begins_answer=begins_answer)
    assert begun == (expected[0], ""), "the start mark may be missing"


def test_an_answer_that_does_not_reason_is_constrained_from_its_first_token(store):
    marks = {"start_after": "</think>", "may_begin_with": "<think>"}
    opening = spell(VOCABULARY, b"<think>")
    constraint = make(store, "[0-9]", **marks)
    assert set(mask(constraint)) == {*b"0123456789", opening[0]}
    constraint.observe(ord("7"))
    assert mask(constraint) == [END]
    thinks = make(store, "[0-9]", opening, **marks)
    assert mask(thinks) is None
    for token in spell(VOCABULARY, b"</think>"):
        thinks.observe(token)
    assert set(mask(thinks)) == set(b"0123456789")


@pytest.mark.parametrize(
    ("tail", "off"), [("<|a|>", ("", "")), ("<|a|><think>\n", ("</think>", ""))]
)
def test_where_the_template_has_switched_reasoning_off(tail, off):
    def start(**variables):
        return reasoning.start_of(
            Switched, tail, begins_answer=True, chat_template_kwargs=variables
        )

    assert start(thinking=True) == ("</think>", "")
    assert start(thinking=False) == start() == off


def test_white_space_may_stand_before_the_reasoning(store):
    marks = {"start_after": "</think>", "may_begin_with": "<think>"}
    opening = spell(VOCABULARY, b"<think>")
    constraint = make(store, r"\n{0,2}[0-9]", [ord("\n")], **marks)
    assert set(mask(constraint)) == {*b"0123456789", ord("\n"), opening[0]}
    for token in opening:
        constraint.observe(token)
    assert mask(constraint) is None
    decided = make(store, r"\n[0-9]\n", [ord("\n"), ord("7")], **marks)
    assert mask(decided) == [ord("\n")]


def test_what_may_be_either_stays_both_until_it_is_decided(store):
    marks = {"start_after": "</think>", "may_begin_with": "<think>"}
    opening = spell(VOCABULARY, b"<think>")
    constraint = make(store, "<[a-z]{2}", opening[:1], **marks)
    if len(opening) > 1:
        assert opening[1] in mask(constraint)
        constraint.observe(ord("a"))
        assert ord("b") in mask(constraint)


def test_a_format_without_an_end_is_refused():
    with pytest.raises(UnsupportedFeature, match="does not mark"):
        reasoning.start_of(Unmarked, "", begins_answer=True)


def test_grammars_are_kept_up_to_their_bytes():
    store = GrammarStore(lambda: VOCABULARY, 3000)
    try:
        for i in range(20):
            spec = GrammarSpec("guidance", "regex", f"a{{{i}}}")
            store.request(Constraint(spec, (END,), size_bytes=1000)).result(60)
        assert store.size_bytes <= 3000
        again = store.request(Constraint(spec, (END,), size_bytes=1000))
        assert again.done()
    finally:
        store.close()


def test_a_grammar_that_one_request_has_used_up_is_compiled_again_for_the_next(store):
    """Matchers of one grammar share a lexer's states, which a long output of one can exhaust."""
    regex = "([ab ]{0,300}a){0,300}"
    first = make(store, regex)
    chance = random.Random(1)
    while first.failure is None:
        fill_masks([first])
        if first.failure is None:
            first.observe(chance.choice(b"ab "))
    assert "lexer" in first.failure
    second = make(store, regex)
    assert mask(second) == [*b" ab", END, TOKENS.index(b"ab")]
    assert second.failure is None
    constraint = Constraint(GrammarSpec("guidance", "regex", regex), (END,))
    assert store.request(constraint) is store.request(constraint), "it is kept again"


def test_masks_are_applied_to_their_rows_only(store):
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from headrace_engine.sampling.masks import apply_constraints

    free, bound = make(store, "[ab]", b"a"), make(store, "b")
    free.observe(END)
    fill_masks([free, bound])
    logits = torch.arange(3 * len(TOKENS), dtype=torch.float32).reshape(3, -1)
    before = logits.clone()
    rules = [
        (0, SimpleNamespace(constraint=free), None),
        (2, SimpleNamespace(constraint=bound), None),
    ]
    apply_constraints(logits, SimpleNamespace(rules=rules))
    assert torch.equal(logits[:2], before[:2])
    assert np.flatnonzero(np.isfinite(logits[2].numpy())).tolist() == [ord("b")]
