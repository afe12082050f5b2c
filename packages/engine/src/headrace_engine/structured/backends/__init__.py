"""Grammar backends, one module each; plug-ins of ``headrace.grammar_backends``."""
