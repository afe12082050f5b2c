"""Architectures that join a language model of :data:`~headrace_models.catalogue.ARCHITECTURES` with towers
for media. Their language model is served; towers are read where a row names a class that has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_core.multimodal import MODALITIES, media_limit


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An architecture that has a language model in it. Plain data."""

    name: str
    """The class, as ``architectures`` in ``config.json`` spells it."""
    texts: Mapping[str, str]
    """``model_type`` of the language model's config (or :attr:`text_key`) -> the architecture that serves
    it."""
    models: str
    """Name of the models, as people know them."""
    passed_over: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    """Modules beside the language model, as names of tensors begin, perhaps after ``model.``."""
    renames: tuple[tuple[str, str | None], ...] = ()
    """Spellings of the published files, in this order: a regular expression of names of tensors -> what
    takes its place before anything else is looked at; None: the tensor is passed over."""
    settings_of_towers: tuple[str, ...] = ()
    """Keys of the whole's config that mean a tower, though a language model's config has them too."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the language model that the class fixes, whatever ``config.json`` says of them."""
    text_key: str = "model_type"
    """The key of the config by which :attr:`texts` are told apart."""
    towers: Mapping[str, str] = field(default_factory=dict)
    """``model_type`` of the first part in :attr:`takes` ("": any) -> the class that joins towers of that
    kind with the language model, as ``module:Class`` below ``headrace_models.families``."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _IMAGES)
    """Key of a tower's part of the config -> the modalities that the tower takes."""
    needs_media: str = ""
    """Why every prompt must bring an image; "": text alone is served, too."""
    processor: str = ""
    """Entry of ``headrace.multimodal_processors``; "": the class's own name."""
    transposes_experts: bool = False
    """All experts' matrices may be in one tensor with its last two dimensions exchanged."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the language model that configs may leave out."""
    shared: tuple[str, ...] = ()
    """Settings of the whole's config that hold for the language model, whatever its own part says."""
    task: str = "generate"
    """``generate`` or ``pool``, as in :class:`~headrace_models.catalogue.row.Architecture`."""

    @property
    def media(self) -> tuple[str, ...]:
        """Modalities that prompts may bring, with towers of the kinds that are served."""
        taken = {modality for part in self.takes.values() for modality in part}
        return tuple(m for m in MODALITIES if self.towers and m in taken)

    def tower_of(self, whole: Mapping[str, Any]) -> str | None:
        """The entry of :attr:`towers` for a config; None: its media are not served."""
        part = thinker_of(whole).get(next(iter(self.takes)))
        kind = str(part.get("model_type", "")) if isinstance(part, Mapping) else ""
        return self.towers.get(kind, self.towers.get(""))

    def without_towers(self, whole: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
        """A config without the parts of towers all of whose modalities are limited to 0; they are neither
        built nor loaded then.

        Args:
            whole: ``config.json``.
            limits: see :func:`headrace_core.multimodal.media_limit`.
        """
        unused = {
            part
            for part, modalities in self.takes.items()
            if self.towers and not any(media_limit(limits, modality) for modality in modalities)
        }
        kept = {key: value for key, value in whole.items() if key not in unused}
        thinker = thinker_of(whole)
        if thinker is not whole:
            kept[_THINKER_KEY] = {k: v for k, v in thinker.items() if k not in unused}
        return kept

    def tower_name(self, tensor: str) -> str | None:
        """A tensor's name below its tower's; None: it belongs to the language model, or to nothing."""
        for pattern, replaced in self.renames:
            if replaced is not None:
                tensor = re.sub(pattern, replaced, tensor)
            elif re.search(pattern, tensor):
                return None
        plain = tensor.removeprefix("thinker.").removeprefix("model.")
        mine = any(f"{plain}.".startswith(f"{module}.") for module in self.passed_over)
        return plain if mine else None

    def own_name(self, tensor: str) -> str | None:
        """A tensor's name in the language model's own class; None if it belongs to another module."""
        for pattern, replaced in self.renames:
            if replaced is not None:
                tensor = re.sub(pattern, replaced, tensor)
            elif re.search(pattern, tensor):
                return None
        plain = tensor.removeprefix("thinker.").removeprefix("model.") + "."
        if any(plain.startswith(f"{module}.") for module in self.passed_over):
            return None
        for prefix, own in _PREFIXES.items():
            if tensor.startswith(prefix):
                return own + tensor.removeprefix(prefix)
        return tensor


_THINKER_KEY = "thinker_config"
_IMAGES: Mapping[str, tuple[str, ...]] = {"vision_config": ("image",)}
_VIDEOS: Mapping[str, tuple[str, ...]] = {"vision_config": ("image", "video")}
_AUDIO: Mapping[str, tuple[str, ...]] = {"audio_config": ("audio",)}
"""Values of :attr:`Wrapper.takes`."""
_PREFIXES: Mapping[str, str] = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "text_model.": "",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
"""Beginning of a tensor's name in a wrapper -> in the language model's own class: before transformers 4.52,
and since; in the Idefics line; in Emu3; in Qwen's omni models."""
_HEADS = ("lm_head.", "language_model.lm_head.", "language_model.output.", "text_model.lm_head.",
          "thinker.lm_head.", "llm.lm_head.")  # fmt: skip
"""Beginnings of the names of a language model's head."""
_NESTED = ("text_config", "llm_config")
"""Keys of a config that hold the language model's settings: of transformers, and of remote code."""
_IDEFICS = ("vision_model", "connector")
_THINKER = ("audio_tower", "visual", "talker", "token2wav", "code2wav")
_ROUTED = {"norm_topk_prob": True}
"""Setting of models whose routers always divide the chosen experts' weights by their sum."""
_LLAVA = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_COSMOS = (
    "visual", "blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list", "proj_in", "proj_out",
    "time_embedder", "audio_proj_in", "audio_proj_out", "audio_modality_embed", "action_proj_in",
    "action_proj_out", "action_modality_embed",
)  # fmt: skip
_HEARS = ("audio_tower", "multi_modal_projector")
_CLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "eos_token_id": 49407, "projection_dim": 512,
}  # fmt: skip
_SIGLIP_TEXT: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6, "pad_token_id": 1,
}  # fmt: skip


