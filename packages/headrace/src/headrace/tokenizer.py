"""The tokenizer that :meth:`headrace.LLM.get_tokenizer` returns: :class:`ModelTokenizer`.

It has the interface of transformers' tokenizers, and gives the same results for the same checkpoint, without
importing transformers. What it cannot do, it does not accept.
"""

from headrace.tokenizing.chats import RendersChats
from headrace.tokenizing.decoding import DecodesIds
from headrace.tokenizing.filling import TokenizedText
from headrace.tokenizing.vocabulary import NO_LIMIT

__all__ = ["NO_LIMIT", "ModelTokenizer", "TokenizedText"]


class ModelTokenizer(RendersChats, DecodesIds):
    """The tokenizer of a running model. Thread-safe, but for the attributes that can be set:
    ``pad_token``, ``padding_side`` and ``truncation_side``.

    Args:
        intake: reads the engine's prompts; it has a tokenizer.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {len(self)} tokens)"
