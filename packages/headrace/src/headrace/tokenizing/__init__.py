"""The tokenizer for scripts; :class:`headrace.tokenizer.ModelTokenizer` puts its parts together."""
