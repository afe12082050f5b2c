"""Models that see, each in its own way."""

from __future__ import annotations

from headrace_models.catalogue.multimodal.wrapper import Wrapper

ROWS = (
    Wrapper("AriaForConditionalGeneration", {"aria_text": "AriaTextForCausalLM"}, "Aria"),
    Wrapper(
        "DeepseekVLForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "DeepSeek-VL",
        ("vision_model", "aligner"),
    ),
    Wrapper(
        "DeepseekVLHybridForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "DeepSeek-VL, with two towers",
        (
            "vision_model",
            "aligner",
            "high_res_vision_alpha",
            "high_res_vision_model",
            "high_res_vision_neck",
            "high_res_vision_proj",
        ),
    ),
    Wrapper(
        "Emu3ForConditionalGeneration",
        {"emu3_text_model": "LlamaForCausalLM"},
        "Emu3",
        ("vqmodel", "vocabulary_mapping"),
    ),
    Wrapper(
        "FuyuForCausalLM",
        {"persimmon": "PersimmonForCausalLM", "fuyu": "PersimmonForCausalLM"},
        "Fuyu 8B",
        ("vision_embed_tokens",),
        towers={"": "vision_language.fuyu:Fuyu"},
        takes={"patch_size": ("image",)},
    ),
    Wrapper(
        "GotOcr2ForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "GOT-OCR 2",
    ),
    Wrapper(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        {"hyperclovax": "HyperCLOVAXForCausalLM"},
        "HyperCLOVA X Seed Vision",
        ("vision_model", "vision_projector", "vision_projection"),
    ),
    Wrapper(
        "JanusForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "Janus, Janus Pro",
        (
            "vision_model",
            "aligner",
            "vqmodel",
            "generation_embeddings",
            "generation_aligner",
            "generation_head",
        ),
    ),
    Wrapper(
        "Llama4ForConditionalGeneration",
        {"llama4_text": "Llama4ForCausalLM"},
        "Llama 4 Scout, Maverick",
        ("vision_model", "multi_modal_projector"),
        towers={"llama4_vision_model": "vision_language.llama4:Llama4"},
    ),
    Wrapper(
        "MiniCPMOcrForConditionalGeneration",
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        "MiniCPM-OCR",
        ("vision_tower", "merger"),
    ),
    Wrapper(
        "MiniCPMV",
        {"2.6": "Qwen2ForCausalLM"},
        "MiniCPM-V 2.6",
        ("vpm", "resampler"),
        renames=((r"^llm\.", ""),),
        text_key="version",
        towers={"": "vision_language.minicpmv:MiniCPMV"},
    ),
    Wrapper(
        "MiniCPMV4_6ForConditionalGeneration",
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        "MiniCPM-V 4.6",
        ("vision_tower", "merger"),
    ),
    Wrapper(
        "MiniCPMV4_7ForConditionalGeneration",
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        "MiniCPM-V 4.7",
        ("vision_tower", "merger"),
    ),
    Wrapper(
        "MllamaForConditionalGeneration",
        {"mllama_text_model": "MllamaForCausalLM"},
        "Llama 3.2 Vision",
        ("vision_model", "multi_modal_projector"),
    ),
    Wrapper(
        "MolmoForCausalLM",
        {"molmo": "MolmoTextForCausalLM"},
        "Molmo 7B and 72B",
        ("vision_backbone",),
        towers={"": "vision_language.molmo:Molmo"},
        takes={"vision_backbone": ("image",)},
        more_tokens=128,
    ),
    Wrapper(
        "Ovis",
        {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
        "Ovis 1.6 and 2",
        ("visual_tokenizer", "vte"),
        renames=((r"^llm\.", ""),),
        towers={"": "vision_language.ovis:Ovis"},
        takes={"visual_tokenizer_config": ("image",)},
    ),
    Wrapper(
        "Ovis2ForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"},
        "Ovis2",
        ("vision_tower", "visual_embeddings_table"),
        towers={"ovis2_vision": "vision_language.ovis:Ovis2"},
    ),
    Wrapper(
        "VideoLlama3ForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "VideoLLaMA 3",
        ("vision_model", "projector"),
    ),
)
