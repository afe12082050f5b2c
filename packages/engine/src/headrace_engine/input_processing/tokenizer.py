"""Tokenizers from checkpoint folders: ``tokenizer.json`` and the files beside it.

The ``tokenizers`` library splits text into tokens. The way back is our own where tokens are byte
strings (byte-level BPE; sentencepiece-style with ``▁``), so that decoding piece by piece and
decoding at once are the same computation; see :mod:`headrace_engine.output_processing.detokenizer`.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tokenizers

from headrace_core.errors import ModelError
from headrace_core.text import EncodedPair, Tokenizer
from headrace_engine.input_processing.guarded_backend import guarded_backend
from headrace_engine.output_processing.detokenizer import ByteDetokenizer

if TYPE_CHECKING:
    from headrace_engine.input_processing.fewest_tokens import TextMeasure

METASPACE = "▁"
MAX_FILE_BYTES = 512 << 20
"""Largest tokenizer file that is read."""
GUARDS_KEPT = 2
"""Guards for which a second backend is kept; it shares the vocabulary."""


class TokenizerFiles(NamedTuple):
    """The tokenizer's files, as read from a checkpoint folder."""

    backend: tokenizers.Tokenizer
    decoder: Mapping[str, Any] | None
    """``tokenizer.json``'s entry of that name."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``, with ``special_tokens_map.json`` underneath."""
    chat_templates: Mapping[str, str]
    """By name; the usual one is ``default``."""


