"""Structural tags: free text with constrained parts between marks, as a Lark grammar.

Two forms. The older: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``. The
newer: ``{"format": {"type": ...}}``, a tree of the types in :data:`TYPES`. ConstraintSource of both: the
OpenAI-compatible servers' ``response_format`` of type ``structural_tag``; xgrammar's
documentation (structural tag usage).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.grammar import Refusal, Vocabulary, malformed
from headrace_engine.structured.schema import within

TYPES = frozenset(
    {
        "any_text", "const_string", "grammar", "json_schema", "or", "regex", "repeat", "sequence",
        "tag", "tags_with_separator", "triggered_tags",
    }
)  # fmt: skip
KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "any_text": (frozenset(), frozenset()),
    "const_string": (frozenset({"value"}), frozenset()),
    "grammar": (frozenset({"grammar"}), frozenset()),
    "json_schema": (frozenset({"json_schema"}), frozenset({"style"})),
    "or": (frozenset({"elements"}), frozenset()),
    "regex": (frozenset({"pattern"}), frozenset()),
    "repeat": (frozenset({"content", "max", "min"}), frozenset()),
    "sequence": (frozenset({"elements"}), frozenset()),
    "tag": (frozenset({"begin", "content", "end"}), frozenset()),
    "tags_with_separator": (
        frozenset({"separator", "tags"}), frozenset({"at_least_one", "stop_after_first"}),
    ),
    "triggered_tags": (
        frozenset({"tags", "triggers"}), frozenset({"at_least_one", "stop_after_first"}),
    ),
}  # fmt: skip
"""Type -> (keys that it needs, keys that it may have)."""

Format = Mapping[str, Any]

MAX_REPEATS = 10_000
TAG = "/format"
"""JSON pointer of the format tree in a tag of the newer form."""
_OLDER = (
    (re.compile("^/format/tags"), "/structures"),
    (re.compile("^(/structures/[0-9]+)/content/json_schema"), r"\1/schema"),
    (re.compile("^/format"), ""),
)
"""Places in a format tree -> places in a tag of the older form."""


def parse_tag(tag: Any) -> Format:
    """The format tree of a structural tag of either form.

    Raises:
        RequestError: it has neither form, or a key is missing; names the JSON pointer.
    """
    if not isinstance(tag, Mapping):
        raise malformed("structural_tag", "must be a JSON object")
    if "structures" in tag:
        return _from_structures(tag)
    if "format" not in tag:
        raise malformed("structural_tag", "must have 'format', or 'structures' and 'triggers'")
    _check(tag["format"], TAG, tag)
    found: Format = tag["format"]
    return found


def _from_structures(tag: Mapping[str, Any]) -> Format:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise _wrong("structures", tag, "", "must be a list of at least one")
    tags = []
    for index, item in enumerate(structures):
        at = f"/structures/{index}"
        if not isinstance(item, Mapping) or not {"begin", "schema", "end"} <= item.keys():
            raise malformed(
                "structural_tag", f"{'#' + at!r}: must have 'begin', 'schema' and 'end'"
            )
        content = {"type": "json_schema", "json_schema": item["schema"]}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    _check(form, TAG, tag)
    return form


def _check(form: Any, pointer: str, tag: Mapping[str, Any]) -> None:
    """Raises RequestError unless a form, and all in it, have the keys that they need.

    Args:
        form: to be checked.
        pointer: its place in the newer form.
        tag: as it was sent, in which errors name places.
    """
    if not isinstance(form, Mapping) or not isinstance(form.get("type"), str):
        home = "#" + as_given(tag, pointer)
        raise malformed("structural_tag", f"{home!r}: must be an object with 'type'")
    kind = form["type"]
    needed, _ = KEYS.get(kind, (frozenset(), frozenset()))
    for key in sorted(needed - form.keys()):
        raise _wrong(key, tag, pointer, f"{kind} needs it")
    for key in ("value", "pattern", "grammar", "separator", "begin"):
        if key in needed and not isinstance(form[key], str):
            raise _wrong(key, tag, pointer, "must be text")
    if kind == "tag" and not all(isinstance(end, str) for end in _ends(form)):
        raise _wrong("end", tag, pointer, "must be text, or a list of texts")
    if kind == "triggered_tags":
        _check_triggers(form, pointer, tag)
    if kind == "repeat":
        _check_counts(form, pointer, tag)
    for key in ("elements", "tags"):
        if key in needed and not (isinstance(form[key], list) and form[key]):
            raise _wrong(key, tag, pointer, "must be a list of at least one")
    for at, inner in inner_forms(form, pointer):
        _check(inner, at, tag)


def _check_triggers(form: Format, pointer: str, tag: Mapping[str, Any]) -> None:
    triggers = form["triggers"]
    if (
        not isinstance(triggers, list)
        or not triggers
        or not all(isinstance(trigger, str) and trigger for trigger in triggers)
    ):
        raise _wrong("triggers", tag, pointer, "must be a list of texts")
    for index, one in enumerate(form["tags"] if isinstance(form["tags"], list) else []):
        begin = one.get("begin") if isinstance(one, Mapping) else None
        if isinstance(begin, str) and not any(begin.startswith(t) for t in triggers):
            raise _wrong(
                "begin",
                tag,
                f"{pointer}/tags/{index}",
                f"{begin!r:.80} must begin with one of the triggers {triggers!r:.200}",
            )


def _check_counts(form: Format, pointer: str, tag: Mapping[str, Any]) -> None:
    """``max`` -1 is any number."""
    least, most = form["min"], form["max"]
    for key, value in (("min", least), ("max", most)):
        if type(value) is not int or not -1 <= value <= MAX_REPEATS:
            reason = f"{value!r:.80} must be a number up to {MAX_REPEATS}"
            raise _wrong(key, tag, pointer, reason)
    if least < 0 or most == 0 or -1 < most < least:
        raise malformed(
            "structural_tag",
            f"'min' and 'max' at {'#' + as_given(tag, pointer)!r}: {least} and {most} must be 0 or more and "
            "at least as many, or -1 for any number",
        )


def inner_forms(form: Format, pointer: str) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, form) of what stands right inside a form."""
    for key in ("elements", "tags"):
        if key in KEYS.get(form["type"], (frozenset(), ()))[0]:
            yield from ((f"{pointer}/{key}/{i}", item) for i, item in enumerate(form[key]))
    if form["type"] in ("repeat", "tag"):
        yield f"{pointer}/content", form["content"]


