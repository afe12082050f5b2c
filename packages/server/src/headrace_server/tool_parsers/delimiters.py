"""Formats that write a call's name between tags, and its arguments as JSON behind it.

:class:`Delimiters` holds a format's tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_core.text import CallDelimiters
from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.streaming_parser import StreamingParser


@dataclass(frozen=True, slots=True)
class Delimiters:
    """The tags of a call, in the order in which they come."""

    section: str
    call: str
    kind: str = ""
    """Text between a call's tag and its name."""
    name_end: str = ""
    fence: tuple[str, str] | None = None
    """Marks around the arguments, which may be missing."""
    call_end: str = ""
    section_end: str = ""


class DelimitersParser(StreamingParser):
    """A format given by a :class:`Delimiters`. A section's own tags may be missing."""

    format: ClassVar[Delimiters]
    needs_special_tokens = True

    def calls(self, tag: str) -> Steps[None]:
        fmt, source = self.format, self.source
        if tag == fmt.section:
            yield from source.space()
            yield from source.expect(fmt.call)
        while True:
            yield from self._call()
            yield from source.space()
            if (yield from source.expect(fmt.call, fmt.section_end)) == fmt.section_end:
                return
            self.next_call()

    def _call(self) -> Steps[None]:
        fmt, source = self.format, self.source
        if fmt.kind:
            yield from source.expect(fmt.kind)
        name = yield from self.name()
        yield from source.space(" ")
        yield from source.expect(fmt.name_end)
        yield from source.space()
        fenced = fmt.fence and (yield from source.accept(fmt.fence[0]))
        yield from source.space()
        yield from self.object_arguments(self.name_of(name))
        yield from source.space()
        if fenced and fmt.fence:
            yield from source.expect(fmt.fence[1])
            yield from source.space()
        yield from source.expect(fmt.call_end)

    @classmethod
    def call_delimiters(cls, name: str) -> CallDelimiters | None:
        fmt = cls.format
        opening, closing = (f"{fmt.fence[0]}\n", f"\n{fmt.fence[1]}") if fmt.fence else ("", "")
        before = fmt.section + fmt.call + fmt.kind + name + fmt.name_end + opening
        return CallDelimiters(fmt.section, before, closing + fmt.call_end + fmt.section_end)

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        fmt = cls.format
        found = [cls._strict_call(*tool) for tool in tools.items()]
        section = structural_tags.tag(
            fmt.section, structural_tags.calls(found, ""), fmt.section_end
        )
        return structural_tags.free_text([fmt.section, fmt.call], [section, *found])

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        fmt = cls.format
        one = structural_tags.either(*(cls._strict_call(*tool) for tool in tools.items()))
        section = structural_tags.sequence(structural_tags.SPACE, structural_tags.up_to(one, most))
        return structural_tags.answer(structural_tags.tag(fmt.section, section, fmt.section_end))

    @classmethod
    def _strict_call(
        cls, name: str, schema: Mapping[str, Any] | None
    ) -> structural_tags.StructuralTag:
        fmt = cls.format
        opening, closing = (f"{fmt.fence[0]}\n", f"\n{fmt.fence[1]}") if fmt.fence else ("", "")
        arguments = structural_tags.tag(
            fmt.name_end + opening, structural_tags.json_schema(schema), closing + fmt.call_end
        )
        inside = structural_tags.sequence(*cls.strict_name(name), arguments, structural_tags.SPACE)
        return structural_tags.tag(fmt.call + fmt.kind, inside)

    @classmethod
    def strict_name(cls, name: str) -> Sequence[structural_tags.StructuralTag]:
        """The text that names a function between the tags."""
        return [structural_tags.const(name)]

    def name_of(self, text: str) -> str:
        """The function's name, from the text between the tags."""
        return text
