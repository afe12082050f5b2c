"""Media that a caller names: sent once, known by the name afterwards; options of processors on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from http_parts import only, parts_of, wait_for_all
from image_checkpoints import data_url, picture, save_qwen2_vl
from servers import RunningServer, serving
from test_image_prompts import PARAMS, SETTINGS

from headrace import LLM
from headrace_core.errors import ConfigError, RequestError
from headrace_multimodal import processor_for

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen2_vl(folder)
    return folder


def asked(image: Any, name: Any, text: str = "the water", **more: Any) -> dict[str, Any]:
    return {
        "prompt": text + MARK * (len(image) if isinstance(image, list) else 1),
        "multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": name}, **more,
    }  # fmt: skip


def test_a_name_stands_for_an_item(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    kind = type(processor_for("Qwen2VLForConditionalGeneration", *_of(folder)))
    inner = kind.one
    monkeypatch.setattr(kind, "one", lambda *a: (counts.update(["processed"]), inner(*a))[1])
    with LLM(str(folder), **SETTINGS) as model:

        def say(*prompt: Any, **more: Any) -> list[int]:
            [output] = model.generate(asked(*prompt, **more), PARAMS)
            return list(output.outputs[0].token_ids)

        plain = {n: say(picture(n), None) for n in (1, 2)}
        assert plain[1] != plain[2]
        counts.clear()
        assert say(picture(1), "one") == plain[1]
        assert counts == {"processed": 1}
        assert say(None, "one") == plain[1]
        assert say([None], ["one"]) == plain[1]
        assert say(picture(2), "one") == plain[1]  # known by its name, whatever it is
        assert counts == {"processed": 1}
        both = say([picture(1), picture(2)], None)
        assert say([None, picture(2)], ["one", None]) == both
        # Other options, or another salt, are other items.
        for more in ({"mm_processor_kwargs": {"max_pixels": 2048}}, {"cache_salt": "else"}):
            with pytest.raises(
                RequestError, match=r"multi_modal_uuids.image\[0\] = 'one': no item"
            ):
                say(None, "one", **more)
        assert say(picture(2), "one", cache_salt="else") == plain[2]


def test_what_is_no_name_is_refused(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS, mm_processor_cache_gb=0) as model:
        for image, name, words in [
            (
                None,
                "unknown",
                r"multi_modal_uuids.image\[0\] = 'unknown': no item of that name is kept",
            ),
            (None, None, r"multi_modal_data.image\[0\] = null: must be an item"),
            (picture(1), ["a", "b"], "multi_modal_uuids.image: 2 names for 1 items"),
            (picture(1), "", r"multi_modal_uuids.image\[0\] = '': must be text of 1 to 256"),
            (picture(1), 5, r"multi_modal_uuids.image\[0\] = 5: must be text"),
        ]:
            with pytest.raises(RequestError, match=words):
                model.generate(asked(image, name), PARAMS)
        for names, words in [
            ({"audio": "a"}, "must have the same modalities"),
            ({}, "must have the same modalities"),
            ("a", "must be a mapping of modalities to names"),
        ]:
            with pytest.raises(RequestError, match=words):
                model.generate({**asked(picture(1), None), "multi_modal_uuids": names}, PARAMS)
        # Nothing is kept: a name without content is unknown, also after its item.
        model.generate(asked(picture(1), "one"), PARAMS)
        with pytest.raises(RequestError, match="no item of that name is kept"):
            model.generate(asked(None, "one"), PARAMS)


def _of(folder: Path) -> tuple[Any, Path]:
    import json

    return json.loads((folder / "config.json").read_text()), folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(str(folder), *WORDS, "--served-model-name", "seer") as running:
        yield running


def part(number: int | None, name: str | None = None) -> dict[str, Any]:
    image = None if number is None else {"url": data_url(picture(number))}
    return {"type": "image_url", "image_url": image, **({} if name is None else {"uuid": name})}


def test_names_over_the_wire(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)

    def say(*parts: dict[str, Any], **more: Any) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model="seer", temperature=0, max_tokens=6, extra_body=more,
            messages=[{"role": "user", "content": [{"type": "text", "text": "the "}, *parts]}],
        )  # fmt: skip
        return str(answer.choices[0].message.content), answer.usage.prompt_tokens  # type: ignore[union-attr]

    first = say(part(1))
    assert say(part(1, "mine")) == first
    assert say(part(None, "mine")) == first
    assert say(part(2, "mine")) == first
    assert say(part(None, "mine"), part(2)) == say(part(1), part(2))
    with pytest.raises(openai.BadRequestError) as error:
        say(part(None, "yours"))
    assert error.value.param == "messages[0].content[1].uuid"
    assert "'yours': no item of that name is kept" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        say(part(None))
    assert error.value.param == "messages[0].content[1].image_url.url"
    with pytest.raises(openai.BadRequestError) as error:
        say({**part(1), "uuid": 7})
    assert error.value.param == "messages[0].content[1].uuid"


def test_options_of_the_processor_over_the_wire(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)

    def tokens(options: Any) -> int:
        answer = client.chat.completions.create(
            model="seer", max_tokens=1, messages=[{"role": "user", "content": [part(3)]}],
            extra_body={"mm_processor_kwargs": options},
        )  # fmt: skip
        return int(answer.usage.prompt_tokens)  # type: ignore[union-attr]

    assert tokens({"max_pixels": 16 * 16 * 4}) < tokens(None) == tokens({})
    for options in ({"sides": 3}, {"max_pixels": "x"}):
        with pytest.raises(openai.BadRequestError) as error:
            tokens(options)
        assert error.value.param == "mm_processor_kwargs"


def test_two_items_of_one_name_are_the_first(folder: Path) -> None:
    for cache in (4, 0):
        with LLM(str(folder), **SETTINGS, mm_processor_cache_gb=cache) as model:

            def say(images: list[Any], names: Any, model: LLM = model) -> list[int]:
                [output] = model.generate(asked(images, names), PARAMS)
                return list(output.outputs[0].token_ids)

            first = say([picture(1), picture(1)], None)
            assert first != say([picture(2), picture(2)], None)
            assert say([picture(1), picture(2)], ["n", "n"]) == first
            assert say([picture(1), None], ["m", "m"]) == first


def test_what_no_request_may_do_to_a_server(server: RunningServer, folder: Path) -> None:
    """More images than the context holds are refused at the first too many; odd hosts are a 400."""
    client = openai.OpenAI(base_url=server.api, api_key="x", max_retries=0)
    many = [part(number % 7) for number in range(60)]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(
            model="seer", messages=[{"role": "user", "content": many}], max_tokens=1
        )
    for host in ("a" * 70 + ".com", "a..b", ".example.com"):
        url = {"type": "image_url", "image_url": {"url": f"http://{host}/x"}}
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model="seer", messages=[{"role": "user", "content": [url]}], max_tokens=1
            )
        assert error.value.param == "messages[0].content[0].image_url.url"


def test_options_of_the_operator_that_no_image_can_have_end_the_start(folder: Path) -> None:
    for options in ({"bogus": 1}, {"max_pixels": 99_999_999}):
        with pytest.raises(ConfigError, match=f"mm_processor_kwargs.{next(iter(options))}"):
            LLM(str(folder), **SETTINGS, mm_processor_kwargs=options)


def test_an_item_of_another_size_under_a_name_that_is_not_kept_is_another(folder: Path) -> None:
    small, large = picture(1), picture(1, 100, 120)
    with LLM(str(folder), **SETTINGS, mm_processor_cache_gb=0) as model:

        def say(image: Any, name: str | None) -> list[int]:
            [output] = model.generate(asked(image, name), PARAMS)
            return list(output.outputs[0].token_ids)

        plain = say(large, None)
        say(small, "one")
        assert say(large, "one") == plain


def test_a_name_is_known_to_every_http_process(folder: Path) -> None:
    words = ("--api-server-count", "2", "--mm-processor-cache-type", "shm")

    def say(process: int, *parts: dict[str, Any], **more: Any) -> str:
        content = [{"type": "text", "text": "the "}, *parts]
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 6,
            "temperature": 0,
            **more,
        }
        with only(process, processes):
            answer = httpx2.post(f"{server.api}/chat/completions", json=body, timeout=60)
        told = answer.json()
        if answer.status_code != 200:
            return f"{answer.status_code} {told['error']['message']}"
        return str(told["choices"][0]["message"]["content"])

    with serving(str(folder), *WORDS, *words) as server:
        wait_for_all(server)
        _, processes = parts_of(server)
        first, second = processes
        said = say(first, part(1, "mine"))
        assert say(second, part(None, "mine")) == said
        assert say(second, part(2, "mine")) == said, "a name is known, whatever comes with it"
        both = say(second, part(None, "mine"), part(2, "other"))
        assert say(first, part(None, "mine"), part(None, "other")) == both
        for name, more in (("yours", {}), ("mine", {"cache_salt": "else"})):
            refused = say(second, part(None, name), **more)
            assert refused.startswith("400 messages[0].content[1].uuid"), refused
            assert "no item of that name is kept; send its content" in refused
