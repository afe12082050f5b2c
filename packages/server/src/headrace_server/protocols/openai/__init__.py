"""Calls of OpenAI's protocols, and of vLLM's own routes beside them."""
