"""InternViT and a language model, and towers that are joined as it is."""

from __future__ import annotations

from headrace_models.catalogue.multimodal.wrapper import VIDEOS, Wrapper

ROWS = (
    Wrapper(
        "Eagle2_5_VLForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "Eagle 2.5",
        ("vision_model", "mlp1"),
        towers={"siglip_vision_model": "vision_language.eagle2_5:Eagle25"},
        takes=VIDEOS,
    ),
    Wrapper(
        "H2OVLChatModel",
        {"mistral": "MistralForCausalLM", "llama": "LlamaForCausalLM"},
        "H2OVL Mississippi",
        ("vision_model", "mlp1"),
        towers={"intern_vit_6b": "vision_language.internvl_chat:InternVLChat"},
    ),
    Wrapper(
        "InternS1ForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"},
        "Intern-S1",
        renames=((r"\bvision_tower\.encoder\.layers\.", "vision_tower.encoder.layer."),),
        towers={"interns1_vision": "vision_language.internvl:InternVL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "InternVLChatModel",
        {
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "llama": "LlamaForCausalLM",
            "internlm2": "InternLM2ForCausalLM",
            "phi3": "Phi3ForCausalLM",
            "gpt_oss": "GptOssForCausalLM",
        },
        "InternVL 2 to 3.5",
        ("vision_model", "mlp1"),
        towers={"intern_vit_6b": "vision_language.internvl_chat:InternVLChat"},
        takes=VIDEOS,
    ),
    Wrapper(
        "InternVLForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"},
        "InternVL, by transformers",
        towers={"internvl_vision": "vision_language.internvl:InternVL"},
        takes=VIDEOS,
    ),
    Wrapper(
        "NemotronH_Nano_VL_V2",
        {"nemotron_h": "NemotronHForCausalLM"},
        "Nemotron Nano 2 VL",
        ("vision_model", "mlp1"),
        towers={"": "vision_language.nemotron_nano_vl:NemotronNanoVL2"},
        takes=VIDEOS,
    ),
    Wrapper(
        "Llama_Nemotron_Nano_VL",
        {"llama": "LlamaForCausalLM"},
        "Llama 3.1 Nemotron Nano VL",
        ("vision_model", "mlp1"),
        towers={"": "vision_language.nemotron_nano_vl:NemotronNanoVL"},
    ),
    Wrapper(
        "NVLM_D_Model",
        {"qwen2": "Qwen2ForCausalLM"},
        "NVLM-D",
        ("vision_model", "mlp1"),
        towers={"intern_vit_6b": "vision_language.internvl_chat:NVLMD"},
    ),
    Wrapper(
        "QianfanOCRForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM"},
        "Qianfan-OCR",
        ("vision_tower", "multi_modal_projector", "vision_model", "mlp1"),
        renames=((r"^language_model\.model\.encoder\.layers\.", "language_model.model.layers."),),
    ),
    Wrapper(
        "SkyworkR1VChatModel",
        {"qwen2": "Qwen2ForCausalLM"},
        "Skywork-R1V",
        ("vision_model", "mlp1"),
        towers={"intern_vit_6b": "vision_language.internvl_chat:InternVLChat"},
    ),
)
