"""Models that hear."""

from headrace_models.catalogue.row import Architecture

ROWS = (
    Architecture(
        "Qwen2AudioForConditionalGeneration",
        "audio_language.qwen2_audio:Qwen2AudioForConditionalGeneration",
        "Qwen2-Audio",
        task="speech",
    ),
    Architecture(
        "WhisperForConditionalGeneration",
        "speech.whisper:WhisperForConditionalGeneration",
        "Whisper, distil-whisper",
        ("full", "cross"),
        "speech",
    ),
)
