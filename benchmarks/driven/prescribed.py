"""Peers' own speculation on prescribed answers: ``prescribed.py ENGINE SETTINGS FILE``.

SETTINGS are a JSON object: ``model`` (a path), ``speculation`` (the engine's own config, or null), and what
else the engine wants. FILE has a JSON object: name -> [prompt, answer], both token ids. Writes a line of JSON
for each name: tokens a second of decoding, with the prompt in the cache, and how many guesses were right.
Everything that the engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class VLLM:
    """vLLM in this process. Its config refuses logits processors beside speculation, so the runner's own
    sampling is given logits in which the answer's next token is by far the likeliest."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._module = importlib.import_module("vllm")
        self._prescribe()
        self._llm = self._module.LLM(
            model=settings["model"], dtype="bfloat16", max_model_len=4096, max_num_seqs=1,
            speculative_config=settings["speculation"], disable_log_stats=False,
            async_scheduling=False, enforce_eager=settings["eager"],
        )  # fmt: skip
        self.answer: list[int] = []
        self._num_prompt_tokens = 0

    def _prescribe(self) -> None:
        runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        own = runner._sample

        def sample(this: Any, logits: Any, metadata: Any) -> Any:
            if logits is not None and self.answer:
                done = int(this.input_batch.num_tokens_no_spec[0]) - self._num_prompt_tokens
                for row, token in enumerate(self.answer[done : done + len(logits)]):
                    logits[row, token] += 1e4
            return own(this, logits, metadata)

        runner._sample = sample

    def run(self, prompt: list[int], answer: list[int]) -> dict[str, float]:
        self._generate(prompt, 1)
        self.answer, self._num_prompt_tokens = answer, len(prompt)
        before, start = self._counts(), time.perf_counter()
        output = self._generate(prompt, len(answer))
        seconds = time.perf_counter() - start
        self.answer = []
        if output != answer:
            raise SystemExit("the answer is not the prescribed one")
        guessed, right = (b - a for a, b in zip(before, self._counts()))
        return {"tokens_per_second": len(answer) / seconds, "guessed": guessed, "right": right}

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        params = self._module.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _counts(self) -> tuple[float, float]:
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        return found.get(names[0], 0), found.get(names[1], 0)


class LlamaCpp:
    """llama.cpp by its Python bindings, whose prompt lookup is the draft model."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        module = importlib.import_module("llama_cpp")
        draft = None
        if settings["speculation"] is not None:
            lookup = importlib.import_module("llama_cpp.llama_speculative")
            draft = self._counted(lookup.LlamaPromptLookupDecoding(**settings["speculation"]))
        self._llama = module.Llama(
            model_path=settings["model"], n_ctx=4096, n_threads=settings["num_threads"],
            n_threads_batch=settings["num_threads"], flash_attn=True, verbose=False, draft_model=draft,
            logits_all=draft is not None,  # without it the bindings keep rows for one batch only, and fail
        )  # fmt: skip
        self._guessed = 0

    def _counted(self, draft: Any) -> Any:
        def guess(ids: Any, /, **words: Any) -> Any:
            guesses = draft(ids, **words)
            self._guessed += len(guesses)
            return guesses

        return guess

    def run(self, prompt: list[int], answer: list[int]) -> dict[str, float]:
        self._llama.reset()
        self._llama.eval(prompt[:-1])
        self._guessed, start = 0, time.perf_counter()
        made: list[int] = []
        evaluated = 0

        def follow(ids: Any, row: Any) -> Any:  # ids have the guesses, too
            row[answer[len(made)]] += 1e4
            return row

        own = self._llama.eval

        def evaluate(tokens: Any) -> None:
            nonlocal evaluated
            evaluated += 1
            own(tokens)

        self._llama.eval = evaluate
        try:
            for token in self._llama.generate(prompt, temp=0.0, logits_processor=[follow]):
                made.append(token)
                if len(made) == len(answer):
                    break
        finally:
            self._llama.eval = own
        seconds = time.perf_counter() - start
        if made != answer:
            raise SystemExit("the answer is not the prescribed one")
        right = len(answer) - evaluated if self._guessed else 0
        rate = len(answer) / seconds
        return {"tokens_per_second": rate, "guessed": self._guessed, "right": right}


ENGINES = {"vllm": VLLM, "llamacpp": LlamaCpp}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    engine = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    texts = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    for name, (prompt, answer) in texts.items():
        print(json.dumps({"name": name, **engine.run(prompt, answer)}), file=answers)


if __name__ == "__main__":
    main()
