"""``logit_bias`` as JSON: the range, the number of tokens, and numbers that JSON does not have."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from servers import RunningServer

ASKED = {
    "prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
Post = Callable[[str], tuple[int, Any]]


@pytest.fixture
def post(server: RunningServer) -> Post:
    address = server.api.split("//")[1].split("/")[0]

    def send(bias: str) -> tuple[int, Any]:
        body = json.dumps(ASKED)[:-1] + f', "logit_bias": {bias}}}'
        connection = http.client.HTTPConnection(address, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, found

    return send


def test_a_bias_beyond_a_hundred_counts_as_a_hundred(post: Post) -> None:
    status, plain = post("null")
    assert status == 200
    first = plain["choices"][0]["token_ids"][0]
    ids = {}
    for value in ("-100", "-1000", "-1e9"):
        status, found = post(f'{{"{first}": {value}}}')
        assert status == 200
        ids[value] = found["choices"][0]["token_ids"]
        assert first not in ids[value]
    assert ids["-100"] == ids["-1000"] == ids["-1e9"]
    status, found = post('{"17": 1e9}')
    assert found["choices"][0]["token_ids"] == [17] * 4


@pytest.mark.parametrize("value", ["-Infinity", "Infinity", "NaN", "-1e999"])
def test_numbers_that_json_does_not_have(post: Post, value: str) -> None:
    status, found = post(f'{{"17": {value}}}')
    assert status == 400
    assert found["error"]["message"].startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("bias", ['{"17": -1.1e9}', '{"17": "x"}', '{"17": null}', '{"-1": 1}',
                                  '{"x": 1}', '{"999999": 1}', "[]", "3"])  # fmt: skip
def test_what_is_no_bias_is_named(post: Post, bias: str) -> None:
    status, found = post(bias)
    assert status == 400
    assert found["error"]["param"] in ("logit_bias", "logit_bias.17")  # where the value is


def test_how_many_tokens_may_have_one(post: Post) -> None:
    assert post(json.dumps({str(i): -1 for i in range(1024)}))[0] == 200
    status, found = post(json.dumps({str(i): -1 for i in range(1025)}))
    assert status == 400
    assert "1024" in found["error"]["message"]