def _one_size(name: str) -> Mapping[str, str]:
    """:attr:`Wrapper.towers` of a class whose tower is CLIP's or SigLIP's."""
    return dict.fromkeys(("clip_vision_model", "siglip_vision_model"), name)


WRAPPERS: Mapping[str, Wrapper] = {
    row.name: row
    for row in (
        Wrapper("AriaForConditionalGeneration", {"aria_text": "AriaTextForCausalLM"}, "Aria"),
        Wrapper(
            "AudioFlamingo3ForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM"},
            "Audio Flamingo 3",
            _HEARS,
            towers={"audioflamingo3_encoder": "audio_language.audio_flamingo3:AudioFlamingo3"},
            takes=_AUDIO,
        ),
        Wrapper(
            "AyaVisionForConditionalGeneration",
            {"cohere2": "Cohere2ForCausalLM", "cohere": "CohereForCausalLM"},
            "Aya Vision",
            towers={"siglip_vision_model": "vision_language.cohere_vision:AyaVision"},
        ),
        Wrapper(
            "CLIPModel",
            {"clip_text_model": "CLIPTextModelWithProjection"},
            "CLIP",
            ("vision_model", "visual_projection", "logit_scale"),
            towers={"": "vision_language.clip:Clip"},
            defaults=_CLIP_TEXT,
            shared=("projection_dim",),
            task="pool",
        ),
        Wrapper(
            "Cohere2VisionForConditionalGeneration",
            {"cohere2": "Cohere2ForCausalLM"},
            "Command A Vision",
            towers={"siglip_vision_model": "vision_language.cohere_vision:Cohere2Vision"},
        ),
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
            "Ernie4_5_VLMoeForConditionalGeneration",
            {
                "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeForCausalLM",
                "ernie4_5_moe_vl": "Ernie4_5_VLMoeForCausalLM",
            },
            "ERNIE 4.5 VL",
            ("vision_model", "vision_tower", "resampler_model"),
        ),
        Wrapper(
            "Exaone4_5_ForConditionalGeneration",
            {"exaone4": "Exaone4ForCausalLM"},
            "EXAONE 4.5",
            ("visual", "mtp"),
        ),
        Wrapper("FastVlmForConditionalGeneration", {"qwen2": "Qwen2ForCausalLM"}, "FastVLM"),
        Wrapper(
            "FunAsrNanoForConditionalGeneration",
            {"qwen3": "Qwen3ForCausalLM"},
            "Fun-ASR-Nano",
            _HEARS,
        ),
        Wrapper(
            "FuyuForCausalLM",
            {"persimmon": "PersimmonForCausalLM"},
            "Fuyu 8B",
            ("vision_embed_tokens",),
        ),
        Wrapper(
            "Gemma3ForConditionalGeneration",
            {"gemma3_text": "Gemma3ForCausalLM"},
            "Gemma 3",
            towers={"siglip_vision_model": "vision_language.gemma3:Gemma3"},
        ),
        Wrapper(
            "Gemma3nForConditionalGeneration",
            {"gemma3n_text": "Gemma3nForCausalLM"},
            "Gemma 3n",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Gemma4ForConditionalGeneration",
            {"gemma4_text": "Gemma4ForCausalLM"},
            "Gemma 4",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Gemma4UnifiedForConditionalGeneration",
            {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
            "Gemma 4, unified",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Glm46VForConditionalGeneration",
            {"glm4v_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM"},
            "GLM-4.6V",
            ("visual",),
        ),
        Wrapper(
            "Glm4vForConditionalGeneration",
            {"glm4v_text": "Glm4ForCausalLM"},
            "GLM-4.1V",
            ("visual",),
            fixed={"attention_bias": True},
        ),
        Wrapper(
            "Glm4vMoeForConditionalGeneration",
            {"glm4v_moe_text": "Glm4MoeForCausalLM"},
            "GLM-4.5V",
            ("visual",),
        ),
        Wrapper(
            "GlmAsrForConditionalGeneration",
            {"llama": "LlamaForCausalLM"},
            "GLM-ASR",
            _HEARS,
            towers={"glmasr_encoder": "audio_language.glm_asr:GlmAsr"},
            takes=_AUDIO,
        ),
        Wrapper(
            "GlmOcrForConditionalGeneration",
            {"glm_ocr_text": "Glm4ForCausalLM"},
            "GLM-OCR",
            ("visual", "language_model.layers.16"),
            fixed={"attention_bias": False},
        ),
        Wrapper(
            "GotOcr2ForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM"},
            "GOT-OCR 2",
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
            "GraniteSpeechForConditionalGeneration",
            {"granite": "GraniteForCausalLM"},
            "Granite Speech",
            ("encoder", "projector"),
        ),
        Wrapper(
            "GraniteSpeechPlusForConditionalGeneration",
            {"granite": "GraniteForCausalLM"},
            "Granite Speech Plus",
            ("encoder", "projector"),
        ),
        Wrapper(
            "HunYuanVLForConditionalGeneration",
            {"hunyuan_vl_text": "HunYuanDenseV1ForCausalLM"},
            "HunyuanOCR",
            ("vit",),
        ),
        Wrapper(
            "HyperCLOVAXVisionV2ForConditionalGeneration",
            {"hyperclovax": "HyperCLOVAXForCausalLM"},
            "HyperCLOVA X Seed Vision",
            ("vision_model", "vision_projector", "vision_projection"),
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
        ),
        Wrapper(
            "InternVLForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"},
            "InternVL, by transformers",
            towers={"internvl_vision": "vision_language.internvl:InternVL"},
            takes=_VIDEOS,
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
        *(
            Wrapper(
                name,
                {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
                "Kimi K2.5",
                ("vision_tower", "mm_projector"),
                renames=((r"^language_model\.model\.blocks\.", "language_model.model.layers."),),
            )
            for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
        ),
        Wrapper(
            "KimiVLForConditionalGeneration",
            {"deepseek_v3": "DeepseekV3ForCausalLM"},
            "Kimi-VL",
        ),
        Wrapper("Lfm2VlForConditionalGeneration", {"lfm2": "Lfm2ForCausalLM"}, "LFM2-VL"),
        Wrapper("Lfm3VlForConditionalGeneration", {"lfm3": "Lfm3ForCausalLM"}, "LFM3-VL"),
        Wrapper(
            "LightOnOcrForConditionalGeneration",
            {"qwen3": "Qwen3ForCausalLM"},
            "LightOnOCR",
            ("vision_encoder", "vision_projection"),
            towers={"pixtral": "vision_language.mistral3:LightOnOCR"},
        ),
        Wrapper(
            "Llama4ForConditionalGeneration",
            {"llama4_text": "Llama4ForCausalLM"},
            "Llama 4 Scout, Maverick",
            ("vision_model", "multi_modal_projector"),
            towers={"llama4_vision_model": "vision_language.llama4:Llama4"},
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
            ("vision_tower", "multi_modal_projector", "image_newline"),
            towers=_one_size("vision_language.llava_next:LlavaNext"),
        ),
        Wrapper(
            "LlavaNextVideoForConditionalGeneration",
            _LLAVA,
            "LLaVA-NeXT-Video",
            ("vision_tower", "multi_modal_projector", "image_newline", "vision_resampler"),
        ),
        Wrapper(
            "LlavaOnevisionForConditionalGeneration",
            _LLAVA,
            "LLaVA-OneVision",
            ("vision_tower", "multi_modal_projector", "image_newline"),
            towers=_one_size("vision_language.llava_next:LlavaOnevision"),
            takes=_VIDEOS,
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
            "Mistral3ForConditionalGeneration",
            {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
            "Mistral Small 3.1 and 3.2, Ministral 3",
            towers={"pixtral": "vision_language.mistral3:Mistral3"},
        ),
        Wrapper(
            "MllamaForConditionalGeneration",
            {"mllama_text_model": "MllamaForCausalLM"},
            "Llama 3.2 Vision",
            ("vision_model", "multi_modal_projector"),
        ),
        Wrapper(
            "MossTranscribeDiarizeForConditionalGeneration",
            {"qwen3": "Qwen3ForCausalLM"},
            "MOSS Transcribe Diarize",
            _HEARS,
        ),
        Wrapper(
            "MusicFlamingoForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM"},
            "Music Flamingo",
            _HEARS,
            settings_of_towers=("head_dim", "max_position_embeddings", "rope_parameters"),
        ),
        Wrapper(
            "NemotronH_Nano_VL_V2",
            {"nemotron_h": "NemotronHForCausalLM"},
            "Nemotron Nano 2 VL",
            ("vision_model", "mlp1"),
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
            "Ovis2ForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"},
            "Ovis2",
            ("vision_tower", "visual_embeddings_table"),
        ),
        Wrapper(
            "PaddleOCRVLForConditionalGeneration",
            {"paddleocr_vl_text": "LlamaForCausalLM", "paddleocr_vl": "LlamaForCausalLM"},
            "PaddleOCR-VL",
            ("visual", "projector", "mlp_AR"),
            fixed={"attention_bias": False},
        ),
        Wrapper(
            "PaliGemmaForConditionalGeneration",
            {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
            "PaliGemma",
            towers={"siglip_vision_model": "vision_language.paligemma:PaliGemma"},
            fixed={"use_bidirectional_attention": False},  # prompts are; answers are not
            needs_media="its prompts begin with an image",
        ),
        Wrapper(
            "PerceptionLMForConditionalGeneration", {"llama": "LlamaForCausalLM"}, "Perception LM"
        ),
        *(
            Wrapper(
                name,
                {"phi4_multimodal": "Phi3ForCausalLM", "phi4mm": "Phi3ForCausalLM"},
                "Phi-4-multimodal",
                ("embed_tokens_extend",),
                renames=((r"\.lora_[AB]\.", None), (r"\.base_layer\.", ".")),
            )
            for name in ("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM")
        ),
        Wrapper(
            "QianfanOCRForConditionalGeneration",
            {"qwen3": "Qwen3ForCausalLM"},
            "Qianfan-OCR",
            ("vision_tower", "multi_modal_projector", "vision_model", "mlp1"),
            renames=(
                (r"^language_model\.model\.encoder\.layers\.", "language_model.model.layers."),
            ),
        ),
        Wrapper(
            "Qwen2_5_VLForConditionalGeneration",
            {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
            "Qwen2.5-VL",
            ("visual",),
            towers={"": "vision_language.qwen_vl:Qwen2_5VL"},
            takes=_VIDEOS,
        ),
        *(
            Wrapper(
                name,
                {"qwen2_5_omni_text": "Qwen2ForCausalLM"},
                known,
                _THINKER,
                towers={"": "omni.qwen2_5_omni:Qwen2_5Omni"},
                takes={**_AUDIO, **_VIDEOS},
                processor="Qwen2_5OmniForConditionalGeneration",
            )
            for name, known in (
                ("Qwen2_5OmniModel", "Qwen2.5-Omni"),
                ("Qwen2_5OmniForConditionalGeneration", "Qwen2.5-Omni"),
                ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2.5-Omni, the thinker"),
            )
        ),
        Wrapper(
            "Qwen2VLForConditionalGeneration",
            {"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
            "Qwen2-VL",
            ("visual",),
            towers={"": "vision_language.qwen_vl:Qwen2VL"},
            takes=_VIDEOS,
        ),
        Wrapper(
            "Qwen3_5ForConditionalGeneration",
            {"qwen3_5_text": "Qwen3_5ForCausalLM"},
            "Qwen3.5",
            ("visual", "mtp"),
        ),
        Wrapper(
            "Qwen3_5MoeForConditionalGeneration",
            {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
            "Qwen3.5, mixtures",
            ("visual", "mtp"),
        ),
        Wrapper(
            "Qwen3ASRForConditionalGeneration", {"qwen3": "Qwen3ForCausalLM"}, "Qwen3-ASR", _HEARS
        ),
        *(
            Wrapper(
                name,
                {"qwen3_omni_moe_text": "Qwen3MoeForCausalLM"},
                known,
                _THINKER,
                fixed=_ROUTED,
                towers={"": "omni.qwen3_omni:Qwen3Omni"},
                takes={**_AUDIO, **_VIDEOS},
                processor="Qwen3OmniMoeForConditionalGeneration",
            )
            for name, known in (
                ("Qwen3OmniMoeForConditionalGeneration", "Qwen3-Omni"),
                ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3-Omni, the thinker"),
            )
        ),
        Wrapper(
            "Qwen3VLForConditionalGeneration",
            {"qwen3_vl_text": "Qwen3ForCausalLM"},
            "Qwen3-VL",
            ("visual",),
            towers={"": "vision_language.qwen_vl:Qwen3VL"},
            takes=_VIDEOS,
        ),
        Wrapper(
            "Qwen3VLMoeForConditionalGeneration",
            {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
            "Qwen3-VL, mixtures",
            ("visual",),
            towers={"": "vision_language.qwen_vl:Qwen3VL"},
            takes=_VIDEOS,
            fixed=_ROUTED,
            transposes_experts=True,
        ),
        Wrapper(
            "SiglipModel",
            {"siglip_text_model": "SiglipTextModel"},
            "SigLIP, SigLIP 2 of one resolution",
            ("vision_model", "logit_scale", "logit_bias"),
            towers={"": "vision_language.siglip:Siglip"},
            defaults=_SIGLIP_TEXT,
            task="pool",
        ),
        Wrapper(
            "SmolVLMForConditionalGeneration",
            {"llama": "LlamaForCausalLM"},
            "SmolVLM",
            _IDEFICS,
            towers={"": "vision_language.idefics3:SmolVLM"},
            takes=_VIDEOS,
        ),
        Wrapper(
            "VibeVoiceAsrForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM"},
            "VibeVoice-ASR",
            ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
        ),
        Wrapper(
            "VideoLlama3ForConditionalGeneration",
            {"qwen2": "Qwen2ForCausalLM"},
            "VideoLLaMA 3",
            ("vision_model", "projector"),
        ),
        Wrapper(
            "VideoLlavaForConditionalGeneration",
            {"llama": "LlamaForCausalLM"},
            "Video-LLaVA",
            ("image_tower", "video_tower", "multi_modal_projector"),
        ),
        Wrapper("VipLlavaForConditionalGeneration", {"llama": "LlamaForCausalLM"}, "ViP-LLaVA"),
        Wrapper(
            "VoxtralForConditionalGeneration",
            {"llama": "LlamaForCausalLM"},
            "Voxtral, by transformers",
            ("audio_tower", "multi_modal_projector"),
            towers={"voxtral_encoder": "audio_language.voxtral:Voxtral"},
            takes=_AUDIO,
        ),
    )
}
"""Name of the class -> wrapper."""
_SCORERS = (
    ("JinaVLForRanking", "Qwen2VLForConditionalGeneration", "jina-reranker-m0"),
    ("JinaVLForSequenceClassification", "Qwen2VLForConditionalGeneration", "jina-reranker-m0"),
    ("Qwen3VLForSequenceClassification", "Qwen3VLForConditionalGeneration", "Qwen3-VL-Reranker"),
)
"""(class, the class that it is with labels for a head, models)."""
_RETRIEVERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ColPaliForRetrieval": (
        "PaliGemmaForConditionalGeneration",
        {"models": "ColPali", "needs_media": "", "processor": "", "fixed": {"is_causal": False}},
    ),
    "ColQwen2ForRetrieval": (
        "Qwen2VLForConditionalGeneration",
        {"models": "ColQwen2", "takes": _IMAGES},
    ),
}
"""Class -> the class that is in it under the name ``vlm``, and fields that differ from that one's."""
_IN_RETRIEVERS = ((r"^vlm\.", ""), (r"^embedding_proj_layer\.", "linear."))
WRAPPERS = {
    **WRAPPERS,
    **{
        name: replace(WRAPPERS[base], name=name, models=models, processor=base)
        for name, base, models in _SCORERS
    },
    **{
        name: replace(
            WRAPPERS[base],
            name=name,
            renames=(*_IN_RETRIEVERS, *WRAPPERS[base].renames),
            task="pool",
            **differences,
        )
        for name, (base, differences) in _RETRIEVERS.items()
    },
}


