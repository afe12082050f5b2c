"""The offline API by what its callers want: :class:`headrace.LLM` puts these parts together."""
