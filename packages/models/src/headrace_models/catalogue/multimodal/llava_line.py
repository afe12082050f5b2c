"""Towers of one size (CLIP, SigLIP, Pixtral's) and a projector: LLaVA's and what follows it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_models.catalogue.multimodal.wrapper import VIDEOS, Wrapper

_IDEFICS = ("vision_model", "connector")
_WITH_NEWLINE = ("vision_tower", "multi_modal_projector", "image_newline")
_LLAVA = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def _one_size(name: str) -> Mapping[str, str]:
    """:attr:`Wrapper.towers` of a class whose tower is CLIP's or SigLIP's."""
    return dict.fromkeys(("clip_vision_model", "siglip_vision_model"), name)


ROWS = (
    Wrapper(
        "AyaVisionForConditionalGeneration",
        {"cohere2": "Cohere2ForCausalLM", "cohere": "CohereForCausalLM"},
        "Aya Vision",
        towers={"siglip_vision_model": "vision_language.cohere_vision:AyaVision"},
    ),
    Wrapper(
        "BeeForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM"},
        "Bee-8B",
        _WITH_NEWLINE,
        towers={"siglip_vision_model": "vision_language.llava_next:Bee"},
    ),
    Wrapper(
        "Blip2ForConditionalGeneration",
        {"opt": "OPTForCausalLM"},
        "BLIP-2 with OPT",
        ("vision_model", "qformer", "query_tokens", "language_projection"),
        towers={"": "vision_language.blip2:Blip2"},
        needs_media="its prompts begin with an image",
    ),
    Wrapper(
        "Cohere2VisionForConditionalGeneration",
        {"cohere2": "Cohere2ForCausalLM"},
        "Command A Vision",
        towers={"siglip_vision_model": "vision_language.cohere_vision:Cohere2Vision"},
    ),
    Wrapper("FastVlmForConditionalGeneration", {"qwen2": "Qwen2ForCausalLM"}, "FastVLM"),
    Wrapper(
        "Gemma3ForConditionalGeneration",
        {"gemma3_text": "Gemma3ForCausalLM"},
        "Gemma 3",
        towers={"siglip_vision_model": "vision_language.gemma3:Gemma3"},
    ),
    Wrapper(
        "Granite4VisionForConditionalGeneration",
        {"granite4_vision_text": "GraniteForCausalLM", "granite": "GraniteForCausalLM"},
        "Granite 4 Vision",
        ("vision_tower", "layerwise_projectors", "spatial_projectors", "image_newline"),
    ),
    Wrapper(
        "GraniteDoclingForConditionalGeneration",
        {"granite_docling_text": "GraniteForCausalLM"},
        "Granite for Docling",
        ("vision_model",),
    ),
    Wrapper(
        "Idefics2ForConditionalGeneration",
        {"mistral": "MistralForCausalLM"},
        "Idefics2",
        _IDEFICS,
    ),
    Wrapper(
        "Idefics3ForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "Idefics3",
        _IDEFICS,
        towers={"": "vision_language.idefics3:Idefics3"},
    ),
    Wrapper(
        "InstructBlipForConditionalGeneration",
        {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"},
        "InstructBLIP with Vicuna",
        ("vision_model", "qformer", "query_tokens", "language_projection"),
        towers={"": "vision_language.instructblip:InstructBlip"},
        needs_media="its prompts begin with an image",
    ),
    Wrapper(
        "Lfm2VlForConditionalGeneration",
        {"lfm2": "Lfm2ForCausalLM"},
        "LFM2-VL",
        towers={"siglip2_vision_model": "vision_language.lfm2_vl:Lfm2Vl"},
    ),
    Wrapper("Lfm3VlForConditionalGeneration", {"lfm3": "Lfm3ForCausalLM"}, "LFM3-VL"),
    Wrapper(
        "LightOnOcrForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM"},
        "LightOnOCR",
        ("vision_encoder", "vision_projection"),
        towers={"pixtral": "vision_language.mistral3:LightOnOCR"},
    ),
    Wrapper(
        "LlavaForConditionalGeneration",
        _LLAVA,
        "LLaVA 1.5, Pixtral by transformers",
        towers={
            **_one_size("vision_language.llava:Llava"),
            "pixtral": "vision_language.pixtral:Pixtral",
        },
    ),
    Wrapper(
        "LlavaNextForConditionalGeneration",
        _LLAVA,
        "LLaVA-NeXT",
        _WITH_NEWLINE,
        towers=_one_size("vision_language.llava_next:LlavaNext"),
    ),
    Wrapper(
        "LlavaNextVideoForConditionalGeneration",
        _LLAVA,
        "LLaVA-NeXT-Video",
        ("vision_tower", "multi_modal_projector", "image_newline", "vision_resampler"),
        towers=_one_size("vision_language.llava_next:LlavaNextVideo"),
        takes=VIDEOS,
    ),
    Wrapper(
        "LlavaOnevisionForConditionalGeneration",
        _LLAVA,
        "LLaVA-OneVision",
        _WITH_NEWLINE,
        towers=_one_size("vision_language.llava_next:LlavaOnevision"),
        takes=VIDEOS,
    ),
    Wrapper(
        "MantisForConditionalGeneration",
        _LLAVA,
        "Mantis",
        towers=_one_size("vision_language.llava:Llava"),
    ),
    Wrapper(
        "MiniMaxVL01ForConditionalGeneration",
        dict.fromkeys(
            ("minimax", "minimax_text_01", "MiniMaxText01", "minimax_vl_01_text"),
            "MiniMaxForCausalLM",
        ),
        "MiniMax-VL-01",
        _WITH_NEWLINE,
        towers={"clip_vision_model": "vision_language.llava_next:MiniMaxVL01"},
    ),
    Wrapper(
        "Mistral3ForConditionalGeneration",
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        "Mistral Small 3.1 and 3.2, Ministral 3",
        towers={"pixtral": "vision_language.mistral3:Mistral3"},
    ),
    Wrapper(
        "PaliGemmaForConditionalGeneration",
        {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
        "PaliGemma",
        towers={"siglip_vision_model": "vision_language.paligemma:PaliGemma"},
        fixed={"use_bidirectional_attention": False},  # prompts are; answers are not
        needs_media="its prompts begin with an image",
    ),
    Wrapper("PerceptionLMForConditionalGeneration", {"llama": "LlamaForCausalLM"}, "Perception LM"),
    Wrapper(
        "Phi3VForCausalLM",
        {"phi3_v": "Phi3ForCausalLM"},
        "Phi-3-vision, Phi-3.5-vision",
        ("vision_embed_tokens",),
        renames=((r"^model\.vision_embed_tokens\.wte\.", "model.embed_tokens."),),
        towers={"": "vision_language.phi3v:Phi3V"},
        takes={"img_processor": ("image",)},
    ),
    Wrapper(
        "PixtralForConditionalGeneration",
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "MistralLarge3ForCausalLM",
            "mixtral": "MixtralForCausalLM",
        },
        "Pixtral, Mistral Small 3.1 and later, of Mistral's files",
        towers={"pixtral": "vision_language.pixtral:MistralsPixtral"},
    ),
    Wrapper(
        "RForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM"},
        "R-4B",
        _WITH_NEWLINE,
        towers={"siglip_vision_model": "vision_language.llava_next:R4B"},
    ),
    Wrapper(
        "SmolVLMForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "SmolVLM",
        _IDEFICS,
        towers={"": "vision_language.idefics3:SmolVLM"},
        takes=VIDEOS,
    ),
    Wrapper(
        "TarsierForConditionalGeneration",
        _LLAVA,
        "Tarsier",
        towers=_one_size("vision_language.llava:Llava"),
    ),
    Wrapper(
        "VideoLlavaForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "Video-LLaVA",
        ("image_tower", "video_tower", "multi_modal_projector"),
        towers={"clip_vision_model": "vision_language.video_llava:VideoLlava"},
        takes=VIDEOS,
    ),
    Wrapper("VipLlavaForConditionalGeneration", {"llama": "LlamaForCausalLM"}, "ViP-LLaVA"),
)