def _ends(tag: Format) -> list[Any]:
    end = tag["end"]
    return list(end) if isinstance(end, list) else [end]


def schemas_of(tag: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of the JSON schemas in a structural tag."""
    for pointer, form in forms_of(tag):
        if form["type"] == "json_schema":
            yield as_given(tag, f"{pointer}/json_schema"), form["json_schema"]


def as_given(tag: Mapping[str, Any], pointer: str) -> str:
    """JSON pointer into a structural tag as it was sent.

    Args:
        tag: of either form.
        pointer: into a tag of the newer form with the same format tree.
    """
    if "structures" in tag:
        for pattern, older in _OLDER:
            pointer = pattern.sub(older, pointer)
    return pointer


def forms_of(tag: Any) -> Iterator[tuple[str, Format]]:
    """(JSON pointer into the newer form, form) of all forms in a structural tag."""
    pending = [(TAG, parse_tag(tag))]
    while pending:
        pointer, form = pending.pop()
        yield pointer, form
        pending += reversed(list(inner_forms(form, pointer)))


@contextmanager
def reading_grammar(tag: Any, pointer: str) -> Iterator[None]:
    """Give errors about a grammar in a structural tag their place.

    Args:
        tag: of either form.
        pointer: of the grammar's form, into the newer form.

    Raises:
        RequestError: in place of one that was raised inside.
    """
    try:
        yield
    except RequestError as error:
        raise misplaced(tag, pointer, "grammar", str(error)) from None


def misplaced(tag: Any, pointer: str, key: str, message: str) -> RequestError:
    """The error of a regex or grammar in a structural tag.

    Args:
        tag: of either form.
        pointer: of its form, into the newer form.
        key: of the form.
        message: what is wrong; may begin with the name of a constraint.
    """
    message = re.sub(r"^structured_outputs\.\w+: ", "", message)
    return _wrong(key, tag, pointer, message)


def _wrong(key: str, tag: Mapping[str, Any], pointer: str, reason: str) -> RequestError:
    """The error of a malformed tag."""
    return malformed("structural_tag", Refusal.of(key, as_given(tag, pointer), reason))


def tag_refusals(tag: Any, of_schema: Callable[[Any], list[str]]) -> list[str]:
    """Parts of a structural tag that have no counterpart in Lark.

    Args:
        tag: parsed JSON.
        of_schema: the same for a JSON schema in it.
    """
    reasons: list[str] = []
    for pointer, form in forms_of(tag):
        kind, at = form["type"], as_given(tag, pointer)
        if kind not in TYPES:
            reasons.append(Refusal.of(kind, at, f"it knows the types {sorted(TYPES)}"))
            continue
        needed, more = KEYS[kind]
        others = sorted(form.keys() - needed - more - {"type"})
        reasons += [
            Refusal.of(key, at, f"not enforced by it in {kind}")
            for key in others
            if form[key] not in (None, False, [], "")
        ]
        if form.get("style", "json") != "json":
            reasons.append(Refusal.of("style", at, "only 'json'"))
        if kind == "json_schema":
            home = as_given(tag, f"{pointer}/json_schema")
            reasons += [within(reason, home) for reason in of_schema(form["json_schema"])]
        if kind in ("sequence", "or"):
            reasons += _unbounded_text(form, at)
        if kind == "or" or (kind == "tag" and len(_ends(form)) > 1):
            reasons += _text_alternatives(form, at)
    return reasons


def _unbounded_text(form: Format, pointer: str) -> Iterator[str]:
    elements = form["elements"] if form["type"] == "sequence" else []
    for index, (one, following) in enumerate(itertools.pairwise(elements)):
        if one["type"] == "any_text" and following["type"] != "const_string":
            yield Refusal.of("any_text", f"{pointer}/elements/{index}",
                             "must end the output or be followed by const_string")  # fmt: skip


def _text_alternatives(form: Format, pointer: str) -> Iterator[str]:
    inner = form["elements"] if form["type"] == "or" else [form["content"]]
    if any(one["type"] == "any_text" for one in inner):
        yield Refusal.of("any_text", pointer, "must have one end")


def tag_grammar(
    tag: Any,
    vocabulary: Vocabulary,
    schema_text: Callable[[Any], str],
    as_lark: Callable[[str], str],
) -> str:
    """A structural tag as a grammar of llguidance: Lark, with other grammars beside it.

    Args:
        tag: parsed JSON; nothing of it is refused.
        vocabulary: marks that are special tokens of it are matched as such.
        schema_text: a JSON schema as text.
        as_lark: a grammar of either syntax as Lark.
    """
    builder = _Builder(vocabulary, schema_text, as_lark)
    start = builder.expression(parse_tag(tag))
    lark = "\n".join(["%llguidance {}", f"start: {start or _quoted('')}", *builder.rules])
    grammars = [{"name": "structural_tag", "lark_grammar": lark + "\n"}, *builder.beside]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


class _Builder:
    """Rules of one grammar; :meth:`expression` may be used within a rule's right side."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        schema_text: Callable[[Any], str],
        as_lark: Callable[[str], str],
    ) -> None:
        self._special = vocabulary.special_ids
        self._schema_text = schema_text
        self._as_lark = as_lark
        self.rules: list[str] = ["TEXT: /(.|\\n)*/"]
        self.beside: list[dict[str, str]] = []

    def expression(self, form: Format) -> str:
        make: Callable[[Format], str] = getattr(self, "_" + form["type"])
        return make(form)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body or _quoted('')}")
        return name

    def _literal(self, text: str) -> str:
        """A text; names of special tokens in it are those tokens."""
        pieces, at = [], 0
        while at < len(text):
            found = [(text.find(name, at), -len(name), i) for name, i in self._special.items()]
            start, length, token_id = min(
                (hit for hit in found if hit[0] >= 0), default=(len(text), 0, -1)
            )
            if start > at:
                pieces.append(_quoted(text[at:start]))
            if token_id >= 0:
                pieces.append(f"<[{token_id}]>")
            at = start - length if token_id >= 0 else start
        return " ".join(pieces)

    def _text_until(self, end: str) -> str:
        """Free text up to and with the first occurrence of a text."""
        if not end:
            return "TEXT"
        if end in self._special:
            return self._rule(f"TEXT <[{self._special[end]}]>")
        return self._rule(f"TEXT {_quoted(end)}", "[lazy]")

    def _any_text(self, form: Format) -> str:
        return "TEXT"

    def _const_string(self, form: Format) -> str:
        return self._literal(form["value"])

    def _regex(self, form: Format) -> str:
        return regex_literal(form["pattern"])

    def _json_schema(self, form: Format) -> str:
        return self._rule(f"%json {self._schema_text(form['json_schema'])}")

    def _grammar(self, form: Format) -> str:
        name = f"g{len(self.beside)}"
        self.beside.append({"name": name, "lark_grammar": self._as_lark(form["grammar"])})
        return "@" + name

    def _sequence(self, form: Format) -> str:
        parts: list[str] = []
        elements: Sequence[Format] = form["elements"]
        for index, element in enumerate(elements):
            before = elements[index - 1]["type"] if index else ""
            following = elements[index + 1] if index + 1 < len(elements) else None
            if element["type"] == "any_text" and following is not None:
                parts.append(self._text_until(following["value"]))
            elif not (before == "any_text" and element["type"] == "const_string"):
                parts.append(self.expression(element))
        return self._rule(" ".join(filter(None, parts)))

    def _or(self, form: Format) -> str:
        return self._rule(" | ".join(self.expression(e) or _quoted("") for e in form["elements"]))

    def _repeat(self, form: Format) -> str:
        most = "" if form["max"] < 0 else form["max"]
        return f"({self.expression(form['content'])}){{{form['min']},{most}}}"

    def _tag(self, form: Format) -> str:
        return self._rule(f"{self._literal(form['begin'])} {self._tag_body(form)}".strip())

    def _tag_body(self, form: Format) -> str:
        """The part after ``begin``."""
        ends = _ends(form)
        if form["content"]["type"] == "any_text":
            return self._text_until(ends[0])
        literals = [self._literal(end) for end in ends]
        end = literals[0] if len(ends) == 1 else self._rule(" | ".join(
            literal or _quoted("") for literal in literals
        ))  # fmt: skip
        return f"{self.expression(form['content'])} {end}".strip()

    def _triggered_tags(self, form: Format) -> str:
        by_trigger: dict[str, list[str]] = {}
        for tag in form["tags"]:
            trigger = next(t for t in form["triggers"] if tag["begin"].startswith(t))
            rest = self._literal(tag["begin"][len(trigger) :])
            by_trigger.setdefault(trigger, []).append(f"{rest} {self._tag_body(tag)}".strip())
        groups = [
            self._rule(f"{self._text_until(trigger)} ({' | '.join(bodies)})")
            for trigger, bodies in by_trigger.items()
        ]
        some = "(" + " | ".join(groups) + ")"
        if form.get("stop_after_first"):
            return some if form.get("at_least_one") else self._rule(f"{some} | TEXT")
        return f"{some}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _tags_with_separator(self, form: Format) -> str:
        tags = self._rule(" | ".join(self._tag(tag) for tag in form["tags"]))
        body = tags
        if not form.get("stop_after_first"):
            body = f"{tags} ({self._literal(form['separator'])} {tags})*"
        return self._rule(body if form.get("at_least_one") else f"({body})?")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex_literal(pattern: str) -> str:
    """A regex between slashes; slashes and line ends in it are escaped."""
    parts, escaped = [], False
    for character in pattern:
        if character == "\n":
            parts.append("n" if escaped else "\\n")
        else:
            parts.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "/" + "".join(parts) + "/"
