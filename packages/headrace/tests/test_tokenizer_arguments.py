"""Every argument and name of transformers' tokenizers: equal to it, or refused by name."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from test_model_tokenizer import CHAT, KINDS, TEXTS, TOOL, opened, write

from headrace.tokenizer import ModelTokenizer
from headrace_core.errors import HeadraceError, RequestError, UnsupportedFeature

GENERATION = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if extra is defined %}{{ extra }}{% endif %}"
)
TURNS = [
    *CHAT,
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Hi."},
]
WORDS = ["The", "quick", "fox", "isn't"]


@pytest.fixture(scope="module", params=list(KINDS))
def both(request: Any, tmp_path_factory: Any) -> tuple[ModelTokenizer, Any]:
    from transformers import AutoTokenizer

    folder = write(tmp_path_factory.mktemp(request.param), request.param)
    ours, theirs = opened(folder), AutoTokenizer.from_pretrained(folder)
    ours.model_max_length = theirs.model_max_length = 10
    if ours.pad_token is None:
        ours.pad_token = theirs.pad_token = "<unk>"
    return ours, theirs


def plain(value: Any) -> Any:
    if hasattr(value, "items"):
        return {name: plain(one) for name, one in value.items()}
    if hasattr(value, "tolist"):
        return ("array", value.dtype, value.tolist())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


# Argument -> calls, each with other arguments beside it.
SHARED: dict[str, list[dict[str, Any]]] = {
    "add_special_tokens": [{"add_special_tokens": False}],
    "padding": [{"padding": True}, {"padding": "max_length", "truncation": True}],
    "truncation": [
        {"truncation": True}, {"truncation": "only_first", "max_length": 9},
        {"truncation": "longest_first", "max_length": 5}, {"truncation": "do_not_truncate"},
    ],
    "max_length": [{"max_length": 6}, {"max_length": 5, "truncation": True}],
    "stride": [{"stride": 2, "truncation": True, "return_overflowing_tokens": True}],
    "padding_side": [{"padding": "max_length", "padding_side": side} for side in ("left", "right")],
    "return_tensors": [{"return_tensors": kind, "padding": True} for kind in ("np", "pt")],
}  # fmt: skip
CALL: dict[str, list[dict[str, Any]]] = {
    **SHARED,
    "text": [{"text": "Hello world"}, {"text": TEXTS}],
    "text_pair": [
        {"text": "Hello world", "text_pair": "a dog", **more}
        for more in (
            {}, {"truncation": True, "max_length": 6},
            {"truncation": "only_second", "max_length": 7, "return_overflowing_tokens": True},
            {"truncation": True, "max_length": 7, "stride": 1, "return_overflowing_tokens": True},
            {"return_offsets_mapping": True, "return_special_tokens_mask": True},
        )
    ] + [{"text_pair": TEXTS[::-1]}, {"text": "Hello", "text_pair": ""}],
    "text_target": [{"text_target": "A fox"}, {"text": None, "text_target": TEXTS},
                    {"text_target": TEXTS, "padding": True, "return_tensors": "np"}],
    "text_pair_target": [{"text_target": "A fox", "text_pair_target": "a dog"}],
    "is_split_into_words": [
        {"text": WORDS, "is_split_into_words": True, "truncation": True},
        {"text": [WORDS, WORDS[:1]], "is_split_into_words": True, "return_offsets_mapping": True},
        {"text": WORDS, "text_pair": WORDS[:2], "is_split_into_words": True},
    ],
    "pad_to_multiple_of": [{"padding": True, "pad_to_multiple_of": 8}],
    "return_token_type_ids": [{"return_token_type_ids": True}, {"return_token_type_ids": False}],
    "return_attention_mask": [{"return_attention_mask": False}],
    "return_overflowing_tokens": [
        {"return_overflowing_tokens": True, "truncation": True, "padding": True},
        {"text": " ".join(TEXTS), "return_overflowing_tokens": True, "max_length": 9},
        {"return_overflowing_tokens": True, "truncation": True, "stride": 3,
         "return_offsets_mapping": True},
    ],
    "return_special_tokens_mask": [
        {"return_special_tokens_mask": True}, {"return_special_tokens_mask": True, "padding": True},
        {"return_special_tokens_mask": True, "truncation": True, "max_length": 5},
    ],
    "return_offsets_mapping": [
        {"return_offsets_mapping": True}, {"return_offsets_mapping": True, "padding": True},
        {"return_offsets_mapping": True, "return_tensors": "np", "padding": True},
    ],
    "return_length": [{"return_length": True}, {"return_length": True, "text": "Hello"},
                      {"return_length": True, "padding": True, "return_tensors": "pt"}],
    "verbose": [{"verbose": False}],
    "tokenizer_kwargs": [{"tokenizer_kwargs": {"padding": True, "return_length": True}}],
}  # fmt: skip
CHATS: dict[str, list[dict[str, Any]]] = {
    "conversation": [{}, {"conversation": [TURNS, CHAT]}],
    "tools": [{"tools": [TOOL], "tokenize": False}],
    "documents": [{"documents": [{"title": "a", "text": "b"}]}],
    "chat_template": [{"chat_template": GENERATION}, {"chat_template": "{{ messages[0].content }}"}],
    "add_generation_prompt": [{"add_generation_prompt": True}],
    "continue_final_message": [{"continue_final_message": True}],
    "tokenize": [{"tokenize": False}],
    "sanitize_control_tokens": [{"sanitize_control_tokens": False}],
    "padding": [{"conversation": [TURNS, CHAT], "padding": True}],
    "truncation": [{"truncation": True}],
    "max_length": [{"truncation": True, "max_length": 6}],
    "return_tensors": [{"return_tensors": "np"}, {"return_tensors": "pt"}],
    "return_dict": [{"return_dict": False}],
    "return_assistant_tokens_mask": [
        {"return_assistant_tokens_mask": True, "chat_template": GENERATION, **more}
        for more in (
            {}, {"conversation": [TURNS, CHAT]}, {"return_tensors": "np"},
            {"conversation": [TURNS, CHAT], "padding": True, "return_tensors": "pt"},
            {"conversation": [TURNS, CHAT[:2]], "padding": "max_length", "max_length": 150},
            {"extra": "more"}, {"tokenizer_kwargs": {"return_offsets_mapping": True}},
        )
    ],
    "tokenizer_kwargs": [
        {"tokenizer_kwargs": {"return_offsets_mapping": True, "return_length": True}},
        {"tokenizer_kwargs": {"return_special_tokens_mask": True}},
        {"tokenizer_kwargs": {"pad_to_multiple_of": 8}, "padding": True},
        {"tokenizer_kwargs": {"return_attention_mask": False, "padding_side": "left"},
         "conversation": [TURNS, CHAT], "padding": True},
        {"tokenizer_kwargs": {"stride": 2, "return_overflowing_tokens": True}, "truncation": True},
    ],
}  # fmt: skip
IDS = [5, 9, 3, 1]
DECODE: dict[str, list[dict[str, Any]]] = {
    "token_ids": [{"token_ids": IDS}, {"token_ids": [IDS, IDS[:2]]}],
    "skip_special_tokens": [{"token_ids": IDS, "skip_special_tokens": True}],
    "clean_up_tokenization_spaces": [
        {"token_ids": IDS, "clean_up_tokenization_spaces": flag} for flag in (True, False)
    ],
}
PADS: dict[str, list[dict[str, Any]]] = {
    "encoded_inputs": [{}],
    "padding": [{"padding": False}, {"padding": "max_length"}],
    "max_length": [{"padding": "max_length", "max_length": 30}, {"max_length": 2}],
    "pad_to_multiple_of": [{"pad_to_multiple_of": 8}],
    "padding_side": [{"padding_side": "left"}, {"padding_side": "right"}],
    "return_attention_mask": [{"return_attention_mask": True}, {"return_attention_mask": False}],
    "return_tensors": [{"return_tensors": "np"}, {"return_tensors": "pt"}],
    "verbose": [{"verbose": False}],
}
TOKENIZE: dict[str, list[dict[str, Any]]] = {
    "text": [{}], "pair": [{"pair": "a dog"}], "add_special_tokens": [{"add_special_tokens": True}],
}  # fmt: skip
WALKED: dict[str, tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]] = {
    "__call__": (CALL, {"text": TEXTS}),
    "encode": ({**SHARED, "text": [{}], "text_pair": CALL["text_pair"][:2]}, {"text": TEXTS[4]}),
    "decode": (DECODE, {}),
    "batch_decode": (
        {("sequences" if name == "token_ids" else name): [
            {("sequences" if k == "token_ids" else k): v for k, v in case.items()} for case in cases]
         for name, cases in DECODE.items()}, {},
    ),
    "apply_chat_template": (CHATS, {"conversation": TURNS, "sanitize_control_tokens": False}),
    "tokenize": (TOKENIZE, {"text": TEXTS[3]}),
}  # fmt: skip


@pytest.mark.parametrize("method", [*WALKED, "pad"])
def test_each_argument_of_transformers_is_there_and_in_its_place(method: str) -> None:
    from transformers import PreTrainedTokenizerFast

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    theirs = [
        name
        for name, found in inspect.signature(
            getattr(PreTrainedTokenizerFast, method)
        ).parameters.items()
        if found.kind is positional
    ]
    ours = inspect.signature(getattr(ModelTokenizer, method)).parameters
    here = [name for name, found in ours.items() if found.kind is positional]
    assert here[: len(theirs)] == theirs
    cases = PADS if method == "pad" else WALKED[method][0]
    assert set(theirs) - {"self"} <= set(cases), "arguments that no case covers"


@pytest.mark.parametrize("method", WALKED)
def test_each_argument_does_what_it_does_in_transformers(
    both: tuple[ModelTokenizer, Any], method: str
) -> None:
    ours, theirs = both
    cases, common = WALKED[method]
    for name, calls in cases.items():
        for call in calls:
            given = {**common, **call}
            try:
                want = getattr(theirs, method)(**given)
            except BaseException:  # the library panics where a text is too short to cut
                with pytest.raises(RequestError):
                    getattr(ours, method)(**copy.deepcopy(given))
                continue
            got = getattr(ours, method)(**given)
            assert plain(got) == plain(want), (name, given)


@pytest.mark.parametrize("kind", ["lists", "one", "columns", "np", "pt"])
def test_filling_up_what_was_tokenized(both: tuple[ModelTokenizer, Any], kind: str) -> None:
    ours, theirs = both
    made: Any = [dict(theirs(text)) for text in TEXTS]
    if kind == "one":
        made = made[0]
    elif kind == "columns":
        made = {**theirs(TEXTS, return_special_tokens_mask=True, return_token_type_ids=True),
                "labels": list(range(len(TEXTS)))}  # fmt: skip
    elif kind in ("np", "pt"):
        made = [
            {n: v[0] for n, v in theirs(text, return_tensors=kind).items()} for text in TEXTS[3:]
        ]
    for calls in PADS.values():
        for call in calls:
            given = copy.deepcopy(made)
            try:
                want = theirs.pad(copy.deepcopy(made), **call)
            except ValueError:
                want = None
            ragged = kind == "np" and any(len({*map(len, v)}) > 1 for v in (want or {}).values())
            if want is None or ragged:
                with pytest.raises(RequestError, match=r"different lengths|multiple"):
                    ours.pad(given, **call)
                continue
            assert plain(ours.pad(given, **call)) == plain(want), call
            assert plain(given) == plain(made), "the arguments were changed"
    for flag in (None, True, False):
        want = theirs.pad({"input_ids": []}, return_attention_mask=flag)
        assert dict(ours.pad({"input_ids": []}, return_attention_mask=flag)) == dict(want)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_files_make_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "a").mkdir()
    ours = opened(write(tmp_path / "a", kind))
    ours.pad_token, ours.padding_side = ours.all_special_tokens[0], "left"
    ours.model_max_length = 9
    ours.chat_template = GENERATION
    files = ours.save_pretrained(tmp_path / "b" / "c")
    assert all(Path(file).is_file() for file in files)
    again = AutoTokenizer.from_pretrained(tmp_path / "b" / "c")
    for made in (again, opened(tmp_path / "b" / "c")):
        assert plain(made(TEXTS, padding=True)) == plain(ours(TEXTS, padding=True))
        assert made.decode(IDS) == ours.decode(IDS)
        for name in ("pad_token", "padding_side", "model_max_length", "eos_token_id",
                     "chat_template"):  # fmt: skip
            assert getattr(made, name) == getattr(ours, name), name
        assert sorted(made.all_special_ids) == sorted(ours.all_special_ids)
    for given in ({"push_to_hub": True}, {"legacy_format": True}, {"token": "x"}):
        with pytest.raises(UnsupportedFeature, match=f"^{next(iter(given))} = .*not built"):
            ours.save_pretrained(tmp_path / "d", **given)


def test_the_template_that_was_set(tmp_path: Path) -> None:
    ours = opened(write(tmp_path, "bpe"))
    whole = ours.apply_chat_template(CHAT, tokenize=False)
    ours.chat_template = "{{ messages[0].content }}"
    for tokenizer in (ours, pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, tools=[TOOL]) == "Be brief."
        assert tokenizer.get_chat_template() == tokenizer.chat_template
    ours.chat_template = None
    with pytest.raises(RequestError, match="chat_template: the checkpoint has none; pass one"):
        ours.apply_chat_template(CHAT)
    assert whole == opened(tmp_path).apply_chat_template(CHAT, tokenize=False)


def test_names_that_training_loops_read(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    for name in (
        "added_tokens_decoder", "added_tokens_encoder", "vocab_size", "is_fast", "pad_token_id",
        "pad_token_type_id", "model_max_length", "max_len_single_sentence", "name_or_path",
        "max_len_sentences_pair", "clean_up_tokenization_spaces", "extra_special_tokens",
        "special_tokens_map", "all_special_ids", "add_bos_token", "add_eos_token",
    ):  # fmt: skip
        if name == "name_or_path":
            assert getattr(ours, name)
        elif name == "added_tokens_decoder":
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert [*mine] == [*other]
            assert {i: t.__getstate__() for i, t in mine.items()} == {
                i: t.__getstate__() for i, t in other.items()
            }
        else:
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.backend_tokenizer.to_str() == ours._backend.to_str()
    assert ours.backend_tokenizer is not ours._backend
    assert "chat_template" in ours.init_kwargs
    for pair in (False, True):
        assert ours.num_special_tokens_to_add(pair) == theirs.num_special_tokens_to_add(pair)
    first, second = (theirs.encode(text, add_special_tokens=False) for text in ("Hello", "a dog"))
    assert ours.build_inputs_with_special_tokens(first) == theirs.encode("Hello")
    assert ours.build_inputs_with_special_tokens(first, second) == theirs.encode("Hello", "a dog")
    one = theirs("Hello", return_special_tokens_mask=True)
    assert ours.get_special_tokens_mask(first) == one["special_tokens_mask"]
    assert ours.get_special_tokens_mask(one["input_ids"], already_has_special_tokens=True) == (
        theirs.get_special_tokens_mask(one["input_ids"], already_has_special_tokens=True)
    )
    assert ours.clean_up_tokenization("it 's .") == theirs.clean_up_tokenization("it 's .")
    assert plain(ours.encode_plus("Hello", "a dog")) == plain(theirs("Hello", "a dog"))
    assert plain(ours.batch_encode_plus(TEXTS, padding=True)) == plain(theirs(TEXTS, padding=True))
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    assert plain(ours.batch_encode_plus(pairs)) == plain(theirs(TEXTS, TEXTS[::-1]))


def test_every_public_name_of_transformers_is_there_or_says_why(
    both: tuple[ModelTokenizer, Any],
) -> None:
    ours, theirs = both
    for name in dir(theirs):
        if name.startswith("_") or hasattr(ours, name):
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(ours, name)
        assert f"transformers.AutoTokenizer.from_pretrained({ours.name_or_path!r})" in str(
            caught.value
        )


def test_tokens_that_are_added(tmp_path: Path) -> None:
    ours = opened(write(tmp_path, "bpe"))
    for token in ("</s>", "<|user|>", ours.added_tokens_decoder[3]):
        assert ours.add_special_tokens({"pad_token": token}) == 0
        assert ours.pad_token == str(getattr(token, "content", token))
    assert ours.add_tokens(["<s>", "Hello"[:1]]) == 0
    assert ours.add_special_tokens({"additional_special_tokens": ["<|user|>"]}) == 0
    ours.pad_token_id = ours.eos_token_id
    assert ours.pad_token == ours.eos_token == "</s>"
    ours.eos_token, ours.eos_token_id = "</s>", 1
    ours.pad_token = None
    assert ours.pad_token_id is None
    assert "pad_token" not in ours.special_tokens_map
    elsewhere = r"use transformers\.AutoTokenizer\.from_pretrained\("
    for call in (
        lambda: ours.add_tokens("[new]"), lambda: ours.add_tokens(["<s>", "[new]"]),
        lambda: ours.add_special_tokens({"pad_token": "[PAD]"}),
        lambda: ours.add_special_tokens({"additional_special_tokens": ["<tool call>"]}),
    ):  # fmt: skip
        with pytest.raises(UnsupportedFeature, match=f"^new_tokens: .*{elsewhere}"):
            call()
    for name, value in (("eos_token", "<s>"), ("bos_token_id", 1), ("add_bos_token", True),
                        ("split_special_tokens", True)):  # fmt: skip
        with pytest.raises(AttributeError, match=f"^{name.removesuffix('_id')} = .*{elsewhere}"):
            setattr(ours, name, value)
    for value in (10**6, "</s>", -1):
        with pytest.raises(RequestError, match=r"pad_token_id = |ids\[0\] = "):
            ours.pad_token_id = value


def test_the_mask_where_it_cannot_be_right(tmp_path: Path) -> None:
    ours = opened(write(tmp_path, "bpe"))
    with pytest.raises(RequestError, match=r"needs a chat template that marks .*{% generation %}"):
        ours.apply_chat_template(CHAT, return_assistant_tokens_mask=True)
    marked = {"chat_template": GENERATION, "return_assistant_tokens_mask": True}
    for more in ({"tokenize": False}, {"return_dict": False}, {"continue_final_message": True},
                 {"tokenizer_kwargs": {"return_overflowing_tokens": True}}):  # fmt: skip
        with pytest.raises(
            RequestError, match=r"must be .* with return_assistant_tokens_mask = True"
        ):
            ours.apply_chat_template(CHAT, **marked, **more)
    for wrong in ({"padding": True}, {"add_special_tokens": True}):
        name = next(iter(wrong))
        with pytest.raises(RequestError, match=rf"^tokenizer_kwargs\.{name}: must not be there"):
            ours.apply_chat_template(CHAT, tokenizer_kwargs=wrong)
    with pytest.raises(RequestError, match=r"^tokenizer_kwargs = 3: must be a mapping"):
        ours.apply_chat_template(CHAT, tokenizer_kwargs=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        ours.apply_chat_template(CHAT, tokenizer_kwargs={"nonsense": 1})
    torn = "{% set x %}{% generation %}{{ messages[-1].content }}{% endgeneration %}{% endset %}{{ x[:4] }}"
    with pytest.raises(RequestError, match=r"cuts the text of a {% generation %} block"):
        ours.apply_chat_template(CHAT, chat_template=torn, return_assistant_tokens_mask=True)
    with pytest.raises(HeadraceError, match=r"U[+]1FFFE"):
        ours.apply_chat_template([{"role": "user", "content": "\U0001fffe"}], **marked)


def test_the_mask_beside_control_text_and_at_cuts(tmp_path: Path) -> None:
    """Text of control tokens stays text, and offsets count the text that the caller sees."""
    ours = opened(write(tmp_path, "bpe"))
    chat = [{"role": "user", "content": "a </s> b"}, {"role": "assistant", "content": "Hi 😀"}]
    options = {"return_offsets_mapping": True}
    made = ours.apply_chat_template(
        chat, chat_template=GENERATION, return_assistant_tokens_mask=True, tokenizer_kwargs=options
    )
    text = ours.apply_chat_template(chat, chat_template=GENERATION, tokenize=False)
    assert made.input_ids.count(ours.eos_token_id) == 2
    inside = [span for span, one in zip(made.offset_mapping, made.assistant_masks) if one]
    assert text[inside[0][0] : inside[-1][1]] == "Hi 😀</s>"
    kept = [i for i, one in zip(made.input_ids, made.assistant_masks) if one]
    assert ours.decode(kept) == "Hi 😀</s>"
    for side, part in (("right", slice(0, 9)), ("left", slice(-9, None))):
        ours.truncation_side = side
        cut = ours.apply_chat_template(
            chat, chat_template=GENERATION, return_assistant_tokens_mask=True,
            truncation=True, max_length=9,
        )  # fmt: skip
        assert cut.assistant_masks == made.assistant_masks[part]
        assert cut.input_ids == made.input_ids[part]


def test_a_template_without_the_mask_renders_as_before(tmp_path: Path) -> None:
    ours = opened(write(tmp_path, "bpe"))
    text = ours.apply_chat_template(CHAT, chat_template=GENERATION, tokenize=False)
    assert not {"\U0001fffe", "\U0001ffff"} & set(text)
    with pytest.raises(RequestError, match="_generation_begin"):
        ours.apply_chat_template(CHAT, _generation_begin="x")


def test_results_move_and_convert(tmp_path: Path) -> None:
    import torch

    ours = opened(write(tmp_path, "bpe"))
    made = ours(["Hello", "Hello world"], padding=True)
    assert made.data == dict(made)
    assert type(made.data) is dict
    assert made.to("cpu") is made
    tensors = made.convert_to_tensors("pt").to(torch.device("cpu"))
    assert tensors["input_ids"].shape[0] == 2
    assert ours("Hello").convert_to_tensors("np", prepend_batch_axis=True).input_ids.ndim == 2
