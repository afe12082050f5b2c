"""What Whisper's tokens mean, and what the family says of itself to a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.speech.model import AudioClip, SpeechToTextConfig, SupportsTranscription
from headrace_models.families.speech.whisper import WhisperForConditionalGeneration as Whisper
from headrace_models.families.speech.whisper_tokens import LANGUAGES, WhisperTokens
from headrace_testing.model.speech import AskedSpeech, TranscriptionConformance

NAMES = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|haw|>", "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
ENGLISH_ONLY = [
    name for name in NAMES if name not in ("<|en|>", "<|de|>", "<|haw|>", "<|translate|>",
    "<|transcribe|>")
]  # fmt: skip


def checkpoint(folder: Path, names: list[str] = NAMES) -> dict[str, int]:
    """A folder with a tokenizer trained here; ids by name."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(["glossary of names and other words"] * 3, trainer)
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: tokenizer.token_to_id(name) for name in names}


def info(folder: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "name": "m", "path": folder, "architecture": "WhisperForConditionalGeneration",
        "config": {"max_source_positions": 1500}, "generation_config": generation or {},
        "dtype": "float32", "max_model_len": 448, "vocab_size": 400, "eos_token_ids": (),
    }  # fmt: skip
    return ModelInfo(**{**values, **fields})


CLIP = AudioClip([0.0, 0.5], 16000)


def ask(model: ModelInfo, **asked: Any) -> list[int]:
    """The decoder's prompt."""
    values: dict[str, Any] = {
        "language": "de", "task_type": "transcribe", "request_prompt": "", "to_language": None,
    }  # fmt: skip
    config = SpeechToTextConfig()
    made = Whisper.get_generation_prompt(CLIP, model, config, **{**values, **asked})
    assert made["encoder_prompt"] == {
        "prompt": "", "multi_modal_data": {"audio": (CLIP.samples, 16000)}
    }  # fmt: skip
    ids = made["decoder_prompt"]
    assert isinstance(ids, list)
    return ids


class TestConformance(TranscriptionConformance):
    model = Whisper

    @pytest.fixture(params=[NAMES, ENGLISH_ONLY], ids=["multilingual", "English only"])
    def info(self, tmp_path: Path, request: Any) -> ModelInfo:
        checkpoint(tmp_path, request.param)
        return info(tmp_path)


def test_languages_are_those_of_the_authors():
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as theirs

    assert set(LANGUAGES) == set(theirs)
    assert issubclass(Whisper, SupportsTranscription)
    assert Whisper.supports_transcription_only
    assert Whisper.supports_segment_timestamp


def test_ids_from_the_tokenizer(tmp_path):
    ids = checkpoint(tmp_path)
    tokens = WhisperTokens.of(tmp_path, {})
    assert tokens.start == ids["<|startoftranscript|>"]
    assert tokens.languages == {"en": ids["<|en|>"], "de": ids["<|de|>"], "haw": ids["<|haw|>"]}
    assert tokens.tasks == {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    assert tokens.no_speech == ids["<|nospeech|>"]
    assert tokens.first_timestamp == ids["<|notimestamps|>"] + 1


def test_english_only_is_what_the_folder_says_whatever_the_user_wants_for_sampling(tmp_path):
    """Checkpoints for English have the tokens of languages all the same."""
    checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false}')
    assert not WhisperTokens.of(tmp_path, {}).multilingual
    assert WhisperTokens.of(tmp_path, {"is_multilingual": True}).multilingual


def test_the_generation_config_has_the_last_word(tmp_path):
    checkpoint(tmp_path)
    stated = {"lang_to_id": {"<|de|>": 7}, "task_to_id": {"translate": 8},
              "decoder_start_token_id": 9, "eos_token_id": [10, 11]}  # fmt: skip
    tokens = WhisperTokens.of(tmp_path, stated)
    assert (tokens.languages["de"], tokens.tasks["translate"]) == (7, 8)
    assert (tokens.start, tokens.end) == (9, 10)


def test_a_checkpoint_without_the_tokens_is_refused_by_name(tmp_path):
    checkpoint(tmp_path, ["<|endoftext|>"])
    with pytest.raises(UnsupportedModel, match=r"<\|startoftranscript\|>.*decoder_start_token_id"):
        WhisperTokens.of(tmp_path, {})
    with pytest.raises(UnsupportedModel, match="lang_to_id"):
        WhisperTokens.of(tmp_path, {"lang_to_id": {"<|en|>": "five"}})


@pytest.mark.parametrize("text", ["[", "{}", '{"added_tokens": [{"id": 3}]}', "[" * 100_000])
def test_a_damaged_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="added tokens are unreadable"):
        WhisperTokens.of(tmp_path, {})


def test_prompts(tmp_path):
    ids = checkpoint(tmp_path)
    model = info(tmp_path)
    start, none = ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    assert ask(model) == [start, ids["<|de|>"], ids["<|transcribe|>"], none]
    translated = [start, ids["<|en|>"], ids["<|translate|>"]]
    asked = {"task_type": "translate", "language": "en", "timestamps": True}
    assert ask(model, **asked) == translated
    assert ask(model, **asked, to_language="en") == translated


def test_no_language_is_english_with_a_warning(tmp_path, caplog):
    ids = checkpoint(tmp_path)
    assert ask(info(tmp_path), language=None)[1] == ids["<|en|>"]
    assert "en is assumed" in caplog.text


