"""Youtu-LLM: a dense Llama with latent attention. Tencent 2025, arXiv:2512.24618."""

from __future__ import annotations

from typing import ClassVar

from headrace_models.layers.decoders.mla import MLADecoder


class YoutuForCausalLM(MLADecoder):
    """Youtu-LLM 2B."""

    ties_embeddings: ClassVar[bool] = True
