"""``tekken.json``, the tokenizer of Mistral's own checkpoints, as the ``tokenizer.json`` that does the
same. No torch.

Tokens are byte strings with ranks: text is cut by a pattern, and a piece is merged two neighbours at
a time, those first whose merger has the lowest rank, as tiktoken does. Ids begin with the control
tokens, which no text becomes in Mistral's own code; here they are found in text, as chat templates
write them. Format: mistral-common, ``tokens/tokenizers/tekken.py``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import ModelError
from headrace_models.formats.byte_ranks import added_token, byte_level, merges_of, spelled

TEKKEN = "tekken.json"
MAX_FILE_BYTES = 256 << 20
MAX_TOKENS = 4_000_000
MAX_TOKEN_BYTES = 1024
"""Limit of one token's bytes: all ways to cut it in two are looked up."""

_FIRST_CONTROLS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]",
    "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files that list none, by their ids."""
_LISTS_NONE = ("v1", "v2", "v3", "v7")
"""Versions of such files."""


class TekkenTokenizer(NamedTuple):
    """Content of the tokenizer's files that would lie beside a checkpoint."""

    tokenizer: str
    """``tokenizer.json``."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``, with the chat template of the folder."""


def tekken_tokenizer(path: Path) -> TekkenTokenizer:
    """Translate a file.

    Raises:
        ModelError: it is damaged, or contradicts itself; says where.
    """
    content = _read(path)
    config = content.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise _damaged(path, "'config' has no 'pattern'")
    size = _count(path, config, "default_vocab_size")
    specials = _count(path, config, "default_num_special_tokens")
    controls = _controls(path, content, specials, str(config.get("version")))
    ranks = _ranks(path, content, size - specials)
    vocabulary = {token: index for index, token in enumerate(controls)}
    vocabulary |= {spelled(token): rank + specials for token, rank in ranks.items()}
    if len(vocabulary) != size:
        raise _damaged(path, "a control token is spelled like another token")
    added = [added_token(index, token) for index, token in enumerate(controls)]
    whole = byte_level(config["pattern"], vocabulary, merges_of(ranks), added)
    return TekkenTokenizer(json.dumps(whole, ensure_ascii=False), _config(path, controls))


def _config(path: Path, controls: list[str]) -> dict[str, Any]:
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    config: dict[str, Any] = {f"{n}_token": text for n, text in names.items() if text in controls}
    config |= {"add_bos_token": "<s>" in controls, "add_eos_token": False}
    template = path.parent / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = _text(template)
    return config


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _damaged(path, f"more than the {MAX_FILE_BYTES} bytes that are read")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(path, "must hold a JSON object")
    return content


def _count(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise _damaged(path, f"config.{name} = {value!r:.80}: must be from 0 to {MAX_TOKENS}")
    return value


def _controls(path: Path, content: Mapping[str, Any], count: int, version: str) -> list[str]:
    """Their spellings by id; ids that the file does not name are ``<SPECIAL_id>``."""
    entries = content.get("special_tokens")
    if entries is None and version not in _LISTS_NONE:
        raise _damaged(path, f"version {version!r:.20} without 'special_tokens'")
    if entries is None:
        named = dict(enumerate(_FIRST_CONTROLS))
    else:
        named = dict(_entries(path, entries, "token_str"))
        if len(named) != len(entries):
            raise _damaged(path, "two special tokens of one rank")
    if any(index >= count for index in named):
        raise _damaged(path, f"more special tokens than default_num_special_tokens = {count}")
    controls = [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]
    if len(set(controls)) != count:
        raise _damaged(path, "two special tokens of one spelling")
    return controls


def _ranks(path: Path, content: Mapping[str, Any], count: int) -> dict[bytes, int]:
    """Token -> rank, of the ``count`` first."""
    ranks: dict[bytes, int] = {}
    for rank, text in _entries(path, content.get("vocab"), "token_bytes"):
        if rank < count:
            try:
                token = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise _damaged(path, f"vocab: rank {rank}: token_bytes is not base64") from None
            if not 1 <= len(token) <= MAX_TOKEN_BYTES:
                raise _damaged(
                    path,
                    f"vocab: rank {rank}: {len(token)} bytes: must be from 1 to {MAX_TOKEN_BYTES}",
                )
            ranks[token] = rank
    if sorted(ranks.values()) != list(range(count)):
        raise _damaged(path, f"vocab: must have the ranks from 0 to {count - 1}, once each")
    if missing := {bytes([byte]) for byte in range(256)} - ranks.keys():
        raise _damaged(path, f"vocab: {len(missing)} single bytes are not tokens")
    return ranks


def _entries(path: Path, entries: Any, name: str) -> Iterator[tuple[int, str]]:
    """Rank and text of each entry."""
    if not isinstance(entries, list) or len(entries) > MAX_TOKENS:
        raise _damaged(path, f"no list of up to {MAX_TOKENS} entries with {name!r}")
    for entry in entries:
        rank = entry.get("rank") if isinstance(entry, dict) else None
        text = entry.get(name) if isinstance(entry, dict) else None
        if type(rank) is not int or rank < 0 or not isinstance(text, str):
            raise _damaged(path, f"{str(entry)[:80]}: must have a 'rank' and {name!r}")
        yield rank, text


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: {why}")
