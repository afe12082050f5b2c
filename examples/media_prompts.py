"""Prompts of models that take images, videos or audio: the tables of the scripts beside this one.

A row is for one kind of model, and has what one needs to ask it offline: how its prompt is written, and
the settings that suit it. Models of the same kind in other sizes take the same prompts: give their folder
or hub name with ``--model``. Aria and PaddleOCR-VL are served by transformers' code, which needs
``pip install 'headrace-multimodal[transformers]'``. Numbers of devices are not in the rows: ``-tp`` says
over how many a model is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SYSTEM = "You are a helpful assistant."
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHATML_WITH_SYSTEM = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{CHATML}"
OMNI_SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""The system's turn that Qwen2.5-Omni was trained with; Qwen3-Omni takes it, too."""
OMNI_PROMPT = f"<|im_start|>system\n{OMNI_SYSTEM}<|im_end|>\n{CHATML.format('{media}{question}')}"
COHERE = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{media}{question}<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
MISTRAL = "<s>[INST]{question}\n{media}[/INST]"
GLM = f"[gMASK]<sop><|system|>\n{SYSTEM}<|user|>\n{{media}}{{question}}<|assistant|>assistant\n"
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024.\nToday's Date: April 9, 2025.\n"
    "You are Granite, developed by IBM. You are a helpful AI assistant<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>{media}{question}<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>"
)
ASKED = "{media}{question}"
LLAMA_3 = (
    "<|start_header_id|>user<|end_header_id|>\n\n{media}{question}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = "<start_of_turn>user\n{media}{question}<end_of_turn>\n<start_of_turn>model\n"
QWEN_ASR = (
    "<|im_start|>system\n{question}<|im_end|>\n<|im_start|>user\n{media}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""It takes no question; names in the place of one help it."""


@dataclass(frozen=True)
class Row:
    """How one kind of model is asked about media.

    Attributes:
        checkpoint: hub name of a model of this kind.
        prompt: text with places for ``{media}`` and ``{question}``; None: the checkpoint's chat template
            writes it.
        media: modality -> the text that stands for one item in the prompt, with a place for its
            ``{number}`` from 1 where items are numbered. The keys are the modalities that the row takes.
        between: text between items.
        system: text of the system's turn where the chat template writes the prompt.
        settings: engine settings by their names.
        stop_token_ids: tokens that end an answer, besides those of the checkpoint's own settings.
        with_metadata: a video comes with its rate and the indices of its frames.
        most: largest number of items, None: no bound of the model's own.
    """

    checkpoint: str
    prompt: str | None
    media: Mapping[str, str]
    between: str = ""
    system: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    with_metadata: bool = False
    most: int | None = None

    def text(self, question: str, modality: str, count: int = 1) -> str:
        """The prompt for ``count`` items of one modality.

        Raises:
            ValueError: the checkpoint's chat template writes the prompt.
        """
        if self.prompt is None:
            raise ValueError(f"prompt of {self.checkpoint}: written by its chat template")
        items = [self.media[modality].format(number=i) for i in range(1, count + 1)]
        return self.prompt.format(media=self.between.join(items), question=question)


def _sizes(length: int | None, seqs: int | None = None, **more: Any) -> dict[str, Any]:
    """Engine settings; None: the default."""
    sizes = {"max_model_len": length, "max_num_seqs": seqs}
    return {**{name: size for name, size in sizes.items() if size is not None}, **more}


def _by_template(checkpoint: str, settings: Mapping[str, Any], system: str = "") -> Row:
    return Row(checkpoint, None, {"image": ""}, settings=settings, system=system)


_ARIA_STOPS = (93532, 93653, 944, 93421, 1019, 93519)
_QWEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_QWEN_IMAGE = {"image": _QWEN["image"]}
_PHI_PROMPT, _PHI_IMAGE = (
    "<|user|>\n{media}\n{question}<|end|>\n<|assistant|>\n",
    "<|image_{number}|>",
)
_PHI_4 = "<|user|>{media}{question}<|end|><|assistant|>"
_QWEN_PIXELS = {"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28}
_QWEN_PROMPT = CHATML_WITH_SYSTEM.format(ASKED)
_QWEN_SIZES = _sizes(4096, 5, mm_processor_kwargs=_QWEN_PIXELS)
_TARSIER2 = {
    "hf_overrides": {
        "architectures": ["Tarsier2ForConditionalGeneration"], "model_type": "tarsier2",
    },
}  # fmt: skip
_GLM_SIZES = _sizes(
    4096,
    2,
    enforce_eager=True,
    mm_processor_kwargs={"size": {"shortest_edge": 12544, "longest_edge": 47_040_000}},
)
_GLM = {
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
}
_HUNYUAN_PROMPT = (
    "<\uff5chy_begin\u2581of\u2581sentence\uff5c>{media}{question}<\uff5chy_User\uff5c>"
)
_HUNYUAN = "".join(f"<\uff5chy_place\u2581holder\u2581no\u2581{n}\uff5c>" for n in (100, 102, 101))
_KIMI_PROMPT = (
    "<|im_user|>user<|im_middle|>{media}{question}<|im_end|><|im_assistant|>assistant<|im_middle|>"
)
_KIMI = {"image": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"}
_PADDLE = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
_PADDLE_PROMPT = "<|begin_of_sentence|>User: {question}{media}\nAssistant: "
_IDEFICS_PROMPT = "<|begin_of_text|>User:{media}%s{question}<end_of_utterance>\nAssistant:"
_SMOLVLM_PROMPT = "<|im_start|>User:{media}%s{question}<end_of_utterance>\nAssistant:"
_OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
}
_OMNI_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_NUMBERED = "Image-{number}: <image>\n"
_IMAGE = {"image": "<image>"}

ONE_ITEM: Mapping[str, Row] = {
    "aria": Row(
        "rhymes-ai/Aria", CHATML.format(ASKED), {"image": "<fim_prefix><|img|><fim_suffix>"},
        settings=_sizes(4096, 2, dtype="bfloat16"), stop_token_ids=_ARIA_STOPS,
    ),
    "aya_vision": Row(
        "CohereLabs/aya-vision-8b", COHERE, _IMAGE,
        settings=_sizes(2048, 2, mm_processor_kwargs={"crop_to_patches": True}),
    ),
    "bee": Row(  # without a line end before the assistant's turn, as it was published
        "Open-Bee/Bee-8B-RL",
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{media}}\n{{question}}<|im_end|>"
        "<|im_start|>assistant\n<think>\n",
        _IMAGE, settings=_sizes(16384),
    ),
    "blip-2": Row("Salesforce/blip2-opt-2.7b", "Question: {question} Answer:", {"image": ""}),
    "chameleon": Row(
        "facebook/chameleon-7b", "{question}{media}", _IMAGE, settings=_sizes(4096, 2)
    ),
    "command_a_vision": Row(
        "CohereLabs/command-a-vision-07-2025", COHERE, {"image": "<|IMG_PATCH|>"},
        settings=_sizes(32768),
    ),
    "dots_ocr": Row(
        "rednote-hilab/dots.ocr", ASKED, {"image": "<|img|><|imgpad|><|endofimg|>"}
    ),
    "ernie45_vl": Row(
        "baidu/ERNIE-4.5-VL-28B-A3B-PT",
        "<|begin_of_sentence|>User: {media}{question}\nAssistant: <think></think>",
        {
            "image": "Picture {number}:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
            "video": "Video {number}:<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
        },
        settings=_sizes(4096, 5),
    ),
    "eagle2_5": _by_template("nvidia/Eagle2.5-8B", _sizes(8192)),
    "fuyu": Row(
        "adept/fuyu-8b", "{question}\n", {"image": ""}, settings=_sizes(2048, 2), most=1
    ),
    "gemma3": Row(
        "google/gemma-3-4b-it",
        "<bos><start_of_turn>user\n{media}{question}<end_of_turn>\n<start_of_turn>model\n",
        {"image": "<start_of_image>"},
        settings=_sizes(2048, 2, mm_processor_kwargs={"do_pan_and_scan": True}),
    ),
    "gemma3n": Row(
        "google/gemma-3n-E2B-it", GEMMA, {"image": "<image_soft_token>"},
        settings=_sizes(2048, 2, enforce_eager=True),
    ),
    "glm4_1v": Row(
        "zai-org/GLM-4.1V-9B-Thinking", GLM, _GLM, settings=_GLM_SIZES, with_metadata=True
    ),
    "glm4_5v": Row("zai-org/GLM-4.5V", GLM, _GLM, settings=_GLM_SIZES, with_metadata=True),
    "hunyuan_vl": Row(
        "tencent/HunyuanOCR", _HUNYUAN_PROMPT, {"image": _HUNYUAN}, settings=_sizes(8192)
    ),
    "h2ovl_chat": _by_template("h2oai/h2ovl-mississippi-800m", _sizes(8192)),
    "glm4v": Row(
        "zai-org/glm-4v-9b", "<|user|>\n{media}{question}<|assistant|>",
        {"image": "<|begin_of_image|><|endoftext|><|end_of_image|>"},
        settings=_sizes(
            2048, 2, enforce_eager=True,
            hf_overrides={"architectures": ["GLM4VForCausalLM"]},
        ),
        stop_token_ids=(151329, 151336, 151338), most=1,
    ),
    "idefics3": Row(
        "HuggingFaceM4/Idefics3-8B-Llama3", _IDEFICS_PROMPT % "", _IMAGE,
        settings=_sizes(8192, 2, enforce_eager=True),
    ),
    "keye_vl": Row(
        "Kwai-Keye/Keye-VL-8B-Preview", CHATML.format(ASKED), _QWEN_IMAGE, settings=_sizes(8192)
    ),
    "keye_vl1_5": Row(
        "Kwai-Keye/Keye-VL-1.5-8B", CHATML.format(ASKED), _QWEN_IMAGE, settings=_sizes(8192)
    ),
    "kimi_vl": Row(
        "moonshotai/Kimi-VL-A3B-Instruct", _KIMI_PROMPT, _KIMI, settings=_sizes(4096)
    ),
    "instructblip": Row("Salesforce/instructblip-vicuna-7b", "{question}", {"image": ""}),
    "interns1": _by_template("internlm/Intern-S1-mini", _sizes(8192, 2, enforce_eager=True)),
    "internvl_chat": _by_template("OpenGVLab/InternVL3-2B", _sizes(8192)),
    "lfm2_vl": _by_template("LiquidAI/LFM2-VL-1.6B", _sizes(8192)),
    "lightonocr": Row(
        "lightonai/LightOnOCR-1B",
        "<|im_start|>system<|im_end|>\n" + CHATML.format("{media}"),  # it reads, and is asked nothing
        {"image": "<|image_pad|>"},
    ),
    "llama4": _by_template(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", _sizes(8192, 4, gpu_memory_utilization=0.4)
    ),
    "llava": Row(
        "llava-hf/llava-1.5-7b-hf", "USER: {media}\n{question}\nASSISTANT:", _IMAGE,
        settings=_sizes(4096),
    ),
    "llava-next": Row(
        "llava-hf/llava-v1.6-mistral-7b-hf", "[INST] {media}\n{question} [/INST]", _IMAGE,
        settings=_sizes(8192),
    ),
    "llava-next-video": Row(
        "llava-hf/LLaVA-NeXT-Video-7B-hf", "USER: {media}\n{question} ASSISTANT:",
        {"video": "<video>"}, settings=_sizes(8192, 2),
    ),
    "llava-onevision": Row(
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "<|im_start|>user {media}\n{question}<|im_end|><|im_start|>assistant\n",
        {"image": "<image>", "video": "<video>"}, settings=_sizes(16384),
    ),
    "mantis": Row(
        "TIGER-Lab/Mantis-8B-siglip-llama3",
        "<|start_header_id|>user<|end_header_id|>\n\n{question}\n{media}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        _IMAGE, stop_token_ids=(128009,),
        settings=_sizes(
            4096, hf_overrides={"architectures": ["MantisForConditionalGeneration"]}
        ),
    ),
    "minicpmv": Row(
        "openbmb/MiniCPM-V-2_6", None, {"image": "", "video": ""}, settings=_sizes(4096, 2),
        stop_token_ids=(151645, 151643),
    ),
    "mistral3": Row(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503", MISTRAL, {"image": "[IMG]"},
        settings=_sizes(8192, 2),
    ),
    "nemotron_vl": _by_template("nvidia/Llama-3.1-Nemotron-Nano-VL-8B-V1", _sizes(8192)),
    "nemotron_vl_v2": _by_template("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16", _sizes(8192)),
    "NVLM_D": _by_template("nvidia/NVLM-D-72B", _sizes(4096)),
    "molmo": Row(  # its images stand in front of the prompt, whatever that says
        "allenai/Molmo-7B-D-0924",
        "<|im_start|>user {media}\n{question}<|im_end|><|im_start|>assistant\n", _IMAGE,
        settings=_sizes(None, dtype="bfloat16"),
    ),
    "ovis": Row(
        "AIDC-AI/Ovis2-1B", CHATML_WITH_SYSTEM.format("{media}\n{question}"), _IMAGE,
        settings=_sizes(4096, 2, dtype="half"),
    ),
    "paddleocr_vl": Row(
        "PaddlePaddle/PaddleOCR-VL", _PADDLE_PROMPT, {"image": _PADDLE}, settings=_sizes(4096, 2)
    ),
    "paligemma": Row("google/paligemma-3b-mix-224", "caption en", {"image": ""}),
    "paligemma2": Row("google/paligemma2-3b-ft-docci-448", "caption en", {"image": ""}),
    "phi3_v": Row(
        "microsoft/Phi-3.5-vision-instruct", _PHI_PROMPT, {"image": _PHI_IMAGE},
        settings=_sizes(4096, 2, mm_processor_kwargs={"num_crops": 16}),
    ),
    "phi4_mm": Row(
        "microsoft/Phi-4-multimodal-instruct", _PHI_4, {"image": _PHI_IMAGE},
        settings=_sizes(5120, 2, max_num_batched_tokens=12800, mm_processor_kwargs={"dynamic_hd": 16}),
    ),
    "pixtral_hf": Row(
        "mistral-community/pixtral-12b", MISTRAL, {"image": "[IMG]"}, settings=_sizes(6144, 2)
    ),
    "qwen_vl": Row(
        "Qwen/Qwen-VL", "{question}{media}", {"image": "Picture {number}: <img></img>\n"},
        settings=_sizes(
            1024, 2, hf_overrides={"architectures": ["QwenVLForConditionalGeneration"]}
        ),
    ),
    "qwen2_vl": Row("Qwen/Qwen2-VL-7B-Instruct", _QWEN_PROMPT, _QWEN, settings=_QWEN_SIZES),
    "qwen2_5_vl": Row("Qwen/Qwen2.5-VL-3B-Instruct", _QWEN_PROMPT, _QWEN, settings=_QWEN_SIZES),
    "qwen2_5_omni": Row(
        "Qwen/Qwen2.5-Omni-7B", OMNI_PROMPT, _OMNI, settings=_sizes(4096, 5),
    ),
    "qwen3_vl": Row(
        "Qwen/Qwen3-VL-4B-Instruct", _QWEN_PROMPT, _QWEN, settings=_QWEN_SIZES, with_metadata=True
    ),
    "qwen3_vl_moe": Row(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", _QWEN_PROMPT, _QWEN, settings=_QWEN_SIZES,
        with_metadata=True,
    ),
    "qwen3_5": _by_template("Qwen/Qwen3.5-27B", _QWEN_SIZES),
    "rvl": Row(
        "YannQi/R-4B", "<|im_start|>user {media}\n{question}<|im_end|><|im_start|>assistant\n",
        _IMAGE, settings=_sizes(16384),
    ),
    "skywork_chat": _by_template("Skywork/Skywork-R1V-38B", _sizes(4096)),
    "smolvlm": Row(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct", _SMOLVLM_PROMPT % "", _IMAGE,
        settings=_sizes(8192, 2, enforce_eager=True),
    ),
    "tarsier2": Row(
        "omni-research/Tarsier2-Recap-7b", _QWEN_PROMPT, _QWEN, settings=_sizes(4096, **_TARSIER2)
    ),
    "video_llava": Row(  # 15 frames fit, and it was trained with 8: --num-frames 8
        "LanguageBind/Video-LLaVA-7B-hf", "USER: {media}\n{question} ASSISTANT:",
        {"image": "<image>", "video": "<video>"}, settings=_sizes(4096, 2),
    ),
}  # fmt: skip
"""Key -> how a model is asked about one image or one video."""

_FEW_TILES = {"mm_processor_kwargs": {"max_dynamic_patch": 4}}
_QWEN_SEVERAL = _sizes(32768, 5, mm_processor_kwargs={"max_pixels": 1024 * 28 * 28})

SEVERAL_IMAGES: Mapping[str, Row] = {
    "aria": Row(
        "rhymes-ai/Aria", CHATML.format(ASKED), {"image": "<fim_prefix><|img|><fim_suffix>\n"},
        settings=_sizes(None, None, dtype="bfloat16"), stop_token_ids=_ARIA_STOPS,
    ),
    "aya_vision": _by_template("CohereLabs/aya-vision-8b", _sizes(None, 2)),
    "bee": _by_template("Open-Bee/Bee-8B-RL", _sizes(16384, 16)),
    "command_a_vision": _by_template("CohereLabs/command-a-vision-07-2025", _sizes(32768)),
    "gemma3": _by_template("google/gemma-3-4b-it", _sizes(8192, 2)),
    "glm4_5v": _by_template("zai-org/GLM-4.5V", _sizes(32768, 2)),
    "hunyuan_vl": Row(
        "tencent/HunyuanOCR", _HUNYUAN_PROMPT, {"image": _HUNYUAN}, settings=_sizes(8192)
    ),
    "h2ovl_chat": _by_template(
        "h2oai/h2ovl-mississippi-800m",
        _sizes(8192, mm_processor_kwargs={"max_dynamic_patch": 4, "use_msac": False}),
    ),
    "idefics3": Row(
        "HuggingFaceM4/Idefics3-8B-Llama3", _IDEFICS_PROMPT % "\n", {"image": _NUMBERED},
        between="\n", settings=_sizes(8192, 16, enforce_eager=True),
    ),
    "keye_vl": _by_template("Kwai-Keye/Keye-VL-8B-Preview", _sizes(8192, 5)),
    "keye_vl1_5": _by_template("Kwai-Keye/Keye-VL-1_5-8B", _sizes(32768, 5)),
    "kimi_vl": _by_template("moonshotai/Kimi-VL-A3B-Instruct", _sizes(4096, 4)),
    "interns1": _by_template("internlm/Intern-S1-mini", _sizes(4096)),
    "internvl_chat": _by_template("OpenGVLab/InternVL2-2B", _sizes(4096, **_FEW_TILES)),
    "llama4": _by_template("meta-llama/Llama-4-Scout-17B-16E-Instruct", _sizes(131072)),
    # It answers, but poorly: it was not trained on several images.
    "llava": _by_template("llava-hf/llava-1.5-7b-hf", _sizes(None, 16)),
    "llava-next": _by_template("llava-hf/llava-v1.6-mistral-7b-hf", _sizes(8192, 16)),
    "llava-onevision": _by_template("llava-hf/llava-onevision-qwen2-7b-ov-hf", _sizes(16384, 16)),
    "mistral3": Row(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503", MISTRAL, {"image": "[IMG]"},
        settings=_sizes(8192, 2),
    ),
    "NVLM_D": _by_template("nvidia/NVLM-D-72B", _sizes(8192, **_FEW_TILES)),
    "paddleocr_vl": Row(
        "PaddlePaddle/PaddleOCR-VL", _PADDLE_PROMPT, {"image": _PADDLE}, settings=_sizes(8192, 2)
    ),
    "phi3_v": Row(
        "microsoft/Phi-3.5-vision-instruct", _PHI_PROMPT, {"image": _PHI_IMAGE}, between="\n",
        settings=_sizes(4096, 2, mm_processor_kwargs={"num_crops": 4}),
    ),
    "phi4_mm": Row(
        "microsoft/Phi-4-multimodal-instruct", _PHI_4, {"image": _PHI_IMAGE},
        settings=_sizes(4096, 2, max_num_batched_tokens=12800, mm_processor_kwargs={"dynamic_hd": 4}),
    ),
    "pixtral_hf": Row(
        "mistral-community/pixtral-12b", MISTRAL, {"image": "[IMG]"}, settings=_sizes(8192, 2)
    ),
    "qwen2_vl": _by_template("Qwen/Qwen2-VL-7B-Instruct", _QWEN_SEVERAL, SYSTEM),
    "qwen2_5_vl": _by_template("Qwen/Qwen2.5-VL-3B-Instruct", _QWEN_SEVERAL, SYSTEM),
    "rvl": _by_template("YannQi/R-4B", _sizes(16384, 16)),
    "smolvlm": Row(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct", _SMOLVLM_PROMPT % "\n", {"image": _NUMBERED},
        between="\n", settings=_sizes(8192, 16, enforce_eager=True),
    ),
    "tarsier2": Row(
        "omni-research/Tarsier2-Recap-7b",
        CHATML_WITH_SYSTEM.format("<|vision_start|>{media}<|vision_end|>{question}"),
        {"image": "<|image_pad|>"}, settings=_sizes(32768, **_TARSIER2),
    ),
}  # fmt: skip
"""Key -> how a model is asked about several images in one prompt."""

AUDIO: Mapping[str, Row] = {
    "audioflamingo3": Row(
        "nvidia/audio-flamingo-3-hf", _QWEN_PROMPT, {"audio": "<sound>"},
        settings=_sizes(4096, 2, enforce_eager=True),
    ),
    "fun_asr_nano": Row(
        "FunAudioLLM/Fun-ASR-Nano-2512-hf", CHATML_WITH_SYSTEM.format("{question}{media}"),
        {"audio": "<|object_ref_start|>"}, settings=_sizes(4096, 5),
    ),
    "gemma3n": Row(
        "google/gemma-3n-E2B-it", GEMMA, {"audio": "<audio_soft_token>"},
        settings=_sizes(2048, 2, enforce_eager=True),
    ),
    "granite_speech": Row(
        "ibm-granite/granite-speech-3.3-8b", GRANITE, {"audio": "<|audio|>"}, settings=_sizes(2048, 2),
    ),
    "musicflamingo": Row(
        "nvidia/music-flamingo-2601-hf", _QWEN_PROMPT, {"audio": "<sound>"},
        settings=_sizes(4096, 2, enforce_eager=True),
    ),
    "phi4_mm": Row(
        "microsoft/Phi-4-multimodal-instruct", _PHI_4, {"audio": "<|audio_{number}|>"},
        settings=_sizes(12800, 2, max_num_batched_tokens=12800),
    ),
    "qwen2_audio": Row(
        "Qwen/Qwen2-Audio-7B-Instruct", _QWEN_PROMPT,
        {"audio": "Audio {number}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"}, settings=_sizes(4096, 5),
    ),
    "qwen2_5_omni": Row(
        "Qwen/Qwen2.5-Omni-7B", OMNI_PROMPT, {"audio": f"{_OMNI_AUDIO}\n"},
        settings=_sizes(4096, 5),
    ),
    "qwen3_asr": Row(
        "Qwen/Qwen3-ASR-1.7B", QWEN_ASR, {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        settings=_sizes(4096, 5),
    ),
    "ultravox": Row(
        "fixie-ai/ultravox-v0_5-llama-3_2-1b", LLAMA_3, {"audio": "<|audio|>\n"},
        settings=_sizes(4096, 5),
    ),
    "whisper": Row(
        "openai/whisper-large-v3-turbo", "<|startoftranscript|>", {"audio": ""},
        settings=_sizes(448, 5), most=1,
    ),
}  # fmt: skip
"""Key -> how a model is asked about recordings."""

OMNI: Mapping[str, Row] = {
    "qwen2_5_omni": Row(
        "Qwen/Qwen2.5-Omni-7B", OMNI_PROMPT, {"audio": _OMNI_AUDIO, **_OMNI},
        settings=_sizes(12800, 5),
    ),
    "qwen3_omni": Row(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct", OMNI_PROMPT,
        {"audio": "<|audio_start|><|audio_pad|><|audio_end|>", **_QWEN}, settings=_sizes(12800, 5),
    ),
}  # fmt: skip
"""Key -> how a model is asked about items of several modalities in one prompt."""
