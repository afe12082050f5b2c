"""Calls of :class:`headrace.tokenizer.ModelTokenizer`: texts to token ids and back, for scripts."""
