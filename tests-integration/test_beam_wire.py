"""Beam search over HTTP equals beam search offline."""

from __future__ import annotations

import openai

from headrace import LLM
from headrace_core.sampling.params import BeamSearchParams

PROMPT = "The red box is in the"


def test_beams_over_http_equal_those_offline(server):
    with LLM() as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=1.5)
        (found,) = llm.beam_search([{"prompt": PROMPT}], params)
        offline = [sequence.output_token_ids for sequence in found.sequences]
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        asked = {
            "model": "headrace-demo", "prompt": PROMPT, "n": 3, "max_tokens": 12, "temperature": 0,
            "extra_body": {
                "use_beam_search": True, "length_penalty": 1.5, "return_token_ids": True,
            },
        }  # fmt: skip
        answer = client.completions.create(**asked)
        streamed = {
            choice.index: choice.text
            for chunk in client.completions.create(**asked, stream=True)
            for choice in chunk.choices
        }
        chat = client.chat.completions.create(
            model="headrace-demo",
            messages=[{"role": "user", "content": "What is 5 + 6?"}],
            n=2,
            max_tokens=20,
            extra_body={"use_beam_search": True},
        )
    assert [choice.token_ids for choice in answer.choices] == offline
    assert streamed == {choice.index: choice.text for choice in answer.choices}
    assert chat.choices[0].message.content == "5 + 6 = 11."
