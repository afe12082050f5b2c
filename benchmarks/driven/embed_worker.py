"""One embedding engine behind lines of JSON: ``embed_worker.py ENGINE SETTINGS``.

Settings are a JSON object: ``model`` (a folder), ``dtype`` (``bfloat16`` or ``float32``), ``batch``. A
command is ``{"texts": [...]}``; the answer has the seconds and the first vectors, so that engines can be
compared in what they say too. Everything that the engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

SHOWN = 16
"""Vectors that an answer holds."""
MAX_TOKENS = 256
Vectors = Sequence[Sequence[float]]
Embed = Callable[[list[str]], Vectors]


def sentence_transformers(settings: Mapping[str, Any]) -> tuple[Embed, str]:
    """Sentence Transformers, which sorts by length and pads each batch."""
    import torch

    module = importlib.import_module("sentence_transformers")
    kind = getattr(torch, settings["dtype"])
    model = module.SentenceTransformer(
        settings["model"], device="cpu", model_kwargs={"dtype": kind}
    )
    model.max_seq_length = MAX_TOKENS

    def embed(texts: list[str]) -> Vectors:
        found = model.encode(texts, batch_size=settings["batch"], show_progress_bar=False,
                             normalize_embeddings=True, convert_to_tensor=True)  # fmt: skip
        return found.float().numpy()  # type: ignore[no-any-return]

    return embed, module.__version__


def openvino(settings: Mapping[str, Any]) -> tuple[Embed, str]:
    """OpenVINO GenAI's pipeline; texts sorted by length, as it pads each batch."""
    genai = importlib.import_module("openvino_genai")
    config = genai.TextEmbeddingPipeline.Config()
    config.max_length, config.normalize = MAX_TOKENS, True
    config.pooling_type = genai.TextEmbeddingPipeline.PoolingType.MEAN
    kind = {"bfloat16": "bf16", "float32": "f32"}[settings["dtype"]]
    pipeline = genai.TextEmbeddingPipeline(
        settings["model"], "CPU", config, INFERENCE_PRECISION_HINT=kind
    )

    def embed(texts: list[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: list[Any] = [None] * len(texts)
        for at in range(0, len(order), settings["batch"]):
            part = order[at : at + settings["batch"]]
            for i, vector in zip(part, pipeline.embed_documents([texts[i] for i in part])):
                found[i] = vector
        return found

    return embed, metadata.version("openvino-genai")


def llm_style(module_name: str, settings: Mapping[str, Any]) -> tuple[Embed, str]:
    """headrace, and vLLM, whose offline API has the same form."""
    module = importlib.import_module(module_name)
    given = {"model": settings["model"], "dtype": settings["dtype"], "max_model_len": MAX_TOKENS}
    if module_name == "vllm":
        given["runner"] = "pooling"
    llm = module.LLM(**given)

    def embed(texts: list[str]) -> Vectors:
        outputs = llm.embed(texts, use_tqdm=False, **_cut(module))
        return [output.outputs.embedding for output in outputs]

    return embed, str(module.__version__)


def _cut(module: Any) -> dict[str, Any]:
    """Longer texts are cut, as the others do."""
    if module.__name__ == "vllm":
        return {"tokenization_kwargs": {"truncation": True, "max_length": MAX_TOKENS}}
    return {"truncate_prompt_tokens": -1}


def make(engine: str, settings: Mapping[str, Any]) -> tuple[Embed, str]:
    """The engine of that name, and its version."""
    if engine == "sentence-transformers":
        return sentence_transformers(settings)
    return openvino(settings) if engine == "openvino" else llm_style(engine, settings)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    begin = time.perf_counter()
    embed, version = make(sys.argv[1], json.loads(sys.argv[2]))
    embed(["ready?"])
    print(json.dumps({"ready": time.perf_counter() - begin, "version": version}), file=answers)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - start
        shown = [[float(x) for x in vector] for vector in vectors[:SHOWN]]
        answer = {"seconds": seconds, "count": len(vectors), "vectors": shown}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