class HFTokenizer:
    """A :class:`~headrace_core.text.Tokenizer` over the ``tokenizers`` library."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = files.backend
        self._vocab_size: int = files.backend.get_vocab_size(with_added_tokens=True)
        self.chat_templates = files.chat_templates
        """By name."""
        self.special_tokens: Mapping[str, str] = _special_texts(files.config)
        """``bos_token`` ... -> text."""
        self._added = {
            token_id: token.content
            for token_id, token in files.backend.get_added_tokens_decoder().items()
        }
        self._special_ids = frozenset(_special_ids(files.backend, self.special_tokens))
        self._guarded_by = functools.lru_cache(GUARDS_KEPT)(self._make_guarded)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's object underneath: for reading, it is shared by all threads."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def special_texts(self) -> Mapping[int, str]:
        """See :attr:`headrace_core.text.GuardableTokenizer.special_texts`."""
        return {i: self._added.get(i, self.token_string(i)) for i in self._special_ids}

    def guarded(self, guard: str) -> Tokenizer | None:
        """See :meth:`headrace_core.text.GuardableTokenizer.guarded`."""
        return self._guarded_by(guard)

    def _make_guarded(self, guard: str) -> Tokenizer | None:
        backend = guarded_backend(self._backend, guard, self.special_texts)
        if backend is None:
            return None
        made = copy.copy(self)
        made._backend = backend
        return made

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encoding(text, add_special_tokens).ids  # type: ignore[no-any-return]

    def _encoding(self, text: str | tuple[str, str], add_special_tokens: bool) -> Any:
        """The encoding of a batch of one: only those are encoded without the interpreter's lock, so that
        others (the event loop, the thread that runs the model) go on meanwhile."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def encode_pair(
        self,
        first: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
    ) -> EncodedPair:
        texts = [first] if second is None else [first, second]
        if max_length is None:
            pair = first if second is None else (first, second)
            encoding = self._encoding(pair, add_special_tokens)
            return EncodedPair(encoding.ids, encoding.type_ids)
        parts = [self._encoding(text, False) for text in texts]
        special = 0
        if add_special_tokens:
            special = self._backend.num_special_tokens_to_add(len(parts) > 1)
        kept = _shares([len(part.ids) for part in parts], max(0, max_length - special))
        for part, count in zip(parts, kept):
            if count < len(part.ids):
                part.truncate(count, direction=truncation_side)
        behind = parts[1] if len(parts) > 1 else None
        whole = self._backend.post_process(parts[0], behind, add_special_tokens=add_special_tokens)
        kept_part = slice(max_length) if truncation_side == "right" else slice(-max_length, None)
        return EncodedPair(whole.ids[kept_part], whole.type_ids[kept_part])

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        known = [i for i in token_ids if self._is_token(i)]
        if spaces_between_special_tokens or skip_special_tokens:
            return self._decode_run(known, skip_special_tokens)
        return self._decode_without_spaces(known)

    def token_string(self, token_id: int) -> str:
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def _decode_run(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        shown = [i for i in token_ids if i not in skipped]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def _decode_without_spaces(self, token_ids: Sequence[int]) -> str:
        """Special tokens next to each other are written without what the vocabulary puts between
        words."""
        pieces: list[tuple[bool, str]] = []
        run: list[int] = []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self._added:
                run.append(token_id)
                continue
            if run:
                pieces.append((False, self._decode_run(run, False)))
                run = []
            if token_id is not None:
                pieces.append((True, self._added[token_id]))
        text, after_special = "", True
        for special, piece in pieces:
            text += piece if not text or (special and after_special) else " " + piece
            after_special = special
        return text

    def _is_token(self, token_id: int) -> bool:
        return token_id >= 0 and self._backend.id_to_token(token_id) is not None

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        found: int | None = None if text is None else self._backend.token_to_id(text)
        return found


class ByteTokenizer(HFTokenizer):
    """A tokenizer whose tokens are byte strings; has the members of ``BytePieces``.

    Args:
        files: the checkpoint's.
        piece: token's spelling -> bytes.
        first: bytes of a token that begins a text -> the bytes that are shown of it.
    """

    def __init__(self, files: TokenizerFiles, rule: ByteRule) -> None:
        super().__init__(files)
        self._rule = rule
        # One entry per token that was ever seen: bounded by the vocabulary.
        self.token_bytes = functools.cache(self._token_bytes)

    def first_token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text."""
        return self._rule.at_start(self.token_bytes(token_id))

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        # Bytes are joined as they are; there are no spaces between tokens to leave out.
        decoder = ByteDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return decoder.feed(token_ids) + decoder.finish()

    def fewest_tokens(self, text: str) -> int | None:
        """A lower bound of a text's number of tokens, found without tokenizing it; None: there is none."""
        return None if self._measure is None else self._measure.fewest(text)

    @functools.cached_property
    def _measure(self) -> TextMeasure | None:
        # Made with the first long text: it goes through the whole vocabulary, and needs numpy, which a
        # start does without.
        from headrace_engine.input_processing.fewest_tokens import measure_of

        byte_level = isinstance(self._rule, ByteLevelRule)
        return measure_of(self._backend, self._rule.piece, byte_level=byte_level)

    def _token_bytes(self, token_id: int) -> bytes:
        return self._rule.piece(self.token_string(token_id))


class ByteRule:
    """The way in which a vocabulary spells bytes."""

    def piece(self, token: str) -> bytes:
        """A token's bytes."""
        raise NotImplementedError

    def at_start(self, piece: bytes) -> bytes:
        """The shown part of the first token of a text."""
        return piece


class ByteLevelRule(ByteRule):
    """Byte-level BPE: each character of a token's spelling stands for one byte."""

    def __init__(self) -> None:
        self._byte_of = {character: byte for byte, character in enumerate(_byte_alphabet())}

    def piece(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:
            return token.encode()  # an added token, spelled as it is


class MetaspaceRule(ByteRule):
    """Sentencepiece-style: ``▁`` is a space, ``<0xAB>`` a byte.

    Args:
        byte_fallback: whether ``<0xAB>`` means a byte.
        strip: spaces dropped from the beginning of a text; None: as many as there are.
    """

    def __init__(self, byte_fallback: bool, strip: int | None) -> None:
        self._byte_fallback = byte_fallback
        self._strip = strip

    def piece(self, token: str) -> bytes:
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(METASPACE, " ").encode()

    def at_start(self, piece: bytes) -> bytes:
        if self._strip is None:
            return piece.lstrip(b" ")
        spaces = len(piece) - len(piece.lstrip(b" "))
        return piece[min(spaces, self._strip) :]


def _shares(lengths: Sequence[int], limit: int) -> list[int]:
    """Tokens that each text may keep of ``limit``: the longest gives first."""
    if sum(lengths) <= limit:
        return list(lengths)
    if len(lengths) == 1:
        return [limit]
    first, second = lengths
    half = limit // 2
    if min(first, second) <= half:  # the shorter one is kept whole
        return [first, limit - first] if first <= second else [limit - second, second]
    return [limit - half, half] if first > second else [half, limit - half]


def prepare_thread() -> None:
    """Have the library set up what it keeps for the calling thread. To be told of the thread's end, it asks
    the system's linker, and waits as long as that links another library."""
    tokenizers.models.BPE()


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder.

    Raises:
        ModelError: naming the file that is missing, too large or malformed.
    """
    return _tokenizer(_read_files(Path(path)))


def tokenizer_of(source: Path, text: str, config: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer whose files are not in a folder.

    Args:
        source: where it comes from; for messages.
        text: as ``tokenizer.json`` holds it.
        config: as ``tokenizer_config.json`` holds it, chat templates included.

    Raises:
        ModelError: the text is no tokenizer's.
    """
    return _tokenizer(_assembled(source, text, config, _stated_templates(config)))


def _tokenizer(files: TokenizerFiles) -> Tokenizer:
    rule = byte_rule(files.decoder)
    return HFTokenizer(files) if rule is None else ByteTokenizer(files, rule)


def byte_rule(decoder: Mapping[str, Any] | None) -> ByteRule | None:
    """The rule that a ``decoder`` entry of ``tokenizer.json`` stands for; None: tokens are words."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelRule()
    if kinds == ["Metaspace"] and steps[0].get("replacement") == METASPACE:
        never = steps[0].get("prepend_scheme") == "never"
        return MetaspaceRule(byte_fallback=False, strip=0 if never else None)
    return _sequence_rule(steps, kinds)


def _sequence_rule(steps: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> ByteRule | None:
    """Replace ▁, [ByteFallback], [Fuse], [Strip one space at the left]: Llama 2, Gemma, ..."""
    allowed = ("Replace", "ByteFallback", "Fuse", "Strip")
    order = [allowed.index(kind) for kind in kinds if kind in allowed]
    if len(order) != len(kinds) or order != sorted(set(order)) or "Replace" not in kinds:
        return None
    if steps[0].get("pattern") != {"String": METASPACE} or steps[0].get("content") != " ":
        return None
    strip = 0
    if kinds[-1] == "Strip":
        last = steps[-1]
        if last.get("content") != " " or last.get("stop") or "Fuse" not in kinds:
            return None
        strip = int(last.get("start", 0))
    return MetaspaceRule("ByteFallback" in kinds, strip)


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _read_files(path: Path) -> TokenizerFiles:
    source = path / "tokenizer.json"
    if not source.is_file():
        raise _missing(path)
    text = _read_text(source)
    config = {
        **_read_json(path / "special_tokens_map.json", optional=True),
        **_read_json(path / "tokenizer_config.json", optional=True),
    }
    return _assembled(source, text, config, _chat_templates(path, config))


def _assembled(
    source: Path, text: str, config: Mapping[str, Any], chat_templates: Mapping[str, str]
) -> TokenizerFiles:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        # Only this part is parsed here: in Python the vocabulary would take as long as all else.
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    except Exception as error:
        raise ModelError(
            f"{source}: not a tokenizer that can be read, or no JSON object: {error}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, config)
    _set_begin_and_end(backend, config)
    return TokenizerFiles(backend, decoder, config, chat_templates)


def _missing(path: Path) -> ModelError:
    if (path / "tokenizer.model").is_file():
        return ModelError(
            f"{path}: has a sentencepiece vocabulary (tokenizer.model) but no tokenizer.json, "
            'which is what headrace reads. Write one with: python -c "import transformers; '
            f"transformers.AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')\""
        )
    return ModelError(f"{path / 'tokenizer.json'}: no such file; the tokenizer is read from it")


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return found


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that are read")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as text: {error}") from error


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that ``tokenizer_config.json`` has beyond ``tokenizer.json``, in the order of ids."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(token_id) not in known and backend.token_to_id(entry["content"]) != int(token_id):
            token = tokenizers.AddedToken(
                entry["content"],
                single_word=entry.get("single_word", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                normalized=entry.get("normalized", False),
                special=entry.get("special", False),
            )
            backend.add_tokens([token])


def _set_begin_and_end(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """``add_bos_token`` and ``add_eos_token``, where a checkpoint has them, win over what
    ``tokenizer.json`` says of begin and end tokens. Checkpoints rely on it: so it is in
    transformers (5.x, tokenizers backend)."""
    wanted = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if not any(isinstance(want, bool) for want in wanted.values()):
        return
    texts = _special_texts(config)
    ids = {name: backend.token_to_id(texts.get(f"{name}_token", "")) for name in wanted}
    added = {
        name: texts[f"{name}_token"] for name in wanted if wanted[name] and ids[name] is not None
    }
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*([added["bos"]] if "bos" in added else []), "$A",
                *([added["eos"]] if "eos" in added else [])],
        special_tokens=[(text, ids[name]) for name, text in added.items()],
    )  # fmt: skip


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _special_ids(backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> set[int]:
    ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    named = (backend.token_to_id(text) for text in special_tokens.values())
    return ids | {i for i in named if i is not None}


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over ``tokenizer_config.json``."""
    found = _stated_templates(config)
    for source in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[source.stem] = source.read_text(encoding="utf-8")
    source = path / "chat_template.jinja"
    if source.is_file():
        found["default"] = source.read_text(encoding="utf-8")
    return found


def _stated_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer_config.json`` holds one template or a list of named ones."""
    found: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, Mapping):
        found.update(entry)
    elif isinstance(entry, list):
        found.update({item["name"]: item["template"] for item in entry})
    return found
