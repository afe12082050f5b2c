"""POST /v2/embed: Cohere's fields, forms of vectors, refusals, and Cohere's own client."""

from __future__ import annotations

import base64
import struct
from typing import Any

import cohere
import pytest

from headrace_core.arrays import PackedArray
from headrace_core.errors import PromptTooLong
from headrace_core.pooling import PoolingParams
from headrace_server.pooling.vectors import as_bits
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

URL = "/v2/embed"
PROMPTS = {"query": "Q: ", "Passage": "P: ", "Clustering": "C: ", "s2s": "S: "}


def fake(**changes: Any) -> FakeEngine:
    return FakeEngine(model=fake_pooling_model("embed", **{"embedding_size": 8, **changes}))


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["message"] == told["error"]["message"]
    assert told["id"] == answer.headers.get("x-request-id", told["id"])
    return told["error"]


async def test_the_answer_has_every_field(connect: Any) -> None:
    engine = fake(normalize=False)
    answer = await post(
        connect(engine), model="fake-model", texts=["Hi", ""], input_type="search_document"
    )
    assert answer.pop("id")
    assert answer == {
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [[0, 72, 105, 0, 0, 0, 0, 0], [0] * 8]},
        "texts": ["Hi", ""],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}},
    }  # fmt: skip
    (call, _) = engine.pooled
    params = PoolingParams(truncate_prompt_tokens=-1, truncation_side="right")
    params.verify("embed", engine.model.pooling)
    assert (call.params, call.add_special_tokens) == (params, True)


async def test_all_forms(connect: Any) -> None:
    kinds = ["float", "base64", "binary", "ubinary", "float"]
    answer = await post(connect(fake()), texts=["ab"], embedding_types=kinds)
    found = answer["embeddings"]
    assert list(found) == kinds[:-1]
    (vector,) = found["float"]
    assert struct.unpack("<8f", base64.b64decode(found["base64"][0])) == pytest.approx(vector)
    assert (found["binary"], found["ubinary"]) == ([[0b01100000 - 128]], [[0b01100000]])


def test_bits_are_numpys() -> None:
    np = pytest.importorskip("numpy")
    numbers = np.random.default_rng(0).standard_normal(64).astype("float32")
    numbers[3], numbers[9] = 0.0, -0.0
    values = PackedArray("float32", (64,), numbers.tobytes())
    packed = np.packbits(numbers > 0)
    for signed, want in ((False, packed), (True, packed.astype(int) - 128)):
        text = b"".join(as_bits(values, signed=signed)).decode()
        assert text == str(want.tolist()).replace(" ", "")


async def test_inputs_are_texts_in_parts(connect: Any) -> None:
    engine = fake()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await post(connect(engine), inputs=[{"content": parts}, {"content": parts[:1]}])
    assert [call.prompt_text for call in engine.pooled] == ["a\nb", "a"]
    assert "texts" not in answer


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, None), ("search_query", "query"), ("search_document", "Passage"),
        ("clustering", "Clustering"), ("s2s", "s2s"), ("query", "query"),
    ],
)  # fmt: skip
async def test_input_types_are_prompts(connect: Any, given: str | None, name: str | None) -> None:
    engine = fake(prompts=PROMPTS)
    await post(connect(engine), texts=["a"], input_type=given)
    assert engine.pooled[0].params.prompt_name == name


async def test_input_types_without_prompts(connect: Any) -> None:
    """A checkpoint without any takes all of Cohere's; one with a prompt for queries embeds documents as
    they are; but a purpose that its prompts do not know is not passed over."""
    for given in ("search_query", "search_document", "classification", "clustering"):
        engine = fake()
        await post(connect(engine), texts=["a"], input_type=given)
        assert engine.pooled[0].params.prompt_name is None
    client = connect(fake(prompts={"query": "Q: "}))
    await post(client, texts=["a"], input_type="search_document")
    told = await refused(client, texts=["a"], input_type="clustering")
    assert "must be one of ['search_query', 'search_document', 'query']" in told["message"]
    told = await refused(connect(fake()), texts=["a"], input_type="other")
    assert "'classification', 'clustering'" in told["message"]
    assert told["param"] == "input_type"
    assert "images" in (await refused(client, texts=["a"], input_type="image"))["message"]


@pytest.mark.parametrize(
    ("truncate", "most", "keep", "side"),
    [
        (None, None, -1, "right"), ("END", 3, 3, "right"), ("START", 3, 3, "left"),
        ("END", 10**6, 4096, "right"), ("NONE", None, None, "right"), ("NONE", 5000, None, "right"),
    ],
)  # fmt: skip
async def test_truncation(
    connect: Any, truncate: str | None, most: int | None, keep: int | None, side: str
) -> None:
    engine = fake()
    await post(connect(engine), texts=["abcdef"], truncate=truncate, max_tokens=most)
    params = engine.pooled[0].params
    assert (params.truncate_prompt_tokens, params.truncation_side) == (keep, side)


