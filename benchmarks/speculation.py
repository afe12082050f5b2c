"""Tokens a second with guesses and without: ``python benchmarks/speculation.py --help``.

Weights of benchmarks are random, so what a trained model would write is prescribed: a logits processor makes
the next token of a given answer the likeliest. Guesses come true as often as that answer follows its prompt.

- ``edit``: a module of Python, and the module with names changed and lines left out;
- ``summary``: a page of these docs, and some of its sentences with words of its own between;
- ``other``: a page, and another page: what guesses cost where they are wrong.

``--together`` keeps headrace's engines in one process and measures them in turns, answer by answer: the
ratios are then those of neighbours in time, whatever the machine's speed does over minutes. ``suffix``
keeps no earlier answers there, which would be the same again.

``--peer vllm=VENV`` and ``--peer llamacpp=VENV`` measure their own speculation on the same tokens, in turns
with ours, at batch 1 (``driven/prescribed.py``). llama.cpp's is the prompt lookup of its Python bindings,
whose environment is given; it reads ``gguf/MODEL-bf16.gguf`` beside the model's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import DRIVEN, Absent, Peers, homes, unset
from processes import Launch, Noise, last_words, stop
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams
from headrace.logits_process import AdapterLogitsProcessor

TEXTS = ("edit", "summary", "other")
DOCS = Path(__file__).parents[1] / "docs"
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}
FORGETS = {"suffix_decoding_max_cached_requests": 0}
PEERS: dict[str, dict[str, dict[str, Any] | None]] = {
    "vllm": {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4},
        "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    },
    "llamacpp": {"none": None, "ngram": {"max_ngram_size": 4, "num_pred_tokens": 8}},
}
"""Engine -> its methods under our names, as it takes them."""
Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Text and batch -> engine and method -> figures of each round."""


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


Texts = Mapping[str, tuple[list[int], list[int]]]
"""Name -> token ids of prompt and answer."""


def texts_of(model: Path, names: Sequence[str], num_prompt_tokens: int, num_tokens: int) -> Texts:
    """Scenarios of these names, at most so long."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {
        name: (
            tokenizer.encode(prompt).ids[:num_prompt_tokens],
            tokenizer.encode(answer).ids[:num_tokens],
        )
        for name, (prompt, answer) in scenarios().items()
        if name in names
    }


def engine_of(args: argparse.Namespace, method: str) -> LLM:
    settings: dict[str, Any] = {"num_threads": args.threads, "max_model_len": 4096}
    guesses = METHODS[method]
    if guesses is not None:
        forgets = args.together and method == "suffix"
        settings["speculative_config"] = guesses | (FORGETS if forgets else {})
    return LLM(str(args.model), logits_processors=[Prescribed], **settings)


def measure_ours(args: argparse.Namespace, method: str, texts: Texts, found: Runs) -> None:
    """One round of a method."""
    with engine_of(args, method) as llm:
        for name, (prompt, answer) in texts.items():
            for batch in args.batch:
                noise = Noise()
                one = measure(llm, prompt, answer, batch) | noise.figures()
                note(found, f"{name}, batch {batch}", f"headrace {method}", one)


def measure_together(args: argparse.Namespace, texts: Texts, found: Runs) -> None:
    """All rounds of all methods, in turns in one process."""
    with contextlib.ExitStack() as opened:
        engines = {m: opened.enter_context(engine_of(args, m)) for m in args.methods}
        for _ in range(args.rounds):
            for name, (prompt, answer) in texts.items():
                for batch in args.batch:
                    for method, llm in engines.items():
                        noise = Noise()
                        one = measure(llm, prompt, answer, batch) | noise.figures()
                        note(found, f"{name}, batch {batch}", f"headrace {method}", one)


def measure_peer(
    peers: Peers, engine: str, args: argparse.Namespace, method: str, found: Runs, file: Path
) -> None:
    """One round of a peer's method, on the texts in ``file``."""
    log = file.with_suffix(f".{engine}.log")
    try:
        process = launched(peers, engine, args, method, file).start(log, stdout=subprocess.PIPE)
    except Absent as absent:
        print(f"{engine} {method} is left out: {absent}", flush=True)
        return
    noise = Noise()
    try:
        output, _ = process.communicate()
    finally:
        stop(process)
    if process.returncode:
        print(f"{engine} {method} is left out: {last_words(log)}", flush=True)
    for line in output.splitlines():
        one = json.loads(line)
        note(found, f"{one.pop('name')}, batch 1", f"{engine} {method}", one | noise.figures())


def launched(
    peers: Peers, engine: str, args: argparse.Namespace, method: str, file: Path
) -> Launch:
    """``prescribed.py`` in a peer's environment. Raises Absent."""
    settings = {
        "model": str(peers.checkpoint(engine, args.model.name, "bf16")),
        "eager": args.eager,
        "speculation": PEERS[engine][method],
        "num_threads": peers.num_threads,
    }
    words = [
        peers.python(engine),
        str(DRIVEN / "prescribed.py"),
        engine,
        json.dumps(settings),
        str(file),
    ]
    threads = {"OMP_NUM_THREADS": str(peers.num_threads)}
    return Launch(words, peers.environment(engine) | threads, unset(engine)[:1])


def note(found: Runs, text: str, way: str, one: dict[str, float]) -> None:
    found.setdefault(text, {}).setdefault(way, []).append(one)
    print(text, way, {k: round(v, 1) for k, v in one.items()}, flush=True)


def table(found: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> None:
    """Medians, the ratio to the same engine's without guesses, the most that others took of the machine.

    The ratio is the median of the rounds' own.
    """
    for text, ways in found.items():
        rates = {w: [r["tokens_per_second"] for r in runs] for w, runs in ways.items()}
        for way, each in rates.items():
            base = rates.get(f"{way.split()[0]} none", each)
            rate = statistics.median(each)
            share = statistics.median(one / none for one, none in zip(each, base, strict=False))
            right, guessed = (
                round(statistics.median(r[k] for r in ways[way])) for k in ("right", "guessed")
            )
            others = max(run["others_pct"] for run in ways[way])
            print(f"| {text} | {way} | {rate:.1f} ({min(each):.1f}-{max(each):.1f}) | {share:.2f}x "
                  f"| {right} of {guessed} | {others:.0f} % |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=256, help="length of the answers")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--engines", nargs="+", help="default: headrace and the peers", metavar="NAME"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine"
    )
    parser.add_argument(
        "--together", action="store_true", help="headrace's engines in one process, in turns"
    )
    parser.add_argument("--eager", action="store_true", help="vLLM without its compiler")
    parser.add_argument(
        "--out", type=Path, help="a file of earlier rounds, which further ones join"
    )
    args = parser.parse_args()
    peers = Peers(homes(args.peer), args.model.parent, args.threads)
    found: Runs = {}
    if args.out is not None and args.out.exists():
        found = json.loads(args.out.read_text())
    texts = texts_of(args.model, args.texts, args.prompt_tokens, args.tokens)
    engines = list(args.engines or ["headrace", *peers.homes])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts.json")
        file.write_text(json.dumps(texts), encoding="utf-8")
        if args.together and "headrace" in engines:
            measure_together(args, texts, found)
            engines.remove("headrace")
        for _ in range(args.rounds):
            for method in args.methods:
                for engine in engines:
                    if engine == "headrace":
                        measure_ours(args, method, texts, found)
                    elif method in PEERS[engine]:
                        measure_peer(peers, engine, args, method, found, file)
    table(found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
