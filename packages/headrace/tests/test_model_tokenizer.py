"""The tokenizer for scripts: equal to transformers' ``AutoTokenizer`` on the same files."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as cuts

from headrace.tokenizer import ModelTokenizer
from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.pooling import PoolingInfo
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.tokenizer import load_tokenizer
from headrace_testing.fakes.engine import fake_served_model

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world! How are you today?",
    "def f(x):\n    return x + 1\n\n it 's don 't they 're I 'm",
    "ünïcödé straße naïve 你好世界 привет мир 😀😀 numbers 1 22 333  two  spaces",
] * 3
TEXTS = [
    "Hello world", "", " ", "The quick <s> fox</s>", "你好 😀 naïve\n\n  two  spaces", "don 't stop .",
    "<|user|>tool <tool call> it 's",
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if extra is defined %}{{ extra }}{% endif %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello world"},
    {"role": "assistant", "content": "The quick fox"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "mask_token": "[MASK]"}  # fmt: skip
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def bpe() -> tuple[Tokenizer, dict[str, Any]]:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = cuts.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>", "<|user|>", "<pad>"],
            initial_alphabet=cuts.ByteLevel.alphabet(), show_progress=False,
        ),
    )  # fmt: skip
    made.add_tokens([AddedToken("<tool call>", normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return made, {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": {"__type": "AddedToken", "content": "<pad>"},
        "extra_special_tokens": ["<|user|>"], "padding_side": "left", "model_max_length": 12,
        "clean_up_tokenization_spaces": True,
    }  # fmt: skip


def llama() -> tuple[Tokenizer, dict[str, Any]]:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "<|user|>"]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=460, special_tokens=tokens, limit_alphabet=50, show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    named = ["input_ids", "attention_mask"]
    return made, {**LLAMA, "truncation_side": "left", "model_input_names": named}


def wordpiece() -> tuple[Tokenizer, dict[str, Any]]:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = cuts.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    return made, {
        **BERT, "tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16,
        "clean_up_tokenization_spaces": True,
    }  # fmt: skip


def unigram() -> tuple[Tokenizer, dict[str, Any]]:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = cuts.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=160, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
            show_progress=False,
        ),
    )  # fmt: skip
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return made, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


CONTEXT = 24
"""Longest context of the engine."""
KINDS = {"bpe": bpe, "llama": llama, "wordpiece": wordpiece, "unigram": unigram}


def write(folder: Path, kind: str) -> Path:
    backend, config = KINDS[kind]()
    whole = json.loads(backend.to_str())
    # Byte tokens are ordinary vocabulary, as in checkpoints.
    whole["added_tokens"] = [t for t in whole["added_tokens"] if not t["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config = {"chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path) -> ModelTokenizer:
    tokenizer = load_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    pooling = None
    if config.get("tokenizer_class") == "BertTokenizer":
        pooling = PoolingInfo(("embed",), "CLS", causal=False, token_types=True)
    model = fake_served_model(
        vocab_size=tokenizer.vocab_size,
        tokenizer_info=config,
        pooling=pooling,
        max_model_len=CONTEXT,
    )
    return ModelTokenizer(InputProcessor(tokenizer, model, prompt_templates="trusted"))


@pytest.fixture(scope="module", params=list(KINDS))
def both(request: Any, tmp_path_factory: Any) -> tuple[ModelTokenizer, Any]:
    from transformers import AutoTokenizer

    folder = write(tmp_path_factory.mktemp(request.param), request.param)
    return opened(folder), AutoTokenizer.from_pretrained(folder)


def test_the_vocabulary(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    assert ours.get_vocab() == ours.vocab == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    tokens = [*list(ours.get_vocab())[:40], "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_ids(tokens[0]) == theirs.convert_tokens_to_ids(tokens[0])
    ids = [*range(len(ours)), len(ours) + 5]
    for skip in (False, True):
        assert ours.convert_ids_to_tokens(ids, skip) == theirs.convert_ids_to_tokens(ids, skip)
    assert ours.convert_ids_to_tokens(3) == theirs.convert_ids_to_tokens(3)
    for text in TEXTS:
        tokens = theirs.tokenize(text)
        assert ours.tokenize(text) == tokens
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)


def test_special_tokens_and_what_the_files_say(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        for attribute in (f"{name}_token", f"{name}_token_id"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    for attribute in (
        "all_special_tokens", "all_special_ids", "special_tokens_map", "padding_side",
        "truncation_side", "chat_template", "is_fast",
    ):  # fmt: skip
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.model_max_length == min(theirs.model_max_length, CONTEXT)
    assert set(ours.model_input_names) == set(theirs.model_input_names)


def test_texts_to_ids(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    for text in TEXTS:
        for special in (True, False):
            given = {"add_special_tokens": special}
            assert ours.encode(text, **given) == theirs.encode(text, **given)
            assert dict(ours(text, **given)) == dict(theirs(text, **given))
            assert ours.encode(text, "a dog", **given) == theirs.encode(text, "a dog", **given)
            pair = {"return_token_type_ids": True, **given}
            assert dict(ours(text, "a dog", **pair)) == dict(theirs(text, "a dog", **pair))
    assert dict(ours(TEXTS)) == dict(theirs(TEXTS))
    assert ours(TEXTS[0]).input_ids == ours(TEXTS[0])["input_ids"]
    plain = {"return_attention_mask": False, "return_token_type_ids": False}
    assert dict(ours(TEXTS, TEXTS[::-1], **plain)) == dict(theirs(TEXTS, TEXTS[::-1], **plain))


def test_cutting_and_filling(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    theirs_at_most = {"truncation": True, "max_length": ours.model_max_length}
    assert dict(ours(TEXTS, truncation=True)) == dict(theirs(TEXTS, **theirs_at_most))
    long = " ".join(CORPUS)
    assert len(ours(long, truncation=True).input_ids) == ours.model_max_length <= CONTEXT
    for length in (2, 5, 9, 40):
        given: dict[str, Any] = {"truncation": True, "max_length": length}
        assert dict(ours(TEXTS, **given)) == dict(theirs(TEXTS, **given))
        assert ours.encode(TEXTS[4], max_length=length) == theirs.encode(
            TEXTS[4], max_length=length
        )
    if ours.pad_token is None:
        with pytest.raises(RequestError, match="no padding token; set one"):
            ours(TEXTS, padding=True)
        ours.pad_token = theirs.pad_token = ours.eos_token
    for given in (
        {"padding": True}, {"padding": "longest", "padding_side": "left"},
        {"padding": "max_length", "max_length": 40}, {"padding": True, "pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 7, "truncation": True, "padding_side": "right"},
    ):  # fmt: skip
        assert dict(ours(TEXTS, **given)) == dict(theirs(TEXTS, **given)), given
    for kind in ("pt", "np"):
        mine = ours(TEXTS, padding=True, return_tensors=kind)
        other = theirs(TEXTS, padding=True, return_tensors=kind)
        for name in other:
            assert mine[name].dtype == other[name].dtype
            assert (mine[name] == other[name]).all()
        assert ours.encode(TEXTS[0], return_tensors=kind).shape == (1, len(ours.encode(TEXTS[0])))


def test_ids_to_texts(both: tuple[ModelTokenizer, Any]) -> None:
    import torch

    ours, theirs = both
    every = [theirs.encode(text) for text in TEXTS]
    for ids in every:
        for skip in (False, True):
            want = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == want
            plain = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, **plain) == theirs.decode(ids, **plain)
    assert ours.decode(every) == ours.batch_decode(every) == theirs.batch_decode(every)
    assert ours.batch_decode(every, skip_special_tokens=True) == theirs.batch_decode(
        every, skip_special_tokens=True
    )
    assert ours.decode(every[0][-1]) == theirs.decode(every[0][-1])
    assert ours.decode(torch.tensor(every[0])) == theirs.decode(torch.tensor(every[0]))
    assert ours.decode([]) == theirs.decode([])


def test_ids_that_are_no_tokens(both: tuple[ModelTokenizer, Any]) -> None:
    """As transformers does: an id beyond the vocabulary has no text, and no number below 0 is an id."""
    ours, theirs = both
    beyond = [len(ours), len(ours) + 7, 2**32 - 1]
    for ids in (beyond, [3, *beyond], beyond[0]):
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    for wrong in (-1, [3, -1], 2**32, [2**40]):
        with pytest.raises(OverflowError):
            theirs.decode(wrong)
        with pytest.raises(RequestError, match=r"^token_ids\[\d\] = -?\d+: must be a token id"):
            ours.decode(wrong)
        with pytest.raises(RequestError, match=r"^ids\[\d\] = -?\d+: must be a token id"):
            ours.convert_ids_to_tokens(wrong)


def _pickled(tokenizer: ModelTokenizer) -> ModelTokenizer:
    made: ModelTokenizer = pickle.loads(pickle.dumps(tokenizer))
    return made


@pytest.mark.parametrize("how", [_pickled, copy.copy, copy.deepcopy])
def test_copies(both: tuple[ModelTokenizer, Any], how: Any) -> None:
    ours = copy.deepcopy(both[0])
    ours.pad_token, ours.padding_side = list(ours.get_vocab())[7], "left"
    made = how(ours)
    assert type(made) is ModelTokenizer
    assert (made.pad_token, made.padding_side) == (ours.pad_token, "left")
    for text in TEXTS:
        for special in (True, False):
            given = {"add_special_tokens": special}
            assert made.encode(text, **given) == ours.encode(text, **given)
            assert made.encode(text, "a dog", **given) == ours.encode(text, "a dog", **given)
        assert made.decode(made.encode(text)) == ours.decode(ours.encode(text))
    assert dict(made(TEXTS, padding=True)) == dict(ours(TEXTS, padding=True))
    for given in ({}, {"tokenize": False}, {"sanitize_control_tokens": False}):
        chat = made.apply_chat_template(CHAT, **given)
        assert chat == ours.apply_chat_template(CHAT, **given)
    for attribute in (
        "special_tokens_map", "all_special_ids", "model_max_length", "vocab", "model_input_names",
        "name_or_path", "chat_template", "special_token_ids",
    ):  # fmt: skip
        assert getattr(made, attribute) == getattr(ours, attribute), attribute
    made.padding_side = "right"
    assert ours.padding_side == "left"
    tokenized = ours("Hello")
    assert dict(how(tokenized)) == dict(tokenized) if how is not _pickled else True


def test_a_chat_beyond_the_context_comes_back_whole(both: tuple[ModelTokenizer, Any]) -> None:
    """As transformers does; ``LLM.chat`` refuses it."""
    ours, theirs = both
    long = [{"role": "user", "content": "Hello world " * 40}]
    want = theirs.apply_chat_template(long, return_dict=False)
    assert len(want) > CONTEXT
    for given in ({}, {"sanitize_control_tokens": False}):
        assert ours.apply_chat_template(long, return_dict=False, **given) == want
        cut = ours.apply_chat_template(long, return_dict=False, truncation=True, **given)
        assert len(cut) == ours.model_max_length
        with pytest.raises(PromptTooLong):
            ours.apply_chat_template([{"role": "user", "content": "Hello " * 99_999}], **given)


def test_chats(both: tuple[ModelTokenizer, Any]) -> None:
    ours, theirs = both
    for given in (
        {}, {"add_generation_prompt": True}, {"tools": [TOOL]}, {"extra": "more"},
        {"continue_final_message": True}, {"chat_template": "{{ messages[0].content }}"},
        {"truncation": True, "max_length": 6},
    ):  # fmt: skip
        for chat in (CHAT, [CHAT, CHAT[:2]]):
            got = ours.apply_chat_template(chat, **given)
            assert dict(got)["input_ids"] == theirs.apply_chat_template(chat, **given)["input_ids"]
            for how in ({"tokenize": False}, {"return_dict": False}):
                want = theirs.apply_chat_template(chat, **given, **how)
                assert ours.apply_chat_template(chat, **given, **how) == want
    one = ours.apply_chat_template(CHAT, return_tensors="np")
    assert one["input_ids"].shape[0] == 1
    assert ours.get_chat_template() == theirs.get_chat_template()
    if ours.eos_token is not None:
        sly = [{"role": "user", "content": f"Hello {ours.eos_token}"}]
        plain = theirs.apply_chat_template(sly, return_dict=False)
        open_door = {"sanitize_control_tokens": False, "return_dict": False}
        assert ours.apply_chat_template(sly, **open_door) == plain
        kept = ours.apply_chat_template(sly, return_dict=False)
        assert kept.count(ours.eos_token_id) == plain.count(ours.eos_token_id) - 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t(3), "text = 3: must be text or a list"),
        (lambda t: t(["a", None]), r"text\[1\] = None: must be text"),
        (lambda t: t.encode(["a"]), r"text = \['a'\]: must be text"),
        (lambda t: t("a", ["b"]), "text_pair"),
        (lambda t: t(["a", "b"], ["c"]), "text_pair: must hold a text for each of text, .* 2"),
        (lambda t: t("a", padding="both"), "padding = 'both': must be True"),
        (lambda t: t("a", padding=True, padding_side="top"), "padding_side = 'top': must be"),
        (lambda t: t("a", truncation="only_last"), "truncation = 'only_last': must be True"),
        (lambda t: t("a", truncation=True, max_length=0), "max_length = 0: must be at least 1"),
        (lambda t: t(["a", "The dog"], return_tensors="pt"), "different lengths.*padding=True"),
        (lambda t: t("a", return_tensors="tf"), "return_tensors = 'tf': must be 'pt', 'np'"),
        (lambda t: setattr(t, "pad_token", "[new]"), r"pad_token = '\[new\]': must be a token"),
        (lambda t: t.decode("abc"), "token_ids = 'abc': must be a token id, a list of them"),
        (lambda t: t.decode(b"abc"), "token_ids = b'abc': must be a token id, a list of them"),
        (lambda t: t.decode(None), "token_ids = None: must be a token id, a list of them"),
        (lambda t: t.decode(3.5), r"token_ids = 3.5: must be a token id, a list"),
        (lambda t: t.decode(["a", "b"]), r"token_ids\[0\] = 'a': must be a token id, an integer"),
        (lambda t: t.decode([3, None]), r"token_ids\[1\] = None: must be a token id, an integer"),
        (lambda t: t.decode([3, [4]]), r"token_ids\[1\] = \[4\]: must be a token id, an integer"),
        (lambda t: t.decode([[3], [4, "a"]]), r"token_ids\[1\]\[1\] = 'a': must be a token id"),
        (lambda t: t.decode([[3], "a"]), r"token_ids\[1\] = 'a': must be a token id, a list"),
        (lambda t: t.decode([[[3]]]), r"token_ids\[0\]\[0\] = \[3\]: must be a token id"),
        (lambda t: t.decode({"mask": [1]}), "token_ids = None: must be a token id"),
        (lambda t: t.batch_decode("abc"), "token_ids = 'abc': must be a token id"),
        (lambda t: t.batch_decode([["a"]]), r"token_ids\[0\]\[0\] = 'a': must be a token id"),
        (lambda t: t.encode("a\ud800"), "text: character 1 is half of a surrogate pair"),
        (lambda t: t("\ud800"), "text: character 0 is half of a surrogate pair"),
        (lambda t: t(["a", "\ud800"]), r"text\[1\]: character 0 is half of a surrogate pair"),
        (lambda t: t("a", "\ud800"), "text_pair: character 0 is half of a surrogate pair"),
        (lambda t: t.tokenize("\ud800"), "text: character 0 is half of a surrogate pair"),
        (lambda t: t.tokenize("a", 3), "pair = 3: must be text"),
        (lambda t: t.encode_pair("\ud800"), "first: character 0 is half of a surrogate pair"),
        (lambda t: t.encode_pair("a", 3), "second = 3: must be text"),
        (lambda t: t.convert_tokens_to_ids(3), "tokens = 3: must be a token's text, or a list"),
        (lambda t: t.convert_tokens_to_ids(["a", 3]), r"tokens\[1\] = 3: must be text"),
        (lambda t: t.convert_tokens_to_string(["\ud800"]), r"tokens\[0\]: character 0 is half of"),
        (lambda t: t.convert_ids_to_tokens("abc"), "ids = 'abc': must be a token id, or a list"),
        (lambda t: t.convert_ids_to_tokens(["a"]), r"ids\[0\] = 'a': must be a token id"),
        (lambda t: t.apply_chat_template([{"role": "user", "content": "\ud800"}]),
         "half of a surrogate pair"),
        (lambda t: t.apply_chat_template([{"role": "user", "content": "\ud800"}],
                                         sanitize_control_tokens=False), "half of a surrogate pair"),
        (lambda t: t("a", padding=True, pad_to_multiple_of=0), "pad_to_multiple_of = 0: must be at"),
        (lambda t: t("a", truncation=True, max_length="x"), "max_length = 'x': must be at least 1"),
        (lambda t: setattr(t, "pad_token", ["a"]), r"pad_token = \['a'\]: must be text"),
        (lambda t: t.apply_chat_template([]), r"conversation = \[\]: must be a list of messages"),
        (lambda t: t.apply_chat_template("Hi"), "conversation = 'Hi': must be a list"),
        (lambda t: t.apply_chat_template(CHAT, tools=[print]), r"tools = .*must be a list of JSON"),
        (lambda t: t.apply_chat_template(CHAT, chat_template="{{ raise_exception('no') }}"), "no"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(tmp_path: Path, call: Any, said: str) -> None:
    tokenizer = opened(write(tmp_path, "bpe"))
    with pytest.raises(RequestError, match=said):
        call(tokenizer)


def test_what_is_not_done_is_refused(tmp_path: Path) -> None:
    tokenizer = opened(write(tmp_path, "bpe"))
    with pytest.raises(UnsupportedFeature, match=r"^split_special_tokens = True: not built"):
        tokenizer("a", split_special_tokens=True)
    for call in (tokenizer, tokenizer.encode, tokenizer.tokenize, tokenizer.decode):
        with pytest.raises(
            TypeError, match=r"^ModelTokenizer\.\w+\(\) got an unexpected .*return_all"
        ):
            call("a", return_all=True)


def test_it_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    write(tmp_path, "bpe")
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "from test_model_tokenizer import opened\n"
        "t = opened(Path(sys.argv[1])); t.decode(t('Hello', padding=True).input_ids)\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "set()", done.stderr
