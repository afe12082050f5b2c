"""Decoders of text with ordinary attention and gated MLPs."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("ApertusForCausalLM", "decoder.apertus:ApertusForCausalLM", "Apertus"),
    Architecture("ArceeForCausalLM", "decoder.arcee:ArceeForCausalLM", "Arcee AFM 4.5B"),
    Architecture("BitNetForCausalLM", "decoder.bitnet:BitNetForCausalLM", "BitNet b1.58"),
    Architecture(
        "Cohere2ForCausalLM", "decoder.cohere2:Cohere2ForCausalLM", "Command R7B, Command A", _MIXED
    ),
    Architecture(
        "CohereForCausalLM", "decoder.cohere:CohereForCausalLM", "Command R and R+, Aya 23"
    ),
    Architecture("CwmForCausalLM", "decoder.cwm:CwmForCausalLM", "CWM", _MIXED),
    Architecture(
        "Ernie4_5_ForCausalLM",
        "decoder.ernie4_5:Ernie4_5ForCausalLM",
        "ERNIE 4.5, dense",
        alias_of="Ernie4_5ForCausalLM",
    ),
    Architecture("Ernie4_5ForCausalLM", "decoder.ernie4_5:Ernie4_5ForCausalLM", "ERNIE 4.5, dense"),
    Architecture("Exaone4ForCausalLM", "decoder.exaone4:Exaone4ForCausalLM", "EXAONE 4", _MIXED),
    Architecture("Gemma2ForCausalLM", "decoder.gemma2:Gemma2ForCausalLM", "Gemma 2", _MIXED),
    Architecture("Gemma3ForCausalLM", "decoder.gemma3:Gemma3ForCausalLM", "Gemma 3, text", _MIXED),
    Architecture(
        "Gemma3nForCausalLM", "decoder.gemma3n:Gemma3nForCausalLM", "Gemma 3n, text", _MIXED
    ),
    Architecture("Gemma4ForCausalLM", "decoder.gemma4:Gemma4ForCausalLM", "Gemma 4, text", _MIXED),
    Architecture(
        "Gemma4UnifiedForCausalLM",
        "decoder.gemma4:Gemma4UnifiedForCausalLM",
        "Gemma 4 12B, text",
        _MIXED,
    ),
    Architecture("GemmaForCausalLM", "decoder.gemma:GemmaForCausalLM", "Gemma 1"),
    Architecture("Glm4ForCausalLM", "decoder.glm4:Glm4ForCausalLM", "GLM-4-0414, GLM-Z1"),
    Architecture("GlmForCausalLM", "decoder.glm:GlmForCausalLM", "GLM-4 9B, GLM-Edge"),
    Architecture("GraniteForCausalLM", "decoder.granite:GraniteForCausalLM", "Granite 3, PowerLM"),
    Architecture(
        "GraniteSWAForCausalLM",
        "decoder.granite_swa:GraniteSWAForCausalLM",
        "Granite with windows",
        _MIXED,
    ),
    Architecture(
        "GritLM", "decoder.gritlm:GritLM", "GritLM (generates and embeds)", _MIXED, "pool"
    ),
    Architecture("HeliumForCausalLM", "decoder.helium:HeliumForCausalLM", "Helium 1"),
    Architecture(
        "HunYuanDenseV1ForCausalLM",
        "decoder.hunyuan_dense:HunYuanDenseV1ForCausalLM",
        "Hunyuan, dense",
    ),
    Architecture(
        "HyperCLOVAXForCausalLM", "decoder.hyperclovax:HyperCLOVAXForCausalLM", "HyperCLOVA X SEED"
    ),
    Architecture("Jais2ForCausalLM", "decoder.jais2:Jais2ForCausalLM", "Jais 2"),
    Architecture(
        "LLaMAForCausalLM", "decoder.llama:LlamaForCausalLM", "Llama", alias_of="LlamaForCausalLM"
    ),
    Architecture(
        "LlamaForCausalLM", "decoder.llama:LlamaForCausalLM", "Llama 1 to 3.3, Yi, SmolLM 1 and 2"
    ),
    Architecture("MellumForCausalLM", "moe.mellum:MellumForCausalLM", "Mellum 2", _MIXED),
    Architecture(
        "Ministral3ForCausalLM",
        "decoder.ministral3:Ministral3ForCausalLM",
        "Ministral 3, text",
        _MIXED,
    ),
    Architecture(
        "MinistralForCausalLM", "decoder.ministral:MinistralForCausalLM", "Ministral 8B", _MIXED
    ),
    Architecture(
        "MistralForCausalLM", "decoder.mistral:MistralForCausalLM", "Mistral 7B, Nemo", _MIXED
    ),
    Architecture(
        "MixtralForCausalLM", "moe.mixtral:MixtralForCausalLM", "Mixtral 8x7B, 8x22B", _MIXED
    ),
    Architecture(
        "MllamaForCausalLM", "vision_language.mllama:MllamaForCausalLM", "Llama 3.2 Vision, text"
    ),
    Architecture("NanoChatForCausalLM", "decoder.nanochat:NanoChatForCausalLM", "nanochat"),
    Architecture(
        "NemotronForCausalLM", "decoder.nemotron:NemotronForCausalLM", "Nemotron-4, Minitron"
    ),
    Architecture("Olmo2ForCausalLM", "decoder.olmo2:Olmo2ForCausalLM", "OLMo 2"),
    Architecture("Olmo3ForCausalLM", "decoder.olmo3:Olmo3ForCausalLM", "OLMo 3", _MIXED),
    Architecture("OlmoForCausalLM", "decoder.olmo:OlmoForCausalLM", "OLMo 1"),
    Architecture("Phi3ForCausalLM", "decoder.phi3:Phi3ForCausalLM", "Phi-3, Phi-4", _MIXED),
    Architecture(
        "Qwen2ForCausalLM", "decoder.qwen2:Qwen2ForCausalLM", "Qwen2, Qwen2.5, QwQ", _MIXED
    ),
    Architecture("Qwen3ForCausalLM", "decoder.qwen3:Qwen3ForCausalLM", "Qwen3", _MIXED),
    Architecture("Qwen3MoeForCausalLM", "moe.qwen3_moe:Qwen3MoeForCausalLM", "Qwen3 MoE", _MIXED),
    Architecture("SeedOssForCausalLM", "decoder.seed_oss:SeedOssForCausalLM", "Seed-OSS"),
    Architecture("SmolLM3ForCausalLM", "decoder.smollm3:SmolLM3ForCausalLM", "SmolLM3", _MIXED),
    Architecture(
        "StableLMEpochForCausalLM",
        "decoder.stablelm:StableLmForCausalLM",
        "StableLM",
        alias_of="StableLmForCausalLM",
    ),
    Architecture("StableLmForCausalLM", "decoder.stablelm:StableLmForCausalLM", "StableLM"),
    Architecture(
        "VaultGemmaForCausalLM", "decoder.vaultgemma:VaultGemmaForCausalLM", "VaultGemma", _MIXED
    ),
)
