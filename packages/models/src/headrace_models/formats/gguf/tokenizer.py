"""The tokenizer in a GGUF file's metadata, as the ``tokenizer.json`` it was converted from. No torch.

Two kinds are common: byte-level BPE (``gpt2``), whose pieces and merges are in the file and whose way
of cutting text is named; and sentencepiece's (``llama``), whose pieces have scores instead of merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"
MAX_PIECES = 4_000_000
MAX_PIECE_LENGTH = 4096
"""Characters. Every way to cut a piece in two is tried, so that time goes by the square."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Cutting(NamedTuple):
    """Rules by which a byte-level BPE cuts text before it merges."""

    pattern: str | None = None
    """None: GPT-2's own."""
    digits: bool = False
    """Digits stand alone."""
    nfc: bool = False
    whole_pieces: bool = False
    """A piece of text that is in the vocabulary is not merged up to."""
    begins: bool = False
    """A begin token is added where the file does not say."""


_LLAMA3 = Cutting(_LETTERS + r"|\p{N}{1,3}" + _REST, whole_pieces=True, begins=True)
_QWEN2 = Cutting(_LETTERS + r"|\p{N}" + _REST, nfc=True)
CUTTINGS: Mapping[str, Cutting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), Cutting()),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"),
                    Cutting(digits=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "o200k"), Cutting(_CASED)),
}  # fmt: skip
"""Cutting by ``tokenizer.ggml.pre``."""


class GGUFTokenizer(NamedTuple):
    """Content of the tokenizer's files that would lie beside a checkpoint."""

    tokenizer: str
    """``tokenizer.json``."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``, with the chat templates."""


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Translate the metadata of a file.

    Raises:
        ModelError: there is no tokenizer in it, or one of another kind; says what to do.
    """
    vocabulary = _Vocabulary(path, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise _elsewhere(path, f"tokenizer.ggml.model = {kind!r}: must be gpt2 or llama")
    content, begins = make(vocabulary)
    content["version"] = "1.0"
    content["added_tokens"] = list(vocabulary.added())
    return GGUFTokenizer(
        json.dumps(content, ensure_ascii=False),
        {**vocabulary.config(begins), **_templates(metadata)},
    )


class _Vocabulary:
    """Pieces, their kinds and scores, checked to be of equal number."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, metadata
        self.pieces = self._texts("tokens")
        if not 0 < len(self.pieces) <= MAX_PIECES:
            raise _elsewhere(path, f"tokenizer.ggml.tokens has {len(self.pieces)} entries")
        longest = max(map(len, self.pieces))
        if longest > MAX_PIECE_LENGTH:
            raise _elsewhere(path, f"tokenizer.ggml.tokens has an entry of {longest} characters, more "
                             f"than {MAX_PIECE_LENGTH}")  # fmt: skip
        self.types = self._numbers("token_type", 1)
        self.scores = self._numbers("scores", 0.0)

    def _texts(self, key: str) -> list[str]:
        values = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise _elsewhere(self.path, f"tokenizer.ggml.{key} is not a list of texts")
        return values

    def _numbers(self, key: str, default: float) -> Sequence[float]:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return [default] * len(self.pieces)
        if (
            not isinstance(values, list)
            or len(values) != len(self.pieces)
            or not all(isinstance(value, int | float) for value in values)
        ):
            raise _elsewhere(
                self.path, f"tokenizer.ggml.{key} is not a list of {len(self.pieces)} numbers"
            )
        return values

    def ids(self) -> dict[str, int]:
        """Id by piece; of two pieces that are spelled alike the first counts."""
        found: dict[str, int] = {}
        for index, piece in enumerate(self.pieces):
            found.setdefault(piece, index)
        return found

    def merges(self) -> list[list[str]]:
        """The file's own, "left right" each."""
        pairs = [text.split(" ", 1) for text in self._texts("merges")]
        ids = self.ids()
        for pair in pairs:
            if len(pair) != 2 or any(piece not in ids for piece in (*pair, "".join(pair))):
                raise _elsewhere(
                    self.path, f"tokenizer.ggml.merges has {pair!r}, which makes no piece"
                )
        return pairs

    def merges_by_score(self) -> list[list[str]]:
        """Every way to make a piece of two, the best piece first: what sentencepiece does greedily."""
        ids = self.ids()
        found = []
        for piece, index in ids.items():
            if self.types[index] in (_CONTROL, _UNUSED):
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in ids and right in ids:
                    found.append((-self.scores[index], ids[left], ids[right], left, right))
        return [[left, right] for _, _, _, left, right in sorted(found)]

    def added(self) -> Iterator[dict[str, Any]]:
        """Control tokens, and those of the user, which are found in text before all else."""
        for piece, index in self.ids().items():
            if self.types[index] in (_CONTROL, _USER_DEFINED, _UNKNOWN):
                yield {
                    "id": index, "content": piece, "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False,
                    "special": self.types[index] != _USER_DEFINED,
                }  # fmt: skip

    def piece(self, name: str) -> str | None:
        """The text of a token that the metadata names by its id."""
        index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(index, int) or not 0 <= index < len(self.pieces):
            return None
        return self.pieces[index]

    def config(self, begins: bool) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        found: dict[str, Any] = {
            f"{short}_token": text
            for name, short in names.items()
            if (text := self.piece(name)) is not None
        }
        for name, default in (("bos", begins), ("eos", False)):
            wanted = self.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
            found[f"add_{name}_token"] = wanted is True
        return found


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    cutting = CUTTINGS.get(str(name))
    if cutting is None:
        raise _elsewhere(
            vocabulary.path, f"tokenizer.ggml.pre = {name!r}: known are {', '.join(CUTTINGS)}"
        )
    own = cutting.pattern is None
    steps: list[dict[str, Any]] = []
    if cutting.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if not own:
        pattern = {"Regex": cutting.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**bytes_, "use_regex": own})
    model = {
        "type": "BPE", "vocab": vocabulary.ids(), "merges": vocabulary.merges(),
        "byte_fallback": False, "fuse_unk": False, "ignore_merges": cutting.whole_pieces,
    }  # fmt: skip
    return {
        "normalizer": {"type": "NFC"} if cutting.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**bytes_, "use_regex": True},
        "model": model,
    }, cutting.begins


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    after: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "type": "BPE", "vocab": vocabulary.ids(), "merges": vocabulary.merges_by_score(),
        "byte_fallback": True, "fuse_unk": True, "unk_token": vocabulary.piece("unknown"),
    }  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
        "model": model,
    }, True


def _templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template, and others by name."""
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: text for name, text in metadata.items()
             if name.startswith(f"{key}.") and isinstance(text, str)}  # fmt: skip
    usual = metadata.get(key)
    if isinstance(usual, str):
        named["default"] = usual
    return {"chat_template": named} if named else {}


def _elsewhere(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path}: its tokenizer cannot be read: {why}. Name the original model's folder with "
        "--tokenizer"
    )
