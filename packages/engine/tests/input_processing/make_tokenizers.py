"""Small tokenizers of both byte kinds and a word kind, trained here, written as checkpoints are."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog",
    "Hello world! How are you today?",
    "def f(x):\n    return x + 1\n\n",
    "ünïcödé straße naïve 你好世界 你好 привет мир 😀😀",
    "numbers 1 22 333 4444  two  spaces",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@functools.cache
def folder(kind: str) -> Path:
    """A checkpoint folder with a tokenizer: ``byte-level``, ``llama``, ``gemma``, ``metaspace`` or
    ``word``."""
    path = Path(tempfile.mkdtemp(prefix=f"tokenizer-{kind}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    write(path, {"byte-level": _byte_level, "word": _word}.get(kind, lambda: _metaspace(kind))())
    return path


def write(path: Path, backend: Backend, **config: Any) -> None:
    """Write tokenizer.json and its companions."""
    spec = json.loads(backend.to_str())
    # Byte tokens are ordinary vocabulary, not added tokens.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    (path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, **config}), encoding="utf-8"
    )
    (path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}), encoding="utf-8"
    )


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens(["<tool call>"])
    _begin_with_bos(backend)
    return backend


def _metaspace(kind: str) -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    if kind == "llama":
        steps.insert(0, normalizers.Prepend("▁"))
    replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        backend.normalizer = normalizers.Sequence(steps)
        strip = [decoders.Strip(" ", 1, 0)] if kind == "llama" else []
        backend.decoder = decoders.Sequence(replace + strip)
    byte_tokens = [] if kind == "metaspace" else [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
            limit_alphabet=60,
            show_progress=False,
        ),
    )
    _begin_with_bos(backend)
    return backend


def _word() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    return backend


def _begin_with_bos(backend: Backend) -> None:
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
