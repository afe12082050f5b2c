"""Outputs of prompts without tokens continue a text: their first word keeps its space."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import CharTokenizer

from headrace_core.request import CoreRequest, PromptEmbeds
from headrace_core.sampling.params import SamplingParams
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.output_processing.output import _detokenizer


class Words(CharTokenizer):
    """Token 0 is special; every other shows a space first, except at a text's beginning."""

    special_token_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return f" {chr(token_id)}".encode()

    def first_token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


@pytest.mark.parametrize(("embedded", "text"), [(False, "x y"), (True, " x y")])
def test_the_first_word(embedded: bool, text: str) -> None:
    params = SamplingParams()
    embeds = PromptEmbeds.of("float32", 1, 1, bytes(4)) if embedded else None
    core = CoreRequest("r#0", [0], params, frozenset(), 9, 0.0, prompt_embeds=embeds)
    request = PreparedRequest("r", None, [0], params, [core], 0.0)
    tokenizer: Any = Words()
    detokenizer = _detokenizer(tokenizer, request)
    assert detokenizer is not None
    assert detokenizer.feed([ord("x"), ord("y")]) == text
