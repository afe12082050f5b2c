"""Prompts that bring audio, with a processor that makes a token of every two samples."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_fakes import CharTokenizer, served_model

from headrace_core.arrays import PackedArray
from headrace_core.errors import PromptTooLong, QueueFull, RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_core.pooling import PoolingInfo, PoolingParams
from headrace_core.request import ChatPrompt, CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.speech.model import AudioClip
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.media import AT_ONCE, MediaReader
from headrace_engine.input_processing.media_items import FileReading, Later

MARK = ord("~")
ONE = np.array([0.5, -0.5, 0.25, 0.0], np.float32)
OTHER = np.array([0.1, 0.2], np.float32)


class PairsOfSamples:
    """Placeholders are tildes; an encoder's prompt has none."""

    placeholder_ids = (MARK,)

    def __init__(self, *, encodes: bool = False) -> None:
        self.encodes = encodes

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        return [self._processed(item) for item in items]

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        return self.process([MediaItem(modality, ONE, "", {})], {})[0]

    def placeholder(self, modality: Modality, index: int) -> str:
        return f"{index}:~"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        if self.encodes:
            return MediaPlacement(list(token_ids), [-1] * len(media))
        ids: list[int] = []
        offsets: list[int] = []
        for token in token_ids:
            if token == MARK:
                offsets.append(len(ids))
                ids += [MARK] * media[len(offsets) - 1].num_tokens
            else:
                ids.append(token)
        if len(offsets) != len(media):
            raise RequestError(f"{len(offsets)} placeholders", param="prompt")
        return MediaPlacement(ids, offsets)

    def _processed(self, item: MediaItem) -> ProcessedMedia:
        samples = PackedArray("float32", item.data.shape, item.data.tobytes())
        return ProcessedMedia({"samples": samples}, len(item.data) // 2)


def content_hash(modality: str, data: Any, options: Mapping[str, Any]) -> str:
    return hashlib.sha256(data.tobytes() + repr(sorted(options.items())).encode()).hexdigest()


def decode(data: bytes, name: str) -> AudioClip:
    if data == b"noise":
        raise RequestError(f"{name}: no audio", param=name)
    return AudioClip(np.frombuffer(data, np.int8).astype(np.float32) / 128, 8000)


def make(encodes: bool = False, *, decoder: Any = decode, **limits: Any) -> InputProcessor:
    reader = MediaReader(
        PairsOfSamples(encodes=encodes), content_hash, limits=limits, is_encoder_decoder=encodes,
        decoder_start_token_id=7 if encodes else None, files=FileReading(audio=decoder),
    )  # fmt: skip
    model = served_model(is_encoder_decoder=encodes, modalities=reader.modalities)
    return InputProcessor(CharTokenizer(), model, media=reader, clock=lambda: 1.0)


def core(input_processor: InputProcessor, prompt: Any, **params: Any) -> CoreRequest:
    return input_processor.prepare(prompt, SamplingParams(**params), "r").core_requests[0]


def heard(text: str, *clips: Any, **more: Any) -> dict[str, Any]:
    audio: Any = list(clips) if len(clips) > 1 else clips[0]
    return {"prompt": text, "multi_modal_data": {"audio": audio}, **more}


def test_placeholders_are_expanded_and_items_know_their_places() -> None:
    made = core(make(), heard("a~bc~", ONE, (OTHER, 8000)))
    assert made.prompt_token_ids == [ord("a"), MARK, MARK, ord("b"), ord("c"), MARK]
    assert [(m.modality, m.offset, m.num_tokens) for m in made.media] == [
        ("audio", 1, 2),
        ("audio", 5, 1),
    ]
    assert made.media[0].inputs["samples"].tolist() == ONE.tolist()
    assert made.num_encoder_tokens == 0
    ids = [ord(c) for c in "a~bc~"]
    again = core(
        make(), {"prompt_token_ids": ids, **heard("", ONE, (OTHER, 8000))} | {"prompt": None}
    )
    assert (again.prompt_token_ids, again.media) == (made.prompt_token_ids, made.media)


def test_samples_that_overflow_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    input_processor = make()
    with monkeypatch.context() as patch:
        patch.setattr(PairsOfSamples, "_processed", _squared)
        with pytest.raises(
            RequestError, match=r"multi_modal_data.audio\[1\]: .* not finite"
        ) as caught:
            core(input_processor, heard("~~", ONE, OTHER * 3e38))
        chat = ChatPrompt([{"role": "user", "content": [audio_part(b"\1\2")]}])
        patch.setattr(PairsOfSamples, "_processed", lambda self, item: _squared(self, item, 1e30))
        with pytest.raises(
            RequestError, match=r"^messages\[0\].content\[0\].input_audio.data: its"
        ):
            core(input_processor, chat)
    assert caught.value.param == "multi_modal_data.audio"
    assert len(core(input_processor, heard("~", OTHER * 2)).media) == 1


def _squared(self: Any, item: MediaItem, factor: float = 1.0) -> ProcessedMedia:
    with np.errstate(over="ignore"):
        data = (item.data * np.float32(factor)) ** 2
    samples = PackedArray("float32", data.shape, data.tobytes())
    return ProcessedMedia({"samples": samples}, len(data) // 2)


@pytest.mark.parametrize("prompt", ["0:~ and 0:~", {"prompt": "0:~ and 0:~"}])
def test_placeholders_of_a_text_alone_are_refused(prompt: Any) -> None:
    with pytest.raises(
        RequestError, match=r"has 2 placeholders \('0:~'\), and no audio comes with"
    ) as caught:
        core(make(), prompt)
    assert caught.value.param == "prompt"
    assert make().tokenize(prompt).token_ids == [ord(c) for c in "0:~ and 0:~"]
    assert core(make(audio=0), prompt).media == []


@pytest.mark.parametrize("prompt", ["a~", {"prompt_token_ids": [1, MARK]}, [1, MARK]])
def test_tokens_that_stand_for_media_are_refused_alone(prompt: Any) -> None:
    with pytest.raises(
        RequestError, match=r"^prompt: has token 126 \('~'\), .*multi_modal_data"
    ) as c:
        core(make(), prompt)
    assert c.value.param == "prompt"
    assert make().tokenize(prompt).token_ids[-1] == MARK
    assert core(make(audio=0), prompt).prompt_token_ids[-1] == MARK
    assert core(make(), heard("~", ONE)).media, "which a prompt with media may have"


def test_placeholders_typed_in_a_chat_are_text_unless_control_tokens_are_allowed() -> None:
    chat = ChatPrompt([{"role": "user", "content": "0:~?"}])
    assert make().prepare(chat, SamplingParams(), "r").core_requests[0].media == []
    reader = MediaReader(PairsOfSamples(), content_hash)
    allowing = InputProcessor(
        CharTokenizer(), served_model(), media=reader, allow_control_tokens=True
    )
    with pytest.raises(RequestError, match="messages: has 1 placeholder ") as caught:
        core(allowing, chat)
    assert caught.value.param == "messages"


def test_content_is_named_with_everything_that_changes_it() -> None:
    def name(clip: Any, **more: Any) -> str:
        return core(make(), heard("~", clip, **more)).media[0].content_hash

    names = [
        name(ONE), name((ONE, 8000)), name((ONE, 16000)), name(OTHER),
        name(ONE, mm_processor_kwargs={"x": 1}),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert name(ONE.copy()) == names[0]
    two = np.stack([ONE, ONE])
    assert name(two) == names[0], "channels are averaged"


@pytest.mark.parametrize(
    "prompt",
    [
        heard("abc", ONE),
        {"prompt_token_ids": [97, 98, 99], "multi_modal_data": {"audio": [ONE]}},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": ONE}},
         "decoder_prompt": "abc"},
        {"encoder_prompt": {"prompt_token_ids": [], "multi_modal_data": {"audio": ONE}},
         "decoder_prompt": [97, 98, 99]},
        {"encoder_prompt": {"prompt": None, "multi_modal_data": {"audio": ONE}},
         "decoder_prompt": {"prompt": "abc"}},
    ],
)  # fmt: skip
def test_both_forms_for_encoder_decoders_are_equal(prompt: Any) -> None:
    made = core(make(encodes=True), prompt)
    assert made.prompt_token_ids == [97, 98, 99]
    assert made.num_encoder_tokens == 2
    assert [(m.offset, m.num_tokens) for m in made.media] == [(-1, 2)]
    assert made.media[0].inputs["samples"].tolist() == ONE.tolist()


@pytest.mark.parametrize(
    "decoder", [None, "", [], {"prompt": ""}, {"prompt_token_ids": []}]
)  # fmt: skip
def test_a_decoder_without_a_prompt_begins_with_its_start(decoder: Any) -> None:
    encoder = {"prompt": "", "multi_modal_data": {"audio": ONE}}
    made = core(make(encodes=True), {"encoder_prompt": encoder, "decoder_prompt": decoder})
    assert made.prompt_token_ids == [7]


def test_the_prompt_of_an_output_is_the_decoders() -> None:
    encoder = {"prompt": "", "multi_modal_data": {"audio": ONE}}
    prompt: Any = {"encoder_prompt": encoder, "decoder_prompt": "abc", "cache_salt": "s"}
    made = make(encodes=True).prepare(prompt, SamplingParams(), "r")
    assert (made.prompt, made.core_requests[0].cache_salt) == ("abc", "s")


@pytest.mark.parametrize(
    ("encodes", "prompt", "message"),
    [
        (False, heard("~", np.array([1, 2])), "dtype int64; must be"),
        (False, heard("~", np.zeros((1, 2, 3), np.float32)), r"shape \[1, 2, 3\]"),
        (False, heard("~", np.zeros(0, np.float32)), "not empty"),
        (False, heard("~", "text"), "must be"),
        (False, heard("~", (ONE, 0)), r"= 0: must be \(waveform, samples a second\)"),
        (False, heard("~", (ONE, True)), "True: must be"),
        (False, heard("~", ONE, mm_processor_kwargs=[1]), "mm_processor_kwargs = .*: must be"),
        (False, heard("~~~", *[ONE] * 3), r"3 items; at most 2 .*--limit-mm-per-prompt .*audio.*: 2"),
        (False, heard("none", ONE), "0 placeholders"),
        (False, {"prompt": "~", "multi_modal_data": [ONE]}, "must be a mapping of modalities"),
        (False, {"prompt": "~", "multi_modal_data": {"video": ONE}}, "takes audio only"),
        (False, {**heard("~", ONE), "zzz": 1}, "zzz"),
        (False, {"encoder_prompt": "", "decoder_prompt": "x"}, "has no encoder"),
        (True, "abc", "must be given: the model's encoder reads nothing else"),
        (True, {"encoder_prompt": "", "decoder_prompt": "x"}, "must be given"),
        (True, heard("x", ONE, ONE), "2 items; must be exactly one"),
        (True, {"encoder_prompt": {"prompt": "read", "multi_modal_data": {"audio": ONE}},
                "decoder_prompt": "x"}, "encoder_prompt = 'read': must be empty"),
        (True, {"encoder_prompt": {"multi_modal_data": {"audio": ONE}},
                "decoder_prompt": heard("x", ONE)}, "decoder_prompt.multi_modal_data: no such"),
        (True, {"encoder_prompt": heard("", ONE), "zzz": 1}, "prompt.zzz: no such field"),
        (True, {"encoder_prompt": heard("", ONE), "decoder_prompt": 3}, "must be text or a list"),
        (True, {"encoder_prompt": heard("", ONE), "decoder_prompt": np.array([0.5])},
         r"0\.5 is not a token id"),
        (True, {"encoder_prompt": heard("", ONE), "decoder_prompt": bytearray(b"ab")},
         r"b'ab'\): must be text or a list of token ids$"),
        (False, heard("~", (ONE, 16000, 1)), r"audio: tuple is not an array .*; must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(encodes: bool, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        core(make(encodes, audio={"count": 2}), prompt)


def test_a_model_of_text_takes_none() -> None:
    plain = InputProcessor(CharTokenizer(), served_model())
    for prompt in (heard("~", ONE), {"encoder_prompt": heard("", ONE), "decoder_prompt": "x"}):
        with pytest.raises(UnsupportedFeature, match="this model takes text only"):
            core(plain, prompt)


def test_a_prompt_is_not_cut_inside_of_media() -> None:
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens = 3.*would cut"):
        core(make(), heard("ab~", ONE), truncate_prompt_tokens=3)
    assert core(make(), heard("ab~", ONE), truncate_prompt_tokens=4).media
    cut = core(make(encodes=True), heard("abcdef", ONE), truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == [ord("e"), ord("f")]


def audio_part(data: bytes, kind: str = "input_audio") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    if kind == "audio_url":
        return {"type": kind, kind: {"url": f"data:audio/wav;base64,{text}"}}
    return {"type": kind, kind: {"data": text, "format": "wav"}}


@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_parts_of_chats_become_items_where_they_stand(kind: str) -> None:
    parts = [{"type": "text", "text": "hear"}, audio_part(b"\1\2\3\4", kind), audio_part(b"\5\6")]
    chat = ChatPrompt([{"role": "user", "content": parts}], content_format="string")
    made = make().prepare(chat, SamplingParams(), "r")
    assert made.prompt == "user: hear\n0:~\n1:~\n"
    [first, second] = made.core_requests[0].media
    assert (first.num_tokens, second.num_tokens) == (2, 1)
    assert made.prompt_token_ids[first.offset] == MARK
    assert first.inputs["samples"].tolist() == [x / 128 for x in (1, 2, 3, 4)]
    with_rate = core(make(), heard("~", (np.array([1, 2, 3, 4], np.float32) / 128, 8000)))
    assert with_rate.media[0].content_hash == first.content_hash


def test_media_may_stand_in_front_of_a_messages_text() -> None:
    reader = MediaReader(
        PairsOfSamples(), content_hash, files=FileReading(audio=decode), interleaves=False
    )
    input_processor = InputProcessor(CharTokenizer(), served_model(), media=reader)
    parts = [{"type": "text", "text": "hear"}, audio_part(b"\1\2\3\4"), audio_part(b"\5\6")]
    chat = ChatPrompt([{"role": "user", "content": parts}], content_format="string")
    made = input_processor.prepare(chat, SamplingParams(), "r")
    assert made.prompt == "user: 0:~\n1:~\nhear\n"
    assert [item.num_tokens for item in made.core_requests[0].media] == [2, 1]


def test_templates_that_go_through_parts_see_the_modality() -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type == 'audio' %}<~>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    reader = MediaReader(PairsOfSamples(), content_hash, files=FileReading(audio=decode))
    input_processor = InputProcessor(
        CharTokenizer(), served_model(), media=reader, chat_template=template
    )
    content = [audio_part(b"\1\2"), {"type": "text", "text": "?"}]
    assert input_processor.prepare(
        ChatPrompt([{"role": "user", "content": content}]), SamplingParams(), "r"
    ).prompt == ("<~>?")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {"data": "?"}}, r"input_audio.data: must be base64"),
        ({"type": "input_audio", "input_audio": "AAAA"},
         r"content\[0\].input_audio.data: must be text; input_audio is an object with data$"),
        ({"type": "audio_url", "audio_url": {"url": "http://x/a.wav"}}, "data: URL"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav,abc"}}, "data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:"}},
         r"content\[0\].type = 'image_url': must be one of text, .*, audio_url$"),
        ({"type": "audio_url", "audio_url": {"url": "UklGRg=="}}, "must begin with https:.*data:TYPE"),
        ({"type": "audio_url"}, r"content\[0\].audio_url.url: must be text"),
        (audio_part(b"noise"), "no audio"),
        (audio_part(b""), r"^messages\[0\].content\[0\].input_audio.data: an array of shape \[0\]"),
        ({"type": "audio_url", "audio_url": None, "uuid": "a"},
         r"^messages\[0\].content\[0\].uuid = 'a': no item of that name is kept"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_part_is_named(part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        core(make(), ChatPrompt([{"role": "user", "content": [part]}]))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio_url", "audio_url": "data:audio/wav;base64,+/8B"},
        {"type": "audio_url", "audio_url": {"url": "DATA:audio/wav;BASE64,-_8B"}},
        {"type": "input_audio", "input_audio": {"data": "-_8B"}},
    ],
)
def test_content_has_several_spellings(part: Any) -> None:
    chat = ChatPrompt([{"role": "user", "content": [part]}], content_format="string")
    [item] = core(make(), chat).media
    assert item.inputs["samples"].tolist() == [x / 128 for x in (-5, -1, 1)]
    short = {"type": "audio_url", "audio_url": "data:;base64,AQI"}  # without its padding
    chat = ChatPrompt([{"role": "user", "content": [short]}], content_format="string")
    [item] = core(make(), chat).media
    assert item.inputs["samples"].tolist() == [x / 128 for x in (1, 2)]


def test_chats_bring_no_files_where_nobody_decodes_or_the_operator_says_so() -> None:
    chat = ChatPrompt([{"role": "user", "content": [audio_part(b"\1\2")] * 2}])
    with pytest.raises(UnsupportedFeature, match="decodes no files"):
        core(make(decoder=None), chat)
    with pytest.raises(RequestError, match="2 items; at most 1"):
        core(make(audio=1), chat)
    with pytest.raises(UnsupportedFeature, match="takes text only"):
        core(make(audio=0), chat)


def test_a_request_with_media_survives_the_wire() -> None:
    made = core(make(), heard("a~", ONE))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=CoreRequest)
    assert again == made


def test_sequences_to_be_aligned() -> None:
    input_processor = make(encodes=True)
    with pytest.raises(UnsupportedFeature, match="does not tell when words are said"):
        input_processor.alignment.prepare(heard("abc", ONE), "r")  # type: ignore[arg-type]
    model = served_model(tasks=("transcription", "align"), is_encoder_decoder=True)
    reader = MediaReader(PairsOfSamples(encodes=True), content_hash, is_encoder_decoder=True)
    input_processor = InputProcessor(CharTokenizer(), model, media=reader)
    prepared = input_processor.alignment.prepare(heard("abc", ONE), "r")  # type: ignore[arg-type]
    [request] = prepared.core_requests
    assert request.pooling == PoolingParams(task="align", skip_reading_prefix_cache=True)
    assert (request.prompt_token_ids, request.num_encoder_tokens) == ([97, 98, 99], 2)
    with pytest.raises(RequestError, match="must be given"):
        input_processor.alignment.prepare("abc", "r")
    with pytest.raises(RequestError, match="context length is"):
        input_processor.alignment.prepare(heard("a" * (model.max_model_len + 1), ONE), "r")  # type: ignore[arg-type]


def test_a_wait_for_a_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody holds all places; the request is told to come again, and holds none afterwards."""
    monkeypatch.setattr("headrace_engine.input_processing.media.AT_ONCE", 0)
    monkeypatch.setattr("headrace_engine.input_processing.media.PLACE_SECONDS", 0.0)
    with pytest.raises(QueueFull, match="too many media items wait"):
        core(make(), heard("<~>", ONE))
    monkeypatch.setattr("headrace_engine.input_processing.media.AT_ONCE", 1)
    input_processor = make()
    for _ in range(2):
        core(input_processor, heard("<~>", ONE))


def pooling_input_processor(**info: Any) -> InputProcessor:
    reader = MediaReader(PairsOfSamples(), content_hash)
    pooling = PoolingInfo(("embed",), "LAST", causal=True, embedding_size=8, **info)
    model = served_model(
        runner="pooling", pooling=pooling, tasks=("embed",), modalities=reader.modalities
    )
    return InputProcessor(CharTokenizer(), model, media=reader, clock=lambda: 1.0)


def test_pooled_prompts_bring_media() -> None:
    input_processor = pooling_input_processor().pooling
    read = input_processor.read(heard("a~b", ONE), PoolingParams(), "r", task="embed")
    [made] = input_processor.request(read).core_requests
    assert made.prompt_token_ids == [ord("a"), MARK, MARK, ord("b")]
    assert [(item.offset, item.num_tokens) for item in made.media] == [(1, 2)]


def test_media_of_pooled_prompts_are_not_cut() -> None:
    asked = PoolingParams(truncate_prompt_tokens=3)
    with pytest.raises(RequestError, match="truncate_prompt_tokens = 3"):
        pooling_input_processor().pooling.read(heard("a~b", ONE), asked, "r", task="embed")
    windows = pooling_input_processor(enable_chunked_processing=True, native_len=3).pooling
    with pytest.raises(PromptTooLong, match=r"length is 3 tokens.*with media is not cut"):
        windows.read(heard("a~b", ONE), PoolingParams(), "r", task="embed")


def test_a_slow_host_keeps_no_other_item_waiting() -> None:
    """However many items are being fetched, one that is there is read."""
    reader = MediaReader(PairsOfSamples(), content_hash)
    answered, begun = threading.Event(), threading.Semaphore(0)

    def fetch() -> object:
        begun.release()
        assert answered.wait(60)
        return ONE

    with ThreadPoolExecutor(2 * AT_ONCE) as pool:
        slow = [
            pool.submit(reader.place, [MARK], {"audio": Later(fetch, lambda got: got)}, None)
            for _ in range(2 * AT_ONCE)
        ]
        for _ in slow:
            assert begun.acquire(timeout=60)
        try:
            assert reader.place([MARK], {"audio": OTHER}, None).token_ids == [MARK]
            assert not any(future.done() for future in slow)
        finally:
            answered.set()
        assert [future.result(60).token_ids for future in slow] == [[MARK, MARK]] * len(slow)


class BesideText(PairsOfSamples):
    """What becomes of an item depends on the text of its prompt."""

    def options_for_text(self, text: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**options, "beside": text}

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        text = options["beside"].encode()
        packed = PackedArray("uint8", (len(text),), text)
        return [ProcessedMedia({"text": packed}, 1) for _ in items]


def test_items_may_depend_on_the_text_of_their_prompt() -> None:
    """Kept items, those with names and the hashes that name cached prefixes are others beside other texts."""
    reader = MediaReader(BesideText(), content_hash, max_kept_bytes=1000)
    model = served_model(modalities=reader.modalities)
    reading = InputProcessor(CharTokenizer(), model, media=reader, clock=lambda: 1.0)
    found = [core(reading, heard(text, ONE)).media[0] for text in ("a~", "b~", "a~")]
    assert [bytes(one.inputs["text"].data) for one in found] == [b"a~", b"b~", b"a~"]
    assert found[0].content_hash == found[2].content_hash != found[1].content_hash
    ids = {**heard("", ONE), "prompt": None, "prompt_token_ids": [ord("a"), MARK]}
    assert core(reading, ids).media[0] == found[0]
    assert reader._processor.num_processed == 2
    named = {"multi_modal_uuids": {"audio": "x"}}
    core(reading, heard("a~", ONE, **named))
    core(reading, {**heard("a~", None), **named})
    with pytest.raises(RequestError, match="no item of that name is kept"):
        core(reading, {**heard("b~", None), **named})


def test_items_beside_ids_need_a_tokenizer_where_they_depend_on_text() -> None:
    reader = MediaReader(BesideText(), content_hash)
    model = served_model(modalities=reader.modalities)
    reading = InputProcessor(None, model, media=reader, clock=lambda: 1.0)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        core(reading, {**heard("", ONE), "prompt": None, "prompt_token_ids": [ord("a"), MARK]})
