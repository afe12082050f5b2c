"""Decoders of text with ordinary attention and gated MLPs."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("ApertusForCausalLM", "apertus:ApertusForCausalLM", "Apertus"),
    Architecture("ArceeForCausalLM", "arcee:ArceeForCausalLM", "Arcee AFM 4.5B"),
    Architecture("BitNetForCausalLM", "bitnet:BitNetForCausalLM", "BitNet b1.58"),
    Architecture(
        "Cohere2ForCausalLM", "cohere2:Cohere2ForCausalLM", "Command R7B, Command A", _MIXED
    ),
    Architecture("CohereForCausalLM", "cohere:CohereForCausalLM", "Command R and R+, Aya 23"),
    Architecture("CwmForCausalLM", "cwm:CwmForCausalLM", "CWM", _MIXED),
    Architecture(
        "Ernie4_5_ForCausalLM",
        "ernie4_5:Ernie4_5ForCausalLM",
        "ERNIE 4.5, dense",
        alias_of="Ernie4_5ForCausalLM",
    ),
    Architecture("Ernie4_5ForCausalLM", "ernie4_5:Ernie4_5ForCausalLM", "ERNIE 4.5, dense"),
    Architecture("Exaone4ForCausalLM", "exaone4:Exaone4ForCausalLM", "EXAONE 4", _MIXED),
    Architecture("Gemma2ForCausalLM", "gemma2:Gemma2ForCausalLM", "Gemma 2", _MIXED),
    Architecture("Gemma3ForCausalLM", "gemma3:Gemma3ForCausalLM", "Gemma 3, text", _MIXED),
    Architecture("Gemma3nForCausalLM", "gemma3n:Gemma3nForCausalLM", "Gemma 3n, text", _MIXED),
    Architecture("Gemma4ForCausalLM", "gemma4:Gemma4ForCausalLM", "Gemma 4, text", _MIXED),
    Architecture(
        "Gemma4UnifiedForCausalLM", "gemma4:Gemma4UnifiedForCausalLM", "Gemma 4 12B, text", _MIXED
    ),
    Architecture("GemmaForCausalLM", "gemma:GemmaForCausalLM", "Gemma 1"),
    Architecture("Glm4ForCausalLM", "glm4:Glm4ForCausalLM", "GLM-4-0414, GLM-Z1"),
    Architecture("GlmForCausalLM", "glm:GlmForCausalLM", "GLM-4 9B, GLM-Edge"),
    Architecture("GraniteForCausalLM", "granite:GraniteForCausalLM", "Granite 3, PowerLM"),
    Architecture(
        "GraniteSWAForCausalLM", "granite_swa:GraniteSWAForCausalLM", "Granite with windows", _MIXED
    ),
    Architecture("GritLM", "gritlm:GritLM", "GritLM (generates and embeds)", _MIXED, "pool"),
    Architecture("HeliumForCausalLM", "helium:HeliumForCausalLM", "Helium 1"),
    Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_dense:HunYuanDenseV1ForCausalLM", "Hunyuan, dense"
    ),
    Architecture(
        "HyperCLOVAXForCausalLM", "hyperclovax:HyperCLOVAXForCausalLM", "HyperCLOVA X SEED"
    ),
    Architecture("Jais2ForCausalLM", "jais2:Jais2ForCausalLM", "Jais 2"),
    Architecture(
        "LLaMAForCausalLM", "llama:LlamaForCausalLM", "Llama", alias_of="LlamaForCausalLM"
    ),
    Architecture(
        "LlamaForCausalLM", "llama:LlamaForCausalLM", "Llama 1 to 3.3, Yi, SmolLM 1 and 2"
    ),
    Architecture("MellumForCausalLM", "mellum:MellumForCausalLM", "Mellum 2", _MIXED),
    Architecture(
        "Ministral3ForCausalLM", "ministral3:Ministral3ForCausalLM", "Ministral 3, text", _MIXED
    ),
    Architecture("MinistralForCausalLM", "ministral:MinistralForCausalLM", "Ministral 8B", _MIXED),
    Architecture("MistralForCausalLM", "mistral:MistralForCausalLM", "Mistral 7B, Nemo", _MIXED),
    Architecture("MixtralForCausalLM", "mixtral:MixtralForCausalLM", "Mixtral 8x7B, 8x22B", _MIXED),
    Architecture("MllamaForCausalLM", "mllama:MllamaForCausalLM", "Llama 3.2 Vision, text"),
    Architecture("NanoChatForCausalLM", "nanochat:NanoChatForCausalLM", "nanochat"),
    Architecture("NemotronForCausalLM", "nemotron:NemotronForCausalLM", "Nemotron-4, Minitron"),
    Architecture("Olmo2ForCausalLM", "olmo2:Olmo2ForCausalLM", "OLMo 2"),
    Architecture("Olmo3ForCausalLM", "olmo3:Olmo3ForCausalLM", "OLMo 3", _MIXED),
    Architecture("OlmoForCausalLM", "olmo:OlmoForCausalLM", "OLMo 1"),
    Architecture("Phi3ForCausalLM", "phi3:Phi3ForCausalLM", "Phi-3, Phi-4", _MIXED),
    Architecture("Qwen2ForCausalLM", "qwen2:Qwen2ForCausalLM", "Qwen2, Qwen2.5, QwQ", _MIXED),
    Architecture("Qwen3ForCausalLM", "qwen3:Qwen3ForCausalLM", "Qwen3", _MIXED),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 MoE", _MIXED),
    Architecture("SeedOssForCausalLM", "seed_oss:SeedOssForCausalLM", "Seed-OSS"),
    Architecture("SmolLM3ForCausalLM", "smollm3:SmolLM3ForCausalLM", "SmolLM3", _MIXED),
    Architecture(
        "StableLMEpochForCausalLM",
        "stablelm:StableLmForCausalLM",
        "StableLM",
        alias_of="StableLmForCausalLM",
    ),
    Architecture("StableLmForCausalLM", "stablelm:StableLmForCausalLM", "StableLM"),
    Architecture("VaultGemmaForCausalLM", "vaultgemma:VaultGemmaForCausalLM", "VaultGemma", _MIXED),
)
