"""Tokenizer files: :class:`SavingMixin`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headrace.tokenizer_calls.vocabulary import Vocabulary
from headrace_core.errors import RequestError, UnsupportedFeature

OF_CODE = ("auto_map", "custom_pipelines")
"""Entries of ``tokenizer_config.json`` that name Python files, which are not written."""
OWN_CODE_CLASS = "PreTrainedTokenizerFast"
"""Class of a tokenizer whose own is in such a file."""


class SavingMixin(Vocabulary):
    """Writes the files from which transformers and headrace read a tokenizer."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
        push_to_hub: bool = False,
        save_format: str | None = None,
        **options: Any,
    ) -> tuple[str, ...]:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat templates.

        Attributes that were set (``pad_token``, ``padding_side``, ``chat_template``, ...) are written as they
        are now.

        Args:
            save_directory: a folder; it is made if it is not there.
            filename_prefix: begins the names of the files: ``PREFIX-tokenizer.json``.
            legacy_format, push_to_hub, save_format, options: refused, unless None or False.

        Returns:
            Paths of the files.

        Raises:
            OSError: a file cannot be written.
            RequestError: ``filename_prefix`` has a path's parts.
            UnsupportedFeature: another format or an upload is asked for, or the tokenizer is a plug-in's.
        """
        asked = {"legacy_format": legacy_format, "push_to_hub": push_to_hub}
        for name, given in {**asked, "save_format": save_format, **options}.items():
            if given is not None and given is not False:
                raise UnsupportedFeature(
                    f"{name} = {given!r:.100}: not built; {self._elsewhere()}", param=name
                )
        if self._backend is None:
            raise UnsupportedFeature(
                "save_pretrained(): the tokenizer is a plug-in's, and has no files", param=None
            )
        if filename_prefix and os.path.basename(filename_prefix) != filename_prefix:
            raise RequestError(
                f"filename_prefix = {filename_prefix!r:.100}: must be the beginning of a file's name",
                param="filename_prefix",
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        begin = f"{filename_prefix}-" if filename_prefix else ""
        config = json.dumps(self._stated(), indent=2, sort_keys=True, ensure_ascii=False)
        files = {
            f"{begin}tokenizer.json": self._backend.to_str(pretty=True),
            f"{begin}tokenizer_config.json": config + "\n",
        }
        for name, template in self._templates().items():
            where = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            files[f"{where}.jinja"] = template
        written = []
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(str(path))
        return tuple(written)

    def _templates(self) -> dict[str, str]:
        """The chat templates by name."""
        if self._has_own_template:
            return {} if self._own_template is None else {"default": self._own_template}
        named: dict[str, str] = dict(getattr(self._tokenizer, "chat_templates", {}))
        return named

    def _stated(self) -> dict[str, Any]:
        """``tokenizer_config.json`` as it is now."""
        config = {
            **self._config,
            **self._tokenizer.special_tokens,
            **self._sides,
        }
        config.pop("chat_template", None)
        if any(config.pop(name, None) is not None for name in OF_CODE):
            config["tokenizer_class"] = OWN_CODE_CLASS
        config["pad_token"] = self._named.get("pad_token")
        if self._max_length is not None:
            config["model_max_length"] = self._max_length
        if self._cleans_up is not None:
            config["clean_up_tokenization_spaces"] = self._cleans_up
        return config
