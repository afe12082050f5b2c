"""Models that take audio beside images and videos."""

from __future__ import annotations

from headrace_models.catalogue.multimodal.wrapper import AUDIO, IMAGES, VIDEOS, Wrapper

_THINKER = ("audio_tower", "visual", "talker", "token2wav", "code2wav")
_ROUTED = {"norm_topk_prob": True}
"""Setting of models whose routers always divide the chosen experts' weights by their sum."""
_COSMOS = (
    "visual", "blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list", "proj_in", "proj_out",
    "time_embedder", "audio_proj_in", "audio_proj_out", "audio_modality_embed", "action_proj_in",
    "action_proj_out", "action_modality_embed",
)  # fmt: skip
_PHI_4 = {"phi4_multimodal": "Phi3ForCausalLM", "phi4mm": "Phi3ForCausalLM"}
_ADAPTED = ((r"\.lora_[AB]\.", None), (r"\.base_layer\.", "."))
_PHI_4_ADAPTERS = {"image": "vision-lora", "audio": "speech-lora", "audio+image": "vision-lora"}
_PHI_4_NAMES = (
    (r"\.feed_forward_(in|out)\.net\.0\.linear\.", r".feed_forward_\1.gate_up_proj."),
    (r"\.feed_forward_(in|out)\.net\.2\.", r".feed_forward_\1.down_proj."),
    (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
    (r"\.img_projection\.0\.", ".img_projection_up."),
    (r"\.img_projection\.2\.", ".img_projection_down."),
    (r"\.image_embed\.glb_GN$", ".image_embed.global_img_feature_extensor"),
    (r"\.image_embed\.sub_GN$", ".image_embed.sub_img_feature_extensor"),
    (r"\.audio_projection\.speech\.0\.", ".up_proj_for_speech."),
    (r"\.audio_projection\.speech\.2\.", ".down_proj_for_speech."),
    (r"\.audio_projection\.vision\.0\.", ".up_proj_for_vision_speech."),
    (r"\.audio_projection\.vision\.2\.", ".down_proj_for_vision_speech."),
)
"""Published names of what stands in front of the decoder -> those of transformers."""
ROWS = (
    Wrapper(
        "Cosmos3OmniForConditionalGeneration",
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        "Cosmos 3 Omni, the reasoner",
        _COSMOS,
        renames=(
            (r"\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.|moe_gen", None),
            (r"^(layers|embed_tokens|norm)\.", r"model.\1."),
            (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
            (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
            (r"\.self_attn\.norm_([qk])\.", r".self_attn.\1_norm."),
        ),
    ),
    Wrapper(
        "Gemma3nForConditionalGeneration",
        {"gemma3n_text": "Gemma3nForCausalLM"},
        "Gemma 3n",
        ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        towers={"": "omni.gemma3n:Gemma3n"},
        takes={**AUDIO, **IMAGES},
    ),
    Wrapper(
        "Gemma4ForConditionalGeneration",
        {"gemma4_text": "Gemma4ForCausalLM"},
        "Gemma 4",
        ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        towers={"": "vision_language.gemma4:Gemma4"},
        takes={**VIDEOS, **AUDIO},
    ),
    Wrapper(
        "Gemma4UnifiedForConditionalGeneration",
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        "Gemma 4, unified",
        ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    ),
    Wrapper(
        "NemotronH_Omni_Reasoning_V3",
        {"nemotron_h": "NemotronHForCausalLM"},
        "Nemotron 3 Omni",
        (
            "vision_model",
            "multi_modal_projector",
            "mlp1",
            "audio_tower",
            "sound_encoder",
            "sound_projection",
            "audio_projector",
            "mtp",
        ),
    ),
    Wrapper(
        "Phi4MMForCausalLM",
        _PHI_4,
        "Phi-4-multimodal",
        ("embed_tokens_extend",),
        renames=(*_ADAPTED, *_PHI_4_NAMES),
        towers={"": "omni.phi4_multimodal:Phi4Multimodal"},
        takes={"embd_layer": ("image",), "audio_processor": ("audio",)},
        adapters=_PHI_4_ADAPTERS,
    ),
    Wrapper(
        "Phi4MultimodalForCausalLM",
        _PHI_4,
        "Phi-4-multimodal, by transformers",
        ("embed_tokens_extend",),
        renames=(*_ADAPTED, *_PHI_4_NAMES),
        towers={"": "omni.phi4_multimodal:Phi4Multimodal"},
        takes={"vision_config": ("image",), **AUDIO},
        adapters=_PHI_4_ADAPTERS,
    ),
    *(
        Wrapper(
            name,
            {"qwen2_5_omni_text": "Qwen2ForCausalLM"},
            known,
            _THINKER,
            towers={"": "omni.qwen2_5_omni:Qwen2_5Omni"},
            takes={**AUDIO, **VIDEOS},
            processor="Qwen2_5OmniForConditionalGeneration",
        )
        for name, known in (
            ("Qwen2_5OmniModel", "Qwen2.5-Omni"),
            ("Qwen2_5OmniForConditionalGeneration", "Qwen2.5-Omni"),
            ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2.5-Omni, the thinker"),
        )
    ),
    *(
        Wrapper(
            name,
            {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"},
            known,
            _THINKER,
            fixed=_ROUTED,
            towers={"": "omni.qwen3_omni:Qwen3Omni"},
            takes={**AUDIO, **VIDEOS},
            processor="Qwen3OmniMoeForConditionalGeneration",
        )
        for name, known in (
            ("Qwen3OmniMoeForConditionalGeneration", "Qwen3-Omni"),
            ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3-Omni, the thinker"),
        )
    ),
)
