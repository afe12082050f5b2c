"""Tokens a second with guesses and without: ``python benchmarks/speculation.py --help``.

Weights of benchmarks are random, so what a trained model would write is prescribed: a logits processor makes
the next token of a given answer the likeliest. Guesses come true as often as that answer follows its prompt.

- ``edit``: a module of Python, and the module with names changed and lines left out;
- ``summary``: a page of these docs, and some of its sentences with words of its own between;
- ``other``: a page, and another page: what guesses cost where they are wrong.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.logits_process import AdapterLogitsProcessor

DOCS = Path(__file__).parents[1] / "docs"
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}


class Prescribed(AdapterLogitsProcessor):
    """The next token of a request's ``answer`` is by far the likeliest."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        answer = (params.extra_args or {}).get("answer")
        if answer is None:
            return None

        def follow(output_ids: list[int], row: Any) -> Any:
            if len(output_ids) < len(answer):
                row[answer[len(output_ids)]] += 1e4
            return row

        return follow


def scenarios() -> dict[str, tuple[str, str]]:
    """Name -> prompt and answer."""
    source = inspect.getsource(textwrap)[:9000]
    lines = source.replace("chunks", "pieces").replace("self.width", "self.columns").splitlines()
    edited = "\n".join(line for number, line in enumerate(lines) if number % 17 != 5)
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")[:9000]
    sentences = page.replace("\n", " ").split(". ")
    summary = ". In short, ".join(sentences[3::4])
    other = (DOCS / "benchmarking.md").read_text(encoding="utf-8")
    return {"edit": (source, edited), "summary": (page, summary), "other": (page, other)}


def measure(llm: LLM, prompt: list[int], answer: list[int], batch: int) -> dict[str, float]:
    """Tokens a second of decoding; the prompts are in the prefix cache."""
    params = SamplingParams(
        temperature=0, max_tokens=len(answer), ignore_eos=True, extra_args={"answer": answer}
    )
    prompts = [[token, *prompt] for token in range(100, 100 + batch)]
    warm = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(prompts, warm, use_tqdm=False)
    before, start = llm.engine.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.engine.stats()
    assert all(output.outputs[0].token_ids == answer for output in outputs)
    return {
        "tokens_per_second": batch * len(answer) / seconds,
        "drafts": after.num_drafts - before.num_drafts,
        "guessed": after.num_draft_tokens - before.num_draft_tokens,
        "right": sum(after.num_accepted_per_position) - sum(before.num_accepted_per_position),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256, help="length of the answers")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(args.rounds):
        for method in args.methods:
            settings = {} if METHODS[method] is None else {"speculative_config": METHODS[method]}
            with LLM(
                args.model, max_model_len=4096, logits_processors=[Prescribed], **settings
            ) as llm:
                tokenizer = llm.get_tokenizer()
                for name, texts in scenarios().items():
                    prompt, answer = (tokenizer.encode(text) for text in texts)
                    for batch in args.batch:
                        key = f"{name}, batch {batch}"
                        one = measure(llm, prompt[:3000], answer[: args.tokens], batch)
                        found.setdefault(key, {}).setdefault(method, []).append(one)
                        print(key, method, {k: round(v, 1) for k, v in one.items()}, flush=True)
    for key, methods in found.items():
        rates = {
            m: statistics.median(r["tokens_per_second"] for r in runs)
            for m, runs in methods.items()
        }
        base = rates.get("none", next(iter(rates.values())))
        print(key, {m: f"{rate:.1f} tokens/s, {rate / base:.2f} x" for m, rate in rates.items()})
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
