"""Llama 1 to 3.3 and what has its shape (Yi, SmolLM 1/2, TinyLlama, ...).

Touvron et al. 2023, arXiv:2302.13971; llama3 rotary scaling: Llama 3 technical report 2024,
arXiv:2407.21783.
"""

from __future__ import annotations

from headrace_models.layers.decoders.llama import LlamaDecoder


class LlamaForCausalLM(LlamaDecoder):
    """The reference shape; nothing differs."""
