"""Models that hear: an encoder of recordings and a language model."""

from __future__ import annotations

from headrace_models.catalogue.multimodal.wrapper import AUDIO, Wrapper

_HEARS = ("audio_tower", "multi_modal_projector")
ROWS = (
    Wrapper(
        "AudioFlamingo3ForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "Audio Flamingo 3",
        _HEARS,
        towers={"audioflamingo3_encoder": "audio_language.audio_flamingo3:AudioFlamingo3"},
        takes=AUDIO,
    ),
    Wrapper(
        "FunAsrNanoForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM"},
        "Fun-ASR-Nano",
        _HEARS,
        towers={"fun_asr_nano_encoder": "audio_language.fun_asr_nano:FunAsrNano"},
        takes=AUDIO,
    ),
    Wrapper(
        "GlmAsrForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "GLM-ASR",
        _HEARS,
        towers={"glmasr_encoder": "audio_language.glm_asr:GlmAsr"},
        takes=AUDIO,
    ),
    Wrapper(
        "GraniteSpeechForConditionalGeneration",
        {"granite": "GraniteForCausalLM"},
        "Granite Speech",
        ("encoder", "projector"),
        towers={"": "audio_language.granite_speech:GraniteSpeech"},
        takes={"encoder_config": ("audio",)},
    ),
    Wrapper(
        "GraniteSpeechPlusForConditionalGeneration",
        {"granite": "GraniteForCausalLM"},
        "Granite Speech Plus",
        ("encoder", "projector"),
        towers={"": "audio_language.granite_speech:GraniteSpeechPlus"},
        takes={"encoder_config": ("audio",)},
    ),
    Wrapper(
        "MiDashengLMModel",
        {"qwen2_5_omni_text": "Qwen2ForCausalLM"},
        "MiDashengLM",
        ("audio_encoder", "audio_projector"),
        renames=((r"^decoder\.", ""),),
        towers={"": "audio_language.midashenglm:MiDashengLM"},
        takes={"audio_encoder_config": ("audio",)},
        defaults={"rope_theta": 1_000_000.0},
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
        towers={
            "audioflamingo3_encoder": "audio_language.audio_flamingo3:MusicFlamingo",
            "musicflamingo_encoder": "audio_language.audio_flamingo3:MusicFlamingo",
        },
        takes=AUDIO,
    ),
    Wrapper(
        "Qwen3ASRForConditionalGeneration",
        {"qwen3": "Qwen3ForCausalLM", "qwen3_asr_text": "Qwen3ForCausalLM"},
        "Qwen3-ASR",
        _HEARS,
        towers={"": "audio_language.qwen3_asr:Qwen3ASR"},
        takes=AUDIO,
    ),
    Wrapper(
        "UltravoxModel",
        {
            "llama": "LlamaForCausalLM",
            "mistral": "MistralForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
        },
        "Ultravox",
        _HEARS,
        towers={"whisper": "audio_language.ultravox:Ultravox"},
        takes=AUDIO,
        companions={
            "text_model_id": ("text_config", "language_model."),
            "audio_model_id": ("audio_config", "audio_tower."),
        },
    ),
    Wrapper(
        "VibeVoiceAsrForConditionalGeneration",
        {"qwen2": "Qwen2ForCausalLM"},
        "VibeVoice-ASR",
        ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
    ),
    Wrapper(
        "VoxtralForConditionalGeneration",
        {"llama": "LlamaForCausalLM"},
        "Voxtral, by transformers",
        ("audio_tower", "multi_modal_projector"),
        towers={"voxtral_encoder": "audio_language.voxtral:Voxtral"},
        takes=AUDIO,
    ),
)
