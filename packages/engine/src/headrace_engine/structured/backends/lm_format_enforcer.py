"""lm-format-enforcer: regexes in Python's dialect, choices, and plain JSON objects.

Source: https://github.com/noamgat/lm-format-enforcer. Written in Python: a mask takes milliseconds
and more. Its JSON parser lets optional properties end with a comma and numbers lack digits, so only
schemas without numbers go to it whose properties are all required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec, Refusal, Vocabulary, malformed
from headrace_engine.structured.backends.library import LibraryBackend, not_compiled
from headrace_engine.structured.choices import ChoiceGrammar
from headrace_engine.structured.schema import entangled, parse_json, subschemas, unsupported

if TYPE_CHECKING:
    from lmformatenforcer import CharacterLevelParser

KEYWORDS = frozenset({"additionalProperties", "enum", "items", "properties", "required", "type"})


class EnforcerBackend(LibraryBackend):
    """See the module."""

    name = "lm-format-enforcer"
    library = "lmformatenforcer"
    install = "pip install 'headrace-engine[lm-format-enforcer]'"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        texts = ((token_id, _text(token)) for token_id, token in self._text_tokens())
        self.texts = {token_id: text for token_id, text in texts if text}
        self._make_tokens = self._import(f"{self.library}.tokenenforcer").TokenEnforcerTokenizerData
        self.tokens = self._tokens(self.texts)
        # Its JSON strings would hold any character that a token has.
        self.json_tokens = self._tokens(
            {i: text for i, text in self.texts.items() if min(text) >= " "}
        )

    def _tokens(self, texts: Mapping[int, str]) -> Any:
        # Every token is given as the beginning of a word, so that its text is its own.
        return self._make_tokens(
            [(token_id, text, True) for token_id, text in texts.items()],
            lambda ids: "".join(self.texts[i] for i in ids),
            self.vocabulary.size,
            False,
            self.vocabulary.size + 1,
        )

    @classmethod
    def refuse(cls, spec: GrammarSpec) -> list[str]:
        if spec.kind not in ("json", "regex", "choice"):
            return [f"{spec.kind}: only json, regex and choice"]
        if spec.whitespace_pattern is not None or not spec.any_whitespace:
            return ["whitespace_pattern: it has no option for white space"]
        if spec.kind != "json":
            return []
        schema = parse_json(spec.source, spec.kind)
        return (
            unsupported(schema, KEYWORDS, frozenset()) + entangled(schema) + list(_peculiar(schema))
        )

    def compile(self, spec: GrammarSpec) -> EnforcerGrammar | ChoiceGrammar:
        if spec.kind == "choice":
            return self._choices(spec.source)
        try:
            tokens = self.json_tokens if spec.kind == "json" else self.tokens
            return EnforcerGrammar(self, tokens, self._parsers(spec))
        except RecursionError:
            raise malformed(spec.kind, "nested too deep") from None
        except (MemoryError, RequestError):
            raise
        except Exception:  # of interegular: classes that share no base
            raise not_compiled(spec.kind) from None

    def _parsers(self, spec: GrammarSpec) -> Callable[[], CharacterLevelParser]:
        """Makes the parser of one request; the costly part is done here."""
        library = self._library
        if spec.kind == "json":
            schema = parse_json(spec.source, spec.kind)
            return lambda: library.JsonSchemaParser(schema)
        context = library.RegexParser(spec.source).context
        return lambda: library.RegexParser(context)


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""  # a part of a character, of which it knows nothing


def _plain_string(value: Any) -> bool:
    return isinstance(value, str) and json.dumps(value, ensure_ascii=False) == f'"{value}"'


def _peculiar(schema: Any) -> list[str]:
    reasons: list[str] = []
    for pointer, found in subschemas(schema):
        if found is False and pointer.endswith("/additionalProperties"):
            continue  # others than the named ones are never written
        if isinstance(found, bool):
            reasons.append(Refusal.of(str(found).lower(), pointer, "no schema of this kind"))
            continue
        named, required = found.get("properties", {}), found.get("required", [])
        if found.get("type") == "object" and not (named and set(named) == set(required)):
            reasons.append(
                Refusal.of(
                    "required", pointer, "every object must name its properties, all required"
                )
            )
        if "enum" in found and not all(map(_plain_string, found["enum"])):
            reasons.append(Refusal.of("enum", pointer, "only of strings without escapes"))
        if found.get("type") in ("integer", "number"):
            reasons.append(Refusal.of("type", pointer, "its numbers are not JSON's"))
        if found.get("type") == "array" and "items" not in found:
            reasons.append(Refusal.of("type", pointer, "every array must have 'items'"))
        if "type" not in found and "enum" not in found:
            reasons.append(Refusal.of("type", pointer, "must be stated"))
        if isinstance(found.get("type"), list):
            reasons.append(Refusal.of("type", pointer, "only one type"))
    return reasons


class EnforcerGrammar:
    """A constraint whose parsers are made one for each request."""

    def __init__(
        self, backend: EnforcerBackend, tokens: Any, parsers: Callable[[], CharacterLevelParser]
    ) -> None:
        self.backend = backend
        self.tokens = tokens
        self.parsers = parsers
        self.matcher()

    def matcher(self) -> EnforcerMatcher:
        return EnforcerMatcher(self)


class EnforcerMatcher:
    """One request's place: the tokens so far, and an enforcer of its own that remembers them."""

    def __init__(self, grammar: EnforcerGrammar) -> None:
        from lmformatenforcer import TokenEnforcer

        self._size = grammar.backend.vocabulary.size
        self._texts = grammar.backend.texts
        self._tokens: list[int] = []
        self._enforcer = TokenEnforcer(grammar.tokens, grammar.parsers())

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        allowed = np.zeros(bitmask.shape[1] * 32, np.uint8)
        ids = [i for i in self._allowed() if i < self._size]
        allowed[np.asarray(ids, np.int64)] = 1
        bitmask[row] = np.packbits(allowed, bitorder="little").view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> bool:
        for done, token_id in enumerate(token_ids):
            if token_id >= self._size or token_id not in self._allowed():
                self.roll_back(done)
                return False
            self._tokens.append(token_id)
        return True

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._tokens[-num_tokens:]

    @property
    def complete(self) -> bool:
        return self._size in self._allowed()

    @property
    def terminated(self) -> bool:
        return set(self._allowed()) == {self._size}

    @property
    def failure(self) -> str:
        return ""

    def _allowed(self) -> Sequence[int]:
        found: Sequence[int] = self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens
        return found
