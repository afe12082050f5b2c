"""Decoders of text whose attention is latent, or within chunks."""

from headrace_models.catalogue.row import Architecture

_LATENT = ("latent",)

ROWS = (
    Architecture(
        "DeepseekV2ForCausalLM",
        "mla.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepSeek V2, V2 Lite",
        _LATENT,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "mla.deepseek_v3:DeepseekV3ForCausalLM",
        "DeepSeek V3, R1, Kimi K2, Moonlight",
        _LATENT,
    ),
    Architecture(
        "Glm4MoeLiteForCausalLM",
        "mla.glm4_moe_lite:Glm4MoeLiteForCausalLM",
        "GLM-4.7-Flash",
        _LATENT,
    ),
    Architecture(
        "Llama4ForCausalLM", "moe.llama4:Llama4ForCausalLM", "Llama 4, text", ("full", "chunked")
    ),
    Architecture(
        "LongcatFlashForCausalLM",
        "mla.longcat_flash:LongcatFlashForCausalLM",
        "LongCat-Flash",
        _LATENT,
    ),
    Architecture("MiniCPM3ForCausalLM", "mla.minicpm3:MiniCPM3ForCausalLM", "MiniCPM 3", _LATENT),
    Architecture("YoutuForCausalLM", "mla.youtu:YoutuForCausalLM", "Youtu-LLM", _LATENT),
    Architecture(
        "DeepseekV32ForCausalLM",
        "mla.deepseek_v32:DeepseekV32ForCausalLM",
        "DeepSeek V3.2",
        _LATENT,
    ),
    Architecture("GlmMoeDsaForCausalLM", "mla.glm_moe_dsa:GlmMoeDsaForCausalLM", "GLM-5", _LATENT),
    Architecture(
        "PanguUltraMoEForCausalLM",
        "mla.pangu_ultra_moe:PanguUltraMoEForCausalLM",
        "openPangu Ultra MoE",
        _LATENT,
    ),
    Architecture(
        "Mistral4ForCausalLM", "mla.mistral4:Mistral4ForCausalLM", "Mistral 4, text", _LATENT
    ),
    Architecture(
        "MistralLarge3ForCausalLM",
        "mla.mistral4:Mistral4ForCausalLM",
        "Mistral Large 3, text",
        _LATENT,
        alias_of="Mistral4ForCausalLM",
    ),
)
