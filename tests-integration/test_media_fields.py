"""Media of every wire: which parts take them, how they may be spelled, and which field an error names."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from image_checkpoints import data_url, encoded, picture, save_qwen2_vl
from servers import RunningServer, serving

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError

WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216", "--limit-mm-per-prompt", '{"image": 2}', "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes",
)  # fmt: skip
URL = data_url(picture(1))
DATA = base64.b64encode(encoded(picture(1))).decode()
PATHS = {
    "chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen2_vl(folder)
    with serving(str(folder), *WORDS, "--served-model-name", "seer") as running:
        yield running


def sent(server: RunningServer, wire: str, **body: Any) -> httpx2.Response:
    most = "max_output_tokens" if wire == "responses" else "max_tokens"
    body = {"model": "seer", most: 2, "temperature": 0, **body}
    return httpx2.post(server.url + PATHS[wire], json=body, timeout=60)


def chat(server: RunningServer, *parts: Any, role: str = "user", **more: Any) -> httpx2.Response:
    return sent(server, "chat", messages=[{"role": role, "content": list(parts)}], **more)


def image(**source: Any) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": DATA} | source,
    }


def told(answer: httpx2.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def num_tokens(answer: httpx2.Response) -> int:
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    own = usage.get("prompt_tokens", usage.get("input_tokens"))
    return int(own) + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": URL},
        {"image_url": URL},
        {"image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": URL.replace("data:image/png", "DATA:IMAGE/PNG")}},
        {"type": "image_url",
         "image_url": {"url": URL.replace("+", "-").replace("/", "_").replace("data:image_png",
                                                                             "data:image/png")}},
        {"type": "image_url", "image_url": {"url": URL.rstrip("=")}},
    ],
)  # fmt: skip
def test_an_image_has_several_spellings(server: RunningServer, part: dict[str, Any]) -> None:
    plain = chat(server, {"type": "image_url", "image_url": {"url": URL}})
    assert num_tokens(chat(server, part)) == num_tokens(plain) > 10


CHAT = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, f"{CHAT}.image_url.url = '{DATA[:64]}'"),
        ({"type": "image_url", "image_url": DATA}, f"{CHAT}.image_url = '{DATA[:64]}': must begin with"),
        ({"type": "image_url", "image_url": {"url": "HTTP://127.0.0.1:9/1.png"}},
         f"{CHAT}.image_url.url: host '127.0.0.1' has an address that is not public"),
        ({"type": "image_url", "image_url": {"url": "FILE:///1.png"}},
         f"{CHAT}.image_url.url: file: URLs are refused"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "most"}},
         f"{CHAT}.image_url.detail = 'most': must be one of auto, low, high, or absent"),
        ({"type": "image_url", "image_url": None, "uuid": "a"},
         f"{CHAT}.uuid = 'a': no item of that name is kept"),
        ({"type": "image_url", "image_url": {"url": data_url(picture(1, 2, 600))}},
         f"{CHAT}.image_url.url: image of 600 x 2 pixels"),
        ({"type": "input_image", "image_url": URL}, "must be one of text, image_url"),
        ({"type": "file", "file": {"file_data": URL}}, "must be one of text, image_url"),
        ({"type": "picture", "picture": URL}, "'thinking', 'image_url', 'video_url']"),
    ],
)  # fmt: skip
def test_chats_name_the_clients_field(
    server: RunningServer, part: dict[str, Any], message: str
) -> None:
    said = told(chat(server, part))
    assert message in said
    assert "takes text only" not in said
    assert "multi_modal" not in said


def test_too_many_images_are_told_of_where_they_stand(server: RunningServer) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    assert "messages[0].content[2].image_url.url: 3 items; at most 2" in told(
        chat(server, *[part] * 3)
    )
    item = {"type": "input_image", "image_url": URL}
    user = {"role": "user", "content": [item] * 3}
    said = told(sent(server, "responses", input=[{"role": "user", "content": "x"}, user]))
    assert "input[1].content[2].image_url: 3 items" in said
    user = {"role": "user", "content": [image()] * 3}
    said = told(sent(server, "anthropic", system="x", messages=[user]))
    assert "messages[0].content[2].source.data: 3 items" in said


CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {}}


def with_result(content: Any) -> list[Any]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user",
         "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]},
    ]  # fmt: skip


def test_tools_of_anthropics_clients_give_images(server: RunningServer) -> None:
    text = {"type": "text", "text": "seen"}
    without = sent(server, "anthropic", messages=with_result([text]))
    with_one = sent(server, "anthropic", messages=with_result([text, image()]))
    assert num_tokens(with_one) >= num_tokens(without) + 4
    said = told(sent(server, "anthropic", messages=with_result([image(data="AAAA")])))
    assert said.startswith("messages[2].content[0].content[0].source.data: ")


def test_functions_of_the_responses_api_give_images(server: RunningServer) -> None:
    def items(*parts: Any) -> list[Any]:
        return [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": list(parts)},
        ]

    text = {"type": "input_text", "text": "seen"}
    without = sent(server, "responses", input=items(text))
    with_one = sent(
        server, "responses", input=items(text, {"type": "input_image", "image_url": URL})
    )
    assert num_tokens(with_one) >= num_tokens(without) + 4
    bad = {"type": "input_image", "image_url": "data:;base64,AAAA"}
    said = told(sent(server, "responses", input=items(text, bad)))
    assert said.startswith("input[2].output[1].image_url: ")


def test_where_no_image_may_stand_is_said(server: RunningServer) -> None:
    user = {"role": "user", "content": "x"}
    said = told(sent(server, "anthropic", system=[image()], messages=[user]))
    assert "system[0]: blocks of type 'image' are not supported here; accepted are" in said
    bad = {"role": "user", "content": [{"type": "document", "source": {}}]}
    assert "blocks of type text, image and tool_result" in told(
        sent(server, "anthropic", messages=[bad])
    )
    for role in ("system", "assistant"):
        item = {"role": role, "content": [{"type": "input_image", "image_url": URL}]}
        said = told(sent(server, "responses", input=[item, user]))
        assert "input[0].content[0]" in said
        assert f"messages of role {role!r}, which take text only" in said
    item = {"role": "user", "content": [{"type": "input_file", "file_data": URL}]}
    assert "must be one of input_text, input_image" in told(sent(server, "responses", input=[item]))


def test_what_is_said_of_an_image_is_looked_at(server: RunningServer) -> None:
    def asked(**source: Any) -> str:
        user = {"role": "user", "content": [image(**source)]}
        return told(sent(server, "anthropic", messages=[user]))

    place = "messages[0].content[0].source.media_type"
    assert f"{place} = 'text/plain': must be one of image/jpeg" in asked(media_type="text/plain")
    assert f"{place} = 'image/jpeg': the data are image/png" in asked(media_type="image/jpeg")
    for kind, name in (("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif")):
        data = base64.b64encode(encoded(picture(1), kind)).decode()
        assert f"the data are {name}" in asked(data=data)
        user = {"role": "user", "content": [image(data=data, media_type=name)]}
        assert num_tokens(sent(server, "anthropic", messages=[user])) > 4
    item = {"type": "input_image", "image_url": URL, "detail": "most"}
    said = told(sent(server, "responses", input=[{"role": "user", "content": [item]}]))
    assert "input[0].content[0].detail = 'most': must be one of auto, low, high" in said


def test_options_of_a_chat_without_media_are_checked(server: RunningServer) -> None:
    def asked(options: Any) -> httpx2.Response:
        return chat(server, {"type": "text", "text": "x"}, mm_processor_kwargs=options)

    assert "mm_processor_kwargs" in told(asked({"no_such": 1}))
    assert "min_pixels" in told(asked({"min_pixels": -1}))
    assert num_tokens(asked({"max_pixels": 4096})) > 1


def test_offline_chats_have_options(tmp_path: Path) -> None:
    save_qwen2_vl(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(
        str(tmp_path), dtype="float32", max_model_len=256, block_size=8,
        kv_cache_memory_bytes=16 << 20, use_tqdm_on_load=False,
    ) as model:  # fmt: skip
        part = {"type": "image_pil", "image_pil": picture(1, 112, 112)}
        talk: Any = [{"role": "user", "content": [part]}]
        [plain] = model.chat(talk, params)
        [small] = model.chat(talk, params, mm_processor_kwargs={"max_pixels": 56 * 56})
        assert len(small.prompt_token_ids) < len(plain.prompt_token_ids)
        with pytest.raises(RequestError, match="no_such"):
            model.chat(
                [{"role": "user", "content": "x"}], params, mm_processor_kwargs={"no_such": 1}
            )
