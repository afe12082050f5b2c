"""Decoders of text with ordinary attention and gated MLPs."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("Gemma2ForCausalLM", "gemma2:Gemma2ForCausalLM", "Gemma 2", _MIXED),
    Architecture("Gemma3ForCausalLM", "gemma3:Gemma3ForCausalLM", "Gemma 3, text", _MIXED),
    Architecture("GemmaForCausalLM", "gemma:GemmaForCausalLM", "Gemma 1"),
    Architecture("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2, Cerebras-GPT"),
    Architecture("GritLM", "gritlm:GritLM", "GritLM (generates and embeds)", _MIXED, "pool"),
    Architecture(
        "LLaMAForCausalLM", "llama:LlamaForCausalLM", "Llama", alias_of="LlamaForCausalLM"
    ),
    Architecture(
        "LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3.3, Yi, SmolLM 1 and 2"
    ),
    Architecture("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral 7B, Nemo", _MIXED),
    Architecture("MixtralForCausalLM", "mixtral:MixtralForCausalLM", "Mixtral 8x7B, 8x22B", _MIXED),
    Architecture("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3, Phi-4", _MIXED),
    Architecture("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2, Qwen2.5, QwQ", _MIXED),
    Architecture("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3", _MIXED),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 MoE", _MIXED),
)
