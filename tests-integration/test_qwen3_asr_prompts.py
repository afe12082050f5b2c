"""Qwen3-ASR in the whole engine: a transcript, whose language is found where none is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from speech_checkpoints import RATE, save_qwen3_asr, sound, token_ids

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
LANGUAGES = {"German": "de", "English": "en", "French": "fr"}
ASKED = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>"
    "<|im_end|>\n<|im_start|>assistant\nlanguage{}"
)


def test_transcripts(tmp_path: Path) -> None:
    save_qwen3_asr(tmp_path)
    clip = (sound(1, 1.5), RATE)

    def continued(llm: LLM, context: str, begun: str, **settings: Any) -> Any:
        prompt = {"prompt": ASKED.format(context, begun), "multi_modal_data": {"audio": clip}}
        params = SamplingParams(temperature=0, **settings)
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

    options: dict[str, Any] = {"temperature": [0], "max_tokens": 8, "use_tqdm": False}
    with LLM(str(tmp_path), **SETTINGS) as llm:
        [found] = llm.transcribe(clip, language="fr", prompt="names", **options)
        expected = continued(llm, "names", " French<asr_text>", max_tokens=8).text
        assert found.text == expected.strip()
        first = {token_ids(tmp_path, f" {name}")[0]: name for name in LANGUAGES}
        told = continued(llm, "", "", max_tokens=1, allowed_token_ids=sorted(first))
        [detected] = llm.transcribe(clip, **options)
        name = first[told.token_ids[0]]
        assert detected.language == LANGUAGES[name]
        expected = continued(llm, "", f" {name}<asr_text>", max_tokens=8).text
        assert detected.text == expected.strip()
        with pytest.raises(RequestError, match="only writes down what is said"):
            llm.translate(clip, use_tqdm=False)
