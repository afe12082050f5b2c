"""The tokenizer that :meth:`headrace.LLM.get_tokenizer` returns: :class:`ModelTokenizer`.

It has the interface of transformers' tokenizers, and gives the same results for the same checkpoint, without
importing transformers. What it cannot do, it refuses and says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.assembly.templates import PYTHON
from headrace.offline.own_names import own_names
from headrace.tokenizer_calls.absent import ABSENT, FIXED
from headrace.tokenizer_calls.chats import ChatTemplateMixin
from headrace.tokenizer_calls.decoding import DecodingMixin
from headrace.tokenizer_calls.filling import TokenizedText
from headrace.tokenizer_calls.saving import SavingMixin

if TYPE_CHECKING:
    from headrace_core.served_model import ServedModel
    from headrace_core.text import Tokenizer
    from headrace_engine.input_processing.input_processor import InputProcessor

__all__ = ["ModelTokenizer", "TokenizedText"]

_SET = ("_own_template", "_has_own_template", "_max_length", "_cleans_up")
"""Attributes that a copy takes over, besides the named tokens and the sides."""


@own_names
class ModelTokenizer(ChatTemplateMixin, DecodingMixin, SavingMixin):
    """The tokenizer of a running model. Thread-safe, but for the attributes that can be set:
    ``pad_token``, ``padding_side``, ``truncation_side``, ``chat_template``, ``model_max_length`` and
    ``clean_up_tokenization_spaces``.

    It can be pickled and copied. A copy needs no engine, and reads no media in conversations.

    Args:
        input_processor: reads the engine's prompts, by the template settings of ``LLM``; it has a tokenizer.
        allow_control_tokens: the setting by which the input processor was made; for copies.
    """

    def __init__(
        self, input_processor: InputProcessor, *, allow_control_tokens: bool = False
    ) -> None:
        super().__init__(input_processor)
        self._allow_control_tokens = allow_control_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        own = self._tokenizer
        files: tuple[str, dict[str, Any]] | None = None
        if self._backend is not None:
            templates = dict(getattr(own, "chat_templates", {}))
            config = {**self._config, **own.special_tokens, "chat_template": templates}
            files = self._backend.to_str(), config
        model = self._input_processor.model
        state = {"_named": dict(self._named), "_sides": dict(self._sides)}
        state |= {name: getattr(self, name) for name in _SET}
        made_of = (files or own, model, self._allow_control_tokens)
        return _made_again, made_of, state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        reason = ABSENT.get(name) or FIXED.get(name)
        raise AttributeError(
            f"{name}: the tokenizer of a running model does not have it"
            + (f": {reason}" if reason else "")
            + f"; if transformers' does, {self._elsewhere()}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and value != getattr(self, name, False):
            raise AttributeError(
                f"{name} = {value!r:.100}: cannot be set on the tokenizer of a running model: "
                f"{FIXED[name]}; or {self._elsewhere()}"
            )
        if name not in FIXED:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {len(self)} tokens)"


def _made_again(
    source: Tokenizer | tuple[str, dict[str, Any]], model: ServedModel, allow_control_tokens: bool
) -> ModelTokenizer:
    """A copy of a tokenizer.

    Args:
        source: texts of ``tokenizer.json`` and, read, of ``tokenizer_config.json``; or a plug-in's tokenizer.
    """
    from headrace_engine.input_processing.input_processor import InputProcessor
    from headrace_engine.input_processing.tokenizer import tokenizer_of

    own = tokenizer_of(Path(model.root), *source) if isinstance(source, tuple) else source
    input_processor = InputProcessor(
        own,
        model,
        chat_template=PYTHON.chat_template,
        content_format=PYTHON.content_format,
        prompt_templates=PYTHON.prompt_templates,
        allow_control_tokens=allow_control_tokens,
    )
    return ModelTokenizer(input_processor, allow_control_tokens=allow_control_tokens)
