"""Suites of the engine's plug points: executors, schedulers, KV-cache managers, grammars, tokenizers."""