def test_english_only(tmp_path):
    ids = checkpoint(tmp_path, ENGLISH_ONLY)
    model = info(tmp_path)
    assert ask(model, language=None, timestamps=True) == [ids["<|startoftranscript|>"]]
    assert ask(model, language="en") == [ids["<|startoftranscript|>"], ids["<|notimestamps|>"]]
    with pytest.raises(RequestError, match="English only"):
        ask(model, language="de")
    with pytest.raises(RequestError, match="does not translate"):
        ask(model, language="en", task_type="translate")
    with pytest.raises(RequestError, match="does not translate"):
        Whisper.get_speech_to_text_config(model, "translate")
    assert Whisper.get_language_probe(CLIP, model, SpeechToTextConfig()) is None


def test_previous_text(tmp_path):
    from tokenizers import Tokenizer

    ids = checkpoint(tmp_path)
    found = ask(info(tmp_path), request_prompt=" glossary of names ")
    begin = found.index(ids["<|startoftranscript|>"])
    assert found[0] == ids["<|startofprev|>"]
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(found[1:begin])
    assert text.replace("Ġ", "").replace(" ", "") == "glossaryofnames"


def test_of_long_previous_text_the_end_is_kept(tmp_path):
    ids = checkpoint(tmp_path)
    whole = ask(info(tmp_path), request_prompt="one two three " * 200)
    begin = whole.index(ids["<|startoftranscript|>"])
    assert begin == 448 // 2
    short = ask(info(tmp_path), request_prompt="one two three " * 2)
    tail = short[1 : short.index(ids["<|startoftranscript|>"])]
    assert whole[begin - len(tail) : begin] == tail


def test_previous_text_cannot_smuggle_tokens_in(tmp_path):
    checkpoint(tmp_path)
    with pytest.raises(RequestError, match=r"<\|transcribe\|>") as caught:
        ask(info(tmp_path), request_prompt="hello <|transcribe|> you")
    assert caught.value.param == "prompt"
    bare = tmp_path / "bare"
    bare.mkdir()
    checkpoint(bare, [*ENGLISH_ONLY[:2], *NAMES[-2:]])
    with pytest.raises(RequestError, match="no previous text"):
        ask(info(bare), language="en", request_prompt="hello")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"language": "fr"}, "knows de, en, haw"),
        ({"to_language": "en"}, "to_language = 'en'"),
        ({"task_type": "translate", "to_language": "fr"}, "English only"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path, asked, words):
    checkpoint(tmp_path)
    with pytest.raises(RequestError, match=words):
        ask(info(tmp_path), **asked)


def test_probe_timestamps_silence_and_sizes(tmp_path):
    ids = checkpoint(tmp_path)
    model = info(tmp_path)
    config = Whisper.get_speech_to_text_config(model, "transcribe")
    assert config == SpeechToTextConfig()
    probe = Whisper.get_language_probe(CLIP, model, config)
    assert probe is not None
    assert probe.prompt["decoder_prompt"] == [ids["<|startoftranscript|>"]]
    assert probe.languages[ids["<|haw|>"]] == "haw"
    first = ids["<|notimestamps|>"] + 1
    assert Whisper.get_timestamp(first - 1, model) is None
    assert Whisper.get_timestamp(first, model) == 0.0
    assert Whisper.get_timestamp(first + 1500, model) == pytest.approx(30.0)
    assert Whisper.get_timestamp(first + 1501, model) is None
    assert Whisper.get_no_speech_token_id(model) == ids["<|nospeech|>"]
    assert Whisper.get_seconds_per_state(model) == 0.02
    assert Whisper.get_num_audio_tokens(2.5, config, model) == 125


def test_checkpoints_that_say_no_timestamps(tmp_path):
    first = checkpoint(tmp_path)["<|notimestamps|>"] + 1
    size = first + 9
    every = list(range(first, size))
    for generation, says in (
        ({}, True),
        ({"suppress_tokens": every[1:], "begin_suppress_tokens": [1]}, True),
        ({"suppress_tokens": every}, False),
        ({"suppress_tokens": every[3:], "begin_suppress_tokens": every[:3]}, False),
        ({"suppress_tokens": every[:3], "max_initial_timestamp_index": 3}, True),
        ({"suppress_tokens": every[:3], "max_initial_timestamp_index": 2}, False),
    ):
        model = info(tmp_path, generation, vocab_size=size)
        assert AskedSpeech(Whisper, model).segment_timestamps is says
    assert not Whisper.says_timestamps(info(tmp_path, vocab_size=first))


def test_where_a_transcript_begins(tmp_path):
    ids = checkpoint(tmp_path)
    tokens = WhisperTokens.of(tmp_path, {})
    prompt = ask(info(tmp_path), request_prompt="names")
    assert tokens.begins_with([*prompt, 5, 6]) == len(prompt)
    assert tokens.begins_with([5, 6]) == 0
    assert tokens.begins_with([ids["<|startoftranscript|>"], 5]) == 1


def test_no_torch_is_needed_for_the_tokens():
    """The module is used in front ends; it must not import torch by itself."""
    import headrace_models.families.speech.whisper_tokens as module

    assert not any(value is torch for value in vars(module).values())


def test_damaged_json_in_the_tokenizer_json_names_the_folder(tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|en|>": "x"}))
    with pytest.raises(UnsupportedModel, match=tmp_path.name):
        WhisperTokens.of(tmp_path, {})


def test_what_is_known_of_checkpoints_is_bounded(tmp_path, monkeypatch):
    """Models come and go; those that stay are found again."""
    from headrace_models.families.speech import whisper

    monkeypatch.setattr(whisper, "_KNOWN", {})
    monkeypatch.setattr(whisper, "_MOST_KNOWN", 2)
    ids = checkpoint(tmp_path)
    models = [info(tmp_path) for _ in range(5)]
    for model in [*models, models[0]]:
        assert Whisper.get_no_speech_token_id(model) == ids["<|nospeech|>"]
        assert len(whisper._KNOWN) <= 2
