"""Mistral: ``[TOOL_CALLS]`` and a list of objects, or before each call's name and arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class MistralToolParser(ObjectsParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of objects, or before each call's name and arguments.

    Tokenizers since version 11 write ``[TOOL_CALLS]name{...}``, later ones ``[ARGS]`` between
    name and arguments, and perhaps ``[CALL_ID]`` and an id before that.
    """

    needs_special_tokens = True
    opens = ("[TOOL_CALLS]",)
    format = ObjectFormat(array=True, arguments_optional=True)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._ids: list[str] = []
        self._written = ""

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        """In either dialect: which it is the tokenizer's version says, not the parser."""
        tag = cls.opens[0]
        identity = structural_tags.sequence(
            structural_tags.const("[CALL_ID]"), structural_tags.regex("[A-Za-z0-9]{9}")
        )
        tags = [
            structural_tags.tag(
                f"{tag}[", structural_tags.calls(cls.strict_objects(tools), ", "), "]"
            )
        ]
        for name, schema in tools.items():
            arguments = structural_tags.json_schema(schema)
            tagged = structural_tags.tag("[ARGS]", arguments)
            tags.append(
                structural_tags.tag(
                    tag + name,
                    structural_tags.either(
                        arguments, tagged, structural_tags.sequence(identity, tagged)
                    ),
                )
            )
        return structural_tags.free_text([tag], tags)

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        """In either dialect, see :meth:`strict_structural_tag`."""
        tag = structural_tags.const(cls.opens[0])
        objects = structural_tags.either(*cls.strict_objects(tools))
        listed = structural_tags.up_to(
            objects, most, structural_tags.sequence(*structural_tags.loose(", "))
        )
        identity = structural_tags.sequence(
            structural_tags.const("[CALL_ID]"), structural_tags.regex("[A-Za-z0-9]{9}")
        )
        tagged = structural_tags.sequence(
            structural_tags.either(identity, structural_tags.const("")),
            structural_tags.const("[ARGS]"),
        )
        middle = structural_tags.either(tagged, structural_tags.const(""))
        named = [
            structural_tags.sequence(
                structural_tags.const(name), middle, structural_tags.json_schema(schema)
            )
            for name, schema in tools.items()
        ]
        return structural_tags.answer(
            structural_tags.either(
                structural_tags.sequence(
                    tag,
                    structural_tags.SPACE,
                    structural_tags.const("["),
                    listed,
                    structural_tags.SPACE,
                    structural_tags.const("]"),
                ),
                structural_tags.up_to(
                    structural_tags.sequence(tag, structural_tags.either(*named)), most
                ),
            )
        )

    def calls(self, tag: str) -> Steps[None]:
        source = self.source
        yield from source.space()
        self._written = ""
        if (yield from source.peek()) == "[":
            yield from self.objects()
            return
        name = yield from self.name()
        yield from source.space()
        if (yield from source.accept("[CALL_ID]")):
            self._written, _ = yield from source.before(("[ARGS]",), limit=64)
        else:
            yield from source.accept("[ARGS]")
        yield from source.space()
        yield from self.object_arguments(name)

    def open_call(self, name: str) -> None:
        super().open_call(name)
        self._ids.append(self._written if _is_id(self._written) else _new_id())

    def call_id(self, index: int, name: str) -> str | None:
        """Nine letters and digits: other ids are refused by the model's template."""
        while len(self._ids) <= index:
            self._ids.append(_new_id())
        return self._ids[index]


_ALPHABET = string.ascii_letters + string.digits


def _new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _is_id(text: str) -> bool:
    return len(text) == 9 and text.isascii() and text.isalnum()
