"""Towers that see images at their own size, most with places on three axes: Qwen's and what follows them."""

from __future__ import annotations

from headrace_models.catalogue.multimodal.wrapper import VIDEOS, Wrapper

ROUTED = {"norm_topk_prob": True}
"""Setting of models whose routers always divide the chosen experts' weights by their sum."""
ROWS = (
    Wrapper(
        "BagelForConditionalGeneration",
        {"qwen2": "BagelTextForCausalLM"},
        "Bagel, which understands images",
        ("vit_model", "connector", "vit_pos_embed"),
        renames=(
            (r"_moe_gen\b", None),
            (r"^(latent_pos_embed|time_embedder|vae2llm|llm2vae|encoder|decoder)\.", None),
        ),
        fixed={"tie_word_embeddings": False},
        towers={"": "native_size.bagel:Bagel"},
        takes={"vit_config": ("image",)},
    ),
    Wrapper(
        "DotsOCRForCausalLM",
        {"dots_ocr": "Qwen2ForCausalLM"},
        "dots.ocr",
        ("vision_tower",),
        towers={"": "native_size.dots_ocr:DotsOCR"},
    ),
    Wrapper(
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeForCausalLM",
            "ernie4_5_moe_vl": "Ernie4_5_VLMoeForCausalLM",
        },
        "ERNIE 4.5 VL",
        ("vision_model", "vision_tower", "resampler_model"),
        towers={"": "native_size.ernie_vl:Ernie4_5VL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Exaone4_5_ForConditionalGeneration",
        {"exaone4": "Exaone4ForCausalLM"},
        "EXAONE 4.5",
        ("visual", "mtp"),
    ),
    Wrapper(
        "Glm46VForConditionalGeneration",
        {"glm4v_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM"},
        "GLM-4.6V",
        ("visual",),
        towers={"": "native_size.glm4v:Glm4v"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Glm4vForConditionalGeneration",
        {"glm4v_text": "Glm4ForCausalLM"},
        "GLM-4.1V",
        ("visual",),
        fixed={"attention_bias": True},
        towers={"": "native_size.glm4v:Glm4v"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Glm4vMoeForConditionalGeneration",
        {"glm4v_moe_text": "Glm4MoeForCausalLM"},
        "GLM-4.5V",
        ("visual",),
        towers={"": "native_size.glm4v:Glm4v"},
        takes=VIDEOS,
    ),
    Wrapper(
        "GlmOcrForConditionalGeneration",
        {"glm_ocr_text": "Glm4ForCausalLM"},
        "GLM-OCR",
        ("visual", "language_model.layers.16"),
        fixed={"attention_bias": False},
        towers={"": "native_size.glm4v:GlmOcr"},
    ),
    Wrapper(
        "HunYuanVLForConditionalGeneration",
        {
            "hunyuan_vl_text": "HunYuanDenseV1ForCausalLM",
            "hunyuan_vl": "HunYuanDenseV1ForCausalLM",
        },
        "HunyuanOCR",
        ("vit",),
        towers={"": "native_size.hunyuan_vl:HunYuanVL"},
    ),
    Wrapper(
        "IsaacForConditionalGeneration",
        {"isaac": "Qwen3ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
        "Isaac 0.1 and 0.2",
        ("vision_embedding",),
        towers={"": "native_size.isaac:Isaac"},
    ),
    Wrapper(
        "KananaVForConditionalGeneration",
        dict.fromkeys(("kanana-1.5-3b-instruct", "llama"), "LlamaForCausalLM"),
        "Kanana-V",
        ("vision_model", "abstractor"),
        towers={"": "native_size.kanana_v:KananaV"},
    ),
    *(
        Wrapper(
            f"{name}ForConditionalGeneration",
            dict.fromkeys(kinds, "Qwen3ForCausalLM"),
            models,
            ("visual", "mlp_AR"),
            towers={"": f"native_size.keye:{name}"},
            takes=VIDEOS,
        )
        for name, models, kinds in (
            ("Keye", "Keye-VL", ("Keye", "keye")),
            ("KeyeVL1_5", "Keye-VL 1.5", ("KeyeVL1_5", "keye_vl1_5")),
        )
    ),
    *(
        Wrapper(
            name,
            {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
            "Kimi K2.5",
            ("vision_tower", "mm_projector"),
            renames=((r"^language_model\.model\.blocks\.", "language_model.model.layers."),),
            towers={"": "native_size.kimi:KimiK25"},
            takes=VIDEOS,
            processor="KimiK25ForConditionalGeneration",
        )
        for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ),
    Wrapper(
        "KimiVLForConditionalGeneration",
        {"deepseek_v3": "DeepseekV3ForCausalLM"},
        "Kimi-VL",
        towers={"": "native_size.kimi:KimiVL"},
    ),
    Wrapper(
        "OpenCUAForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "OpenCUA",
        ("vision_tower",),
        towers={"": "native_size.opencua:OpenCUA"},
    ),
    Wrapper(
        "PaddleOCRVLForConditionalGeneration",
        {"paddleocr_vl_text": "LlamaForCausalLM", "paddleocr_vl": "LlamaForCausalLM"},
        "PaddleOCR-VL",
        ("visual", "projector", "mlp_AR"),
        fixed={"attention_bias": False},
    ),
    Wrapper(
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
        "Qwen2.5-VL",
        ("visual",),
        towers={"": "vision_language.qwen_vl:Qwen2_5VL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Qwen2VLForConditionalGeneration",
        {"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
        "Qwen2-VL",
        ("visual",),
        towers={"": "vision_language.qwen_vl:Qwen2VL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Qwen3_5ForConditionalGeneration",
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        "Qwen3.5",
        ("visual", "mtp"),
        towers={"": "native_size.qwen3_5:Qwen3_5"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Qwen3_5MoeForConditionalGeneration",
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        "Qwen3.5, mixtures",
        ("visual", "mtp"),
        towers={"": "native_size.qwen3_5:Qwen3_5"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "Qwen3-VL",
        ("visual",),
        towers={"": "vision_language.qwen_vl:Qwen3VL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        "Qwen3-VL, mixtures",
        ("visual",),
        towers={"": "vision_language.qwen_vl:Qwen3VL"},
        takes=VIDEOS,
        fixed=ROUTED,
        transposes_experts=True,
    ),
    Wrapper(
        "Tarsier2ForConditionalGeneration",
        {"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
        "Tarsier2",
        ("visual",),
        renames=((r"^vision_tower\.", "visual."),),
        towers={"": "vision_language.qwen_vl:Qwen2VL"},
        takes=VIDEOS,
    ),
)
