"""Decoders of text with mixtures of experts and ordinary attention."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("AriaTextForCausalLM", "moe.aria:AriaTextForCausalLM", "Aria, text"),
    Architecture(
        "BailingMoeForCausalLM",
        "moe.bailing_moe:BailingMoeForCausalLM",
        "Ling-lite, Ling-plus, Ring",
    ),
    Architecture(
        "BailingMoeV2ForCausalLM", "moe.bailing_moe:BailingMoeV2ForCausalLM", "Ling 2, Ring 2"
    ),
    Architecture(
        "Cohere2MoeForCausalLM",
        "moe.cohere2_moe:Cohere2MoeForCausalLM",
        "Command with experts",
        _MIXED,
    ),
    Architecture("DbrxForCausalLM", "moe.dbrx:DbrxForCausalLM", "DBRX"),
    Architecture("DeepseekForCausalLM", "moe.deepseek:DeepseekForCausalLM", "DeepSeek-MoE 16B"),
    Architecture("Dots1ForCausalLM", "moe.dots1:Dots1ForCausalLM", "dots.llm1", _MIXED),
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        "moe.ernie4_5_moe:Ernie4_5_MoeForCausalLM",
        "ERNIE 4.5 with experts",
    ),
    Architecture(
        "Ernie4_5_VLMoeForCausalLM",
        "vision_language.ernie4_5_vl_moe:Ernie4_5_VLMoeForCausalLM",
        "ERNIE 4.5 VL, text",
    ),
    Architecture(
        "ExaoneMoEForCausalLM",
        "moe.exaone_moe:ExaoneMoeForCausalLM",
        "K-EXAONE",
        _MIXED,
        alias_of="ExaoneMoeForCausalLM",
    ),
    Architecture("ExaoneMoeForCausalLM", "moe.exaone_moe:ExaoneMoeForCausalLM", "K-EXAONE", _MIXED),
    Architecture("FlexOlmoForCausalLM", "moe.flex_olmo:FlexOlmoForCausalLM", "FlexOlmo"),
    Architecture("FlintForCausalLM", "moe.flint:FlintForCausalLM", "Flint", _MIXED),
    Architecture("Glm4MoeForCausalLM", "moe.glm4_moe:Glm4MoeForCausalLM", "GLM-4.5 to 4.7"),
    Architecture("GptOssForCausalLM", "moe.gpt_oss:GptOssForCausalLM", "gpt-oss", _MIXED),
    Architecture(
        "GraniteMoeForCausalLM", "moe.granite_moe:GraniteMoeForCausalLM", "Granite 3 MoE, PowerMoE"
    ),
    Architecture(
        "GraniteMoeSharedForCausalLM",
        "moe.granite_moe:GraniteMoeSharedForCausalLM",
        "Granite MoE with a shared expert",
    ),
    Architecture(
        "GraniteMoeSWAForCausalLM",
        "moe.granite_moe:GraniteMoeSWAForCausalLM",
        "Granite MoE with windows",
        _MIXED,
    ),
    Architecture("HYV3ForCausalLM", "moe.hy_v3:HYV3ForCausalLM", "Hunyuan 3"),
    Architecture(
        "HunYuanMoEV1ForCausalLM", "moe.hunyuan_moe:HunYuanMoEV1ForCausalLM", "Hunyuan-A13B"
    ),
    Architecture("MiniMaxM2ForCausalLM", "moe.minimax_m2:MiniMaxM2ForCausalLM", "MiniMax-M2"),
    Architecture("OlmoeForCausalLM", "moe.olmoe:OlmoeForCausalLM", "OLMoE"),
    Architecture("PhimoeForCausalLM", "moe.phimoe:PhimoeForCausalLM", "Phi-3.5-MoE", _MIXED),
    Architecture(
        "Qwen2MoeForCausalLM", "moe.qwen2_moe:Qwen2MoeForCausalLM", "Qwen1.5 and Qwen2 MoE", _MIXED
    ),
    Architecture("SolarOpenForCausalLM", "moe.solar_open:SolarOpenForCausalLM", "Solar Open"),
    Architecture("AfmoeForCausalLM", "moe.afmoe:AfmoeForCausalLM", "Trinity", _MIXED),
    Architecture("JetMoeForCausalLM", "moe.jetmoe:JetMoeForCausalLM", "JetMoE 8B"),
    Architecture(
        "MiMoV2FlashForCausalLM",
        "moe.mimo_v2_flash:MiMoV2FlashForCausalLM",
        "MiMo-V2-Flash",
        _MIXED,
    ),
    Architecture("ArcticForCausalLM", "moe.arctic:ArcticForCausalLM", "Arctic"),
    Architecture("Grok1ModelForCausalLM", "moe.grok:Grok1ModelForCausalLM", "Grok-1"),
    Architecture("Grok1ForCausalLM", "moe.grok:Grok1ForCausalLM", "Grok-2"),
    Architecture("LagunaForCausalLM", "moe.laguna:LagunaForCausalLM", "Laguna", _MIXED),
    Architecture(
        "PhiMoEForCausalLM",
        "moe.phimoe:PhimoeForCausalLM",
        "Phi-3.5-MoE",
        _MIXED,
        alias_of="PhimoeForCausalLM",
    ),
)
