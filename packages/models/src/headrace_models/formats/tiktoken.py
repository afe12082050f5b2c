"""``tiktoken.model``, the tokenizer of Kimi's checkpoints, as the ``tokenizer.json`` that does the same. No
torch.

The file has a token in base64 and its rank in each line. ``tokenizer_config.json`` lists further tokens, and
names a Python file; of that nothing is run, but it holds the pattern by which text is cut, a constant that is
read from its source.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import ModelError
from headrace_models.formats.byte_ranks import added_token, byte_level, merges_of, spelled

TIKTOKEN = "tiktoken.model"
_CONFIG = "tokenizer_config.json"
_PATTERN = "pat_str"
MAX_FILE_BYTES = 64 << 20
MAX_CODE_BYTES = 1 << 20
MAX_TOKENS = 4_000_000
MAX_TOKEN_BYTES = 1024
"""Limit of one token's bytes: all ways to cut it in two are looked up."""


class TiktokenTokenizer(NamedTuple):
    """Content of the tokenizer's files that would lie beside a checkpoint."""

    tokenizer: str
    """``tokenizer.json``."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``, with the chat template of the folder."""


def tiktoken_tokenizer(path: Path) -> TiktokenTokenizer:
    """Translate a file, with those beside it.

    Raises:
        ModelError: one is damaged or missing; says which, and where.
    """
    config = _config(path.parent / _CONFIG)
    ranks = _ranks(path)
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    added = dict(_added(path.parent / _CONFIG, config))
    for index, entry in added.items():
        if index < len(ranks) or vocabulary.setdefault(entry["content"], index) != index:
            raise _damaged(
                path.parent / _CONFIG,
                f"added_tokens_decoder.{index}: {entry['content']!r:.80} is another token already",
            )
    whole = byte_level(
        _pattern(path.parent, config), vocabulary, merges_of(ranks), list(added.values())
    )
    return TiktokenTokenizer(json.dumps(whole, ensure_ascii=False), config)


def _ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_text(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            ranks[token] = int(rank)
        except (binascii.Error, ValueError):
            raise _damaged(
                path, f"line {number}: {line[:80]!r}: must be a token in base64 and its rank"
            ) from None
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:
            raise _damaged(
                path, f"line {number}: {len(token)} bytes: must be from 1 to {MAX_TOKEN_BYTES}"
            )
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) > MAX_TOKENS:
        raise _damaged(path, f"must have the ranks from 0 to {len(ranks) - 1}, once each")
    if missing := {bytes([byte]) for byte in range(256)} - ranks.keys():
        raise _damaged(path, f"{len(missing)} single bytes are not tokens")
    return ranks


def _added(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Id and entry of each further token."""
    listed = config.get("added_tokens_decoder", {})
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or int(key) > MAX_TOKENS or not isinstance(content, str):
            raise _damaged(path, f"added_tokens_decoder.{key[:20]}: must be an id with 'content'")
        yield int(key), added_token(int(key), content, special=bool(entry.get("special", False)))


def _pattern(folder: Path, config: Mapping[str, Any]) -> str:
    """The pattern that cuts text, from the source of the tokenizer's class."""
    stated = config.get("auto_map")
    name = stated.get("AutoTokenizer") if isinstance(stated, dict) else None
    name = name[0] if isinstance(name, list) and name else name
    if not isinstance(name, str):
        raise _damaged(
            folder / _CONFIG, "auto_map.AutoTokenizer: must name the class whose pattern cuts text"
        )
    path = folder / f"{Path(name.rpartition('--')[2].partition('.')[0]).name}.py"
    try:
        tree = ast.parse(_text(path, MAX_CODE_BYTES))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _damaged(path, f"cannot be read as Python: {error}") from error
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(getattr(t, "id", getattr(t, "attr", None)) == _PATTERN for t in targets):
            found = _constant(node.value)  # type: ignore[attr-defined]
            if found is not None:
                return found
    raise _damaged(path, f"assigns no constant text to {_PATTERN!r}, by which text is cut")


def _constant(node: ast.expr) -> str | None:
    """A text, or texts that another one joins; None: it is neither."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    between, listed = node.func.value, node.args[0] if len(node.args) == 1 else None
    if node.func.attr != "join" or not isinstance(listed, ast.List | ast.Tuple):
        return None
    parts = [_constant(part) for part in (between, *listed.elts)]
    texts = [part for part in parts if part is not None]
    return texts[0].join(texts[1:]) if len(texts) == len(parts) else None


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(path, "must hold a JSON object")
    template = path.parent / "chat_template.jinja"
    if template.is_file():
        content["chat_template"] = _text(template, MAX_FILE_BYTES)
    return content


def _text(path: Path, most: int) -> str:
    try:
        if path.stat().st_size > most:
            raise _damaged(path, f"more than the {most} bytes that are read")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: {why}")