async def test_long_texts(connect: Any) -> None:
    client = connect(fake(max_model_len=8, normalize=False))
    told = await refused(client, texts=["x" * 20], truncate="NONE")
    assert told["code"] == "context_length_exceeded"
    assert told["param"] == "texts"
    answer = await post(client, texts=["x" * 20])
    assert answer["meta"]["billed_units"]["input_tokens"] == 8


async def test_dimensions(connect: Any) -> None:
    client = connect(fake(matryoshka=(4, 8)))
    answer = await post(client, texts=["a"], output_dimension=4)
    assert len(answer["embeddings"]["float"][0]) == 4
    told = await refused(client, texts=["a"], output_dimension=5)
    assert told["param"] == "output_dimension"
    told = await refused(client, texts=["a"], output_dimension=4, embedding_types=["binary"])
    assert "do not fill whole bytes" in told["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"), ({"texts": ["a"], "inputs": [{"content": [{"text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"), ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["uint8", "float"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs[0]"),
        ({"texts": ["a"], "priority": 1}, "priority"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(connect: Any, body: Any, param: str) -> None:
    told = await refused(connect(fake()), **body)
    assert told["param"].startswith(param), told


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({"texts": ["a"], "output_dimension": 5}, "output_dimension = 5: must be"),
        ({"texts": ["a"], "output_dimension": 50}, "output_dimension = 50: must be"),
        ({"texts": ["a", "b"]}, "texts: the answer would have 2 rows"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}] * 2}, "inputs: the answer would have"),
    ],
)  # fmt: skip
async def test_messages_name_the_client_s_fields(connect: Any, body: Any, begins: str) -> None:
    engine = fake(matryoshka=(4, 8))
    limits = {} if "output_dimension" in body else {"max_answer_numbers": 8}
    told = await refused(connect(engine, **limits), **body)
    assert told["message"].startswith(begins)


@pytest.mark.parametrize(
    ("field", "near"), [("text", "texts"), ("dimensions", "output_dimension"), ("zzz", None)]
)
async def test_only_near_fields_are_suggested(connect: Any, field: str, near: str | None) -> None:
    told = await refused(connect(fake(), strict_requests=True), texts=["a"], **{field: 1})
    hint = "" if near is None else f"; the nearest known field is {near!r}"
    assert told["message"] == f"{field!r}: unknown field{hint}"


async def test_a_text_that_is_too_long_is_told_in_cohere_s_words(connect: Any) -> None:
    """The engine's advice names a field that this wire does not have."""
    hint = "Shorten the prompt, or let truncate_prompt_tokens cut it."
    engine = fake()
    engine.reject = PromptTooLong(8, 9, hint=hint)
    told = await refused(connect(engine), texts=["a" * 9], truncate="NONE")
    assert told["message"] == (
        "This model's maximum context length is 8 tokens. However, you requested 9 tokens (9 in the "
        "prompt). Shorten the text, or cut it with truncate 'START' or 'END'."
    )
    assert (told["param"], told["code"]) == ("texts", "context_length_exceeded")


async def test_errors_are_cohere_s_on_the_whole_way(connect: Any) -> None:
    keyed = await connect(fake(), api_key=["secret"]).post(URL, json={"texts": ["a"]})
    assert (keyed.status_code, keyed.json()["message"]) == (401, "Unauthorized")
    missing = await connect(fake()).post(URL, json={"texts": ["a"], "model": "other"})
    assert missing.status_code == 404
    assert "'other' is not served" in missing.json()["message"]
    other = await connect(FakeEngine()).post(URL, json={"texts": ["a"]})
    assert other.status_code == 400
    assert "does not support Embed API" in other.json()["message"]


@pytest.mark.parametrize("version", [1, 2])
async def test_the_cohere_clients(live: Any, version: int) -> None:
    server = await live(fake(normalize=False, prompts=PROMPTS))
    asked: Any = {"texts": ["ab", "c"], "model": "fake-model", "input_type": "search_query"}
    if version == 2:
        client = cohere.AsyncClientV2(api_key="x", base_url=server.url)
        answer = await client.embed(**asked, embedding_types=["float", "ubinary"])
    else:  # the old client's embed is another path; its v2 is the same wire
        client = cohere.AsyncClient(api_key="x", base_url=server.url).v2
        answer = await client.embed(**asked, embedding_types=["float", "ubinary"])
    assert answer.embeddings.float_ is not None
    assert len(answer.embeddings.float_) == 2
    assert answer.embeddings.ubinary is not None
    assert answer.texts == ["ab", "c"]
    assert answer.meta.billed_units.input_tokens > 0
    with pytest.raises(cohere.BadRequestError) as caught:
        await client.embed(**{**asked, "input_type": "classification"})
    assert "input_type" in caught.value.body["message"]
