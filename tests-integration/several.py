"""Five kinds of models, requests to them, and what stays the same in their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from pooling_checkpoints import bert, qwen3, text
from speech_checkpoints import save_whisper, sound, wav

from headrace import demo

KEY = {"Authorization": "Bearer several"}
CHAT = {"name": "chat", "model": str(demo.path()), "max_model_len": 512,
        "kv_cache_memory_bytes": "64M"}  # fmt: skip
GUEST = CHAT | {"name": "guest", "kv_cache_ahead_bytes": -1}
"""Comes and goes; all of its cache is resident while it is there."""


def models_file(folder: Path, *names: str) -> Path:
    """A file of entries with these of the five models, their checkpoints beside it."""
    makers = {
        "small": bert,
        "large": qwen3,
        "rank": lambda path: bert(path, 1),
        "ears": save_whisper,
    }
    entries: list[dict[str, Any]] = []
    for name in names:
        if name == "chat":
            entries.append(CHAT)
            continue
        path = folder / name
        path.mkdir()
        makers[name](path)
        entries.append({"name": name, "model": str(path)})
        if name == "large":
            entries[-1]["runner"] = "pooling"
    file = folder / "models.json"
    file.write_text(json.dumps(entries))
    return file


def request(name: str, seed: int) -> tuple[str, dict[str, Any]]:
    """Path, and arguments of a POST, of a request that the model can answer; many seeds, many
    requests."""
    words = text(3 + seed % 20, seed)
    body: dict[str, Any] = {"model": name}
    if name == "ears":
        file = ("a.wav", wav(sound(seed, 0.5 + seed % 3 * 0.4)))
        # Tiny and random as it is, it falls back to sampling; a seed says which.
        form = {"model": name, "seed": str(seed), "language": "en"}
        return "/v1/audio/transcriptions", {"files": {"file": file}, "data": form}
    if name in ("chat", "guest"):
        body |= {"messages": [{"role": "user", "content": words}], "temperature": 0}
        body |= {"max_tokens": 16, "stream": seed % 2 == 0}
        return "/v1/chat/completions", {"json": body}
    if name == "rank":
        body |= {"query": words, "documents": [text(4, seed + i) for i in range(3)]}
        return "/rerank", {"json": body}
    inputs = [words, text(5, seed + 1)]
    return "/v1/embeddings", {"json": body | {"input": inputs, "encoding_format": "base64"}}


def comparable(answer: httpx.Response) -> Any:
    """What an answer says, whenever it is given."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(event)["choices"] for event in events]
        return "".join(c[0]["delta"].get("content") or "" for c in chunks if c)
    told = answer.json()
    if "choices" in told:
        return told["choices"][0]["message"]["content"]
    return told.get("data") or told.get("results") or told["text"]
