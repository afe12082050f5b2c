"""Decoders of text with mixtures of experts and ordinary attention."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("AriaTextForCausalLM", "aria:AriaTextForCausalLM", "Aria, text"),
    Architecture(
        "BailingMoeForCausalLM", "bailing_moe:BailingMoeForCausalLM", "Ling-lite, Ling-plus, Ring"
    ),
    Architecture(
        "BailingMoeV2ForCausalLM", "bailing_moe:BailingMoeV2ForCausalLM", "Ling 2, Ring 2"
    ),
    Architecture(
        "Cohere2MoeForCausalLM", "cohere2_moe:Cohere2MoeForCausalLM", "Command with experts", _MIXED
    ),
    Architecture("DbrxForCausalLM", "dbrx:DbrxForCausalLM", "DBRX"),
    Architecture("DeepseekForCausalLM", "deepseek:DeepseekForCausalLM", "DeepSeek-MoE 16B"),
    Architecture("Dots1ForCausalLM", "dots1:Dots1ForCausalLM", "dots.llm1", _MIXED),
    Architecture(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe:Ernie4_5_MoeForCausalLM", "ERNIE 4.5 with experts"
    ),
    Architecture(
        "Ernie4_5_VLMoeForCausalLM",
        "ernie4_5_vl_moe:Ernie4_5_VLMoeForCausalLM",
        "ERNIE 4.5 VL, text",
    ),
    Architecture(
        "ExaoneMoEForCausalLM",
        "exaone_moe:ExaoneMoeForCausalLM",
        "K-EXAONE",
        _MIXED,
        alias_of="ExaoneMoeForCausalLM",
    ),
    Architecture("ExaoneMoeForCausalLM", "exaone_moe:ExaoneMoeForCausalLM", "K-EXAONE", _MIXED),
    Architecture("FlexOlmoForCausalLM", "flex_olmo:FlexOlmoForCausalLM", "FlexOlmo"),
    Architecture("FlintForCausalLM", "flint:FlintForCausalLM", "Flint", _MIXED),
    Architecture("Glm4MoeForCausalLM", "glm4_moe:Glm4MoeForCausalLM", "GLM-4.5 to 4.7"),
    Architecture("GptOssForCausalLM", "gpt_oss:GptOssForCausalLM", "gpt-oss", _MIXED),
    Architecture(
        "GraniteMoeForCausalLM", "granite_moe:GraniteMoeForCausalLM", "Granite 3 MoE, PowerMoE"
    ),
    Architecture(
        "GraniteMoeSharedForCausalLM",
        "granite_moe:GraniteMoeSharedForCausalLM",
        "Granite MoE with a shared expert",
    ),
    Architecture(
        "GraniteMoeSWAForCausalLM",
        "granite_moe:GraniteMoeSWAForCausalLM",
        "Granite MoE with windows",
        _MIXED,
    ),
    Architecture("HYV3ForCausalLM", "hy_v3:HYV3ForCausalLM", "Hunyuan 3"),
    Architecture("HunYuanMoEV1ForCausalLM", "hunyuan_moe:HunYuanMoEV1ForCausalLM", "Hunyuan-A13B"),
    Architecture("MiniMaxM2ForCausalLM", "minimax_m2:MiniMaxM2ForCausalLM", "MiniMax-M2"),
    Architecture("OlmoeForCausalLM", "olmoe:OlmoeForCausalLM", "OLMoE"),
    Architecture("PhimoeForCausalLM", "phimoe:PhimoeForCausalLM", "Phi-3.5-MoE", _MIXED),
    Architecture(
        "Qwen2MoeForCausalLM", "qwen2_moe:Qwen2MoeForCausalLM", "Qwen1.5 and Qwen2 MoE", _MIXED
    ),
    Architecture("SolarOpenForCausalLM", "solar_open:SolarOpenForCausalLM", "Solar Open"),
    Architecture("AfmoeForCausalLM", "afmoe:AfmoeForCausalLM", "Trinity", _MIXED),
    Architecture("JetMoeForCausalLM", "jetmoe:JetMoeForCausalLM", "JetMoE 8B"),
    Architecture(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash:MiMoV2FlashForCausalLM", "MiMo-V2-Flash", _MIXED
    ),
    Architecture("ArcticForCausalLM", "arctic:ArcticForCausalLM", "Arctic"),
    Architecture("Grok1ModelForCausalLM", "grok:Grok1ModelForCausalLM", "Grok-1"),
    Architecture("Grok1ForCausalLM", "grok:Grok1ForCausalLM", "Grok-2"),
    Architecture("LagunaForCausalLM", "laguna:LagunaForCausalLM", "Laguna", _MIXED),
    Architecture(
        "PhiMoEForCausalLM",
        "phimoe:PhimoeForCausalLM",
        "Phi-3.5-MoE",
        _MIXED,
        alias_of="PhimoeForCausalLM",
    ),
)
