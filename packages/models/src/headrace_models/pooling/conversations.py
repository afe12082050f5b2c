"""Templates of conversations, for classes whose prompts have one form: a text or an image, a query or a page.
No torch.

Retrievers of pages: Faysse et al. 2024, arXiv:2407.01449.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace_core.errors import UnsupportedModel
from headrace_models.config.json_object import read_object

_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}"
_PAGES = """\
{% macro one(part) %}{% if part.type == 'image' %}PAGE{% elif part.type == 'text' -%}
BEGIN{{ QUERY }}{{ part.text }}{{ pad_token * 10 }}{{ '\\n' }}{% else -%}
{{ raise_exception('this model embeds a text, as a query, or an image') }}{% endif %}{% endmacro -%}
{% for message in messages %}{% if message.content is string and messages | length == 1 -%}
{{ one({'type': 'text', 'text': message.content}) }}{% else -%}
{% if messages | length != 1 or message.content | length != 1 -%}
{{ raise_exception('this model embeds one text, or one image') }}{% endif -%}
{% for part in message.content %}{{ one(part) }}{% endfor %}{% endif %}{% endfor %}"""
"""Queries end in ten fillers, which are read as they were in training."""


class PageForm(NamedTuple):
    """The prompts of a retriever of pages."""

    page: str
    """Template of an image, in which VISUAL stands for the text beside it."""
    visual: str
    """That text, unless ``processor_config.json`` has another."""
    query: str
    """Text in front of a query, unless that file has another."""
    begin: str = ""
    """Template of what is in front of that."""


PAGE_FORMS: Mapping[str, PageForm] = {
    "ColPaliForRetrieval": PageForm(
        "<image>{{ bos_token }}{{ VISUAL }}{{ '\\n' }}",
        "Describe the image.",
        "Question: ",
        "{{ bos_token }}",
    ),
    "ColQwen2ForRetrieval": PageForm(
        "{{ VISUAL }}",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
        "<|endoftext|>",
        "Query: ",
    ),
}
"""By architecture."""
_TEMPLATES: Mapping[str, str] = {
    "CLIPModel": "{{ bos_token }}" + _PLAIN,
    "CLIPTextModelWithProjection": "{{ bos_token }}" + _PLAIN,
    "Siglip2Model": _PLAIN,
    "SiglipModel": _PLAIN,
    "SiglipTextModel": _PLAIN,
}


def conversation_template(architecture: str, path: Path) -> str | None:
    """The Jinja template of a class's conversations; None: the checkpoint's files have it, if anything.

    Args:
        path: the checkpoint's folder.

    Raises:
        UnsupportedModel: ``processor_config.json`` is unreadable, or a text in it is none.
    """
    form = PAGE_FORMS.get(architecture)
    if form is None:
        return _TEMPLATES.get(architecture)
    file = path / "processor_config.json"
    stated = read_object(file, required=False)
    visual = stated.get("visual_prompt_prefix") or form.visual
    query = stated.get("query_prefix") or form.query
    if not (isinstance(visual, str) and isinstance(query, str)):
        raise UnsupportedModel(f"{file}: visual_prompt_prefix and query_prefix must be texts")
    page = form.page.replace("VISUAL", json.dumps(visual))
    whole = _PAGES.replace("PAGE", page).replace("BEGIN", form.begin)
    return whole.replace("QUERY", json.dumps(query))