_NEEDS_IMAGE = (
    "its class takes no prompt without an image, and headrace does not serve its images yet"
)
REFUSED: Mapping[str, str] = {
    "Blip2ForConditionalGeneration": _NEEDS_IMAGE,
    "InstructBlipForConditionalGeneration": _NEEDS_IMAGE,
    "InstructBlipVideoForConditionalGeneration": _NEEDS_IMAGE,
}
"""Class that joins a known language model with towers -> why not even its text is served."""


def text_architecture(architecture: str, whole: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint's language model: of a wrapper's, or its own.

    Args:
        whole: ``config.json``.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return architecture
    inner = nested_settings(whole)
    stated = (whole if inner is None else inner).get(wrapper.text_key)
    return wrapper.texts.get(str(stated), architecture)


def of_inner_model(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A retriever's config as that of the model that is in it (``vlm_config``); others come back as they are.

    Args:
        whole: ``config.json``.
    """
    inner = whole.get("vlm_config")
    if not isinstance(inner, Mapping):
        return dict(whole)
    outer = {key: value for key, value in whole.items() if key not in ("vlm_config", "model_type")}
    return {**inner, **outer}


def nested_settings(whole: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The language model's part of a config; None: it is the whole.

    Args:
        whole: ``config.json``.
    """
    around = thinker_of(whole)
    return next((around[key] for key in _NESTED if isinstance(around.get(key), Mapping)), None)


def thinker_of(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of an omni model's config that reads and writes text; any other config is that part.

    Args:
        whole: ``config.json``.
    """
    thinker = whole.get(_THINKER_KEY)
    return thinker if isinstance(thinker, Mapping) else whole


def own_quantization(architecture: str, said: Any) -> Any:
    """A ``quantization_config`` whose lists of modules and patterns name a wrapper's language model as its
    own class does; other architectures' come back as they are.

    Args:
        said: the whole, or a value in it.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return said
    if isinstance(said, Mapping):
        return {
            own_quantization(architecture, key): own_quantization(architecture, value)
            for key, value in said.items()
        }
    if isinstance(said, list):
        return [own_quantization(architecture, value) for value in said]
    return _own_entry(said) if isinstance(said, str) else said


def _own_entry(entry: str) -> str:
    """A module's name, or a pattern of names, with the language model's prefix replaced."""
    for prefix, own in _PREFIXES.items():
        for spelled, replaced in (
            (prefix, own),
            (prefix.replace(".", r"\."), own.replace(".", r"\.")),
        ):
            at = entry.find(spelled)
            if at >= 0 and (at == 0 or not (entry[at - 1].isalnum() or entry[at - 1] in "_.")):
                return entry[:at] + replaced + entry[at + len(spelled) :]
    return entry


def settings_of_towers(architecture: str) -> tuple[str, ...]:
    """Keys of a wrapper's config that mean a tower (:attr:`Wrapper.settings_of_towers`)."""
    wrapper = WRAPPERS.get(architecture)
    return () if wrapper is None else wrapper.settings_of_towers


def fixed_settings(architecture: str) -> Mapping[str, Any]:
    """Settings of a wrapper's language model that its class fixes (:attr:`Wrapper.fixed`)."""
    wrapper = WRAPPERS.get(architecture)
    return {} if wrapper is None else wrapper.fixed


def joined_settings(
    architecture: str, whole: Mapping[str, Any], text: Mapping[str, Any]
) -> dict[str, Any]:
    """A wrapper's text settings with those that its configs leave out, and with those that it says for all of
    its parts (:attr:`Wrapper.defaults`, :attr:`Wrapper.shared`).

    Args:
        whole: ``config.json``.
        text: of the language model.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return dict(text)
    shared = {key: whole[key] for key in wrapper.shared if whole.get(key) is not None}
    return {**wrapper.defaults, **text, **shared}


def ties_by_tensors(
    architecture: str, config: Mapping[str, Any], stored: Iterable[str]
) -> dict[str, Any]:
    """A wrapper's text settings, with ``tie_word_embeddings`` as its files have it: configs say it on two
    levels, which differ, and classes have defaults of their own.

    Args:
        config: of the language model.
        stored: names of the checkpoint's tensors; none: the config is believed.
    """
    names = [name for name in stored if name]
    if architecture not in WRAPPERS or not names:
        return dict(config)
    has_head = any(name.startswith(_HEADS) for name in names)
    return {**config, "tie_word_embeddings": not has_head}
