"""Texts and token ids, for scripts; :class:`headrace.tokenizer.ModelTokenizer` puts the parts together."""
