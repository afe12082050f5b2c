"""Heads that guess a model's next tokens by its hidden states: each is a
:class:`headrace_engine.speculation.draft_head.DraftHead`."""
