"""The scripts about images, videos and audio in ``examples/``: their tables of prompts, and runs."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_checkpoints import save_llava
from omni_checkpoints import save_qwen2_5_omni
from speech_checkpoints import save_qwen2_audio, save_whisper, sound, wav
from video_checkpoints import save_qwen2, video_file

from headrace import LLM, EngineArgs
from headrace.arguments import Parser
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = (
    "--dtype", "float32", "--num-threads", "1", "--block-size", "8", "--kv-cache-memory-bytes", "16777216",
    "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>User:"
    "{% for part in message.content if part.type == 'image' %}Image-{{ loop.index }}: <image>{{ '\n' }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "<end_of_utterance>{{ '\n' }}Assistant:{% endif %}{% endfor %}"
)
"""Writes what the row of SmolVLM for several images does."""

QWEN_IMAGE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_VIDEO = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|video_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
)
OMNI = (
    "<|im_start|>system\nYou are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech.<|im_end|>\n"
    "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
)
OMNI_CLIP = "<|audio_bos|><|AUDIO|><|audio_eos|>\n"
GLM = (
    "[gMASK]<sop><|system|>\nYou are a helpful assistant.<|user|>\n"
    "<|begin_of_image|><|image|><|end_of_image|>Why?<|assistant|>assistant\n"
)
GEMMA_3N = "<start_of_turn>user\n%sWhy?<end_of_turn>\n<start_of_turn>model\n"
GLM_VIDEO = GLM.replace("image", "video")
HUNYUAN = (
    "<\uff5chy_place\u2581holder\u2581no\u2581100\uff5c><\uff5chy_place\u2581holder\u2581no\u2581102\uff5c>"
    "<\uff5chy_place\u2581holder\u2581no\u2581101\uff5c>"
)
HUNYUAN_PROMPT = "<\uff5chy_begin\u2581of\u2581sentence\uff5c>%sWhy?<\uff5chy_User\uff5c>"
KEYE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
ONE_IMAGE = {
    "aria": "<|im_start|>user\n<fim_prefix><|img|><fim_suffix>Why?<|im_end|>\n<|im_start|>assistant\n",
    "aya_vision": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><image>Why?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "bee": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<image>\nWhy?"
    "<|im_end|><|im_start|>assistant\n<think>\n",
    "blip-2": "Question: Why? Answer:",
    "command_a_vision": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|IMG_PATCH|>Why?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "dots_ocr": "<|img|><|imgpad|><|endofimg|>Why?",
    "ernie45_vl": "<|begin_of_sentence|>User: Picture 1:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>Why?"
    "\nAssistant: <think></think>",
    "eagle2_5": None,
    "gemma3": "<bos><start_of_turn>user\n<start_of_image>Why?<end_of_turn>\n<start_of_turn>model\n",
    "gemma3n": GEMMA_3N % "<image_soft_token>",
    "chameleon": "Why?<image>",
    "fuyu": "Why?\n",
    "glm4v": "<|user|>\n<|begin_of_image|><|endoftext|><|end_of_image|>Why?<|assistant|>",
    "glm4_1v": GLM,
    "glm4_5v": GLM,
    "hunyuan_vl": HUNYUAN_PROMPT % HUNYUAN,
    "idefics3": "<|begin_of_text|>User:<image>Why?<end_of_utterance>\nAssistant:",
    "keye_vl": KEYE,
    "keye_vl1_5": KEYE,
    "kimi_vl": "<|im_user|>user<|im_middle|><|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    "Why?<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "h2ovl_chat": None,
    "instructblip": "Why?",
    "interns1": None,
    "internvl_chat": None,
    "lfm2_vl": None,
    "lightonocr": "<|im_start|>system<|im_end|>\n<|im_start|>user\n<|image_pad|><|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama4": None,
    "llava": "USER: <image>\nWhy?\nASSISTANT:",
    "llava-next": "[INST] <image>\nWhy? [/INST]",
    "llava-onevision": "<|im_start|>user <image>\nWhy?<|im_end|><|im_start|>assistant\n",
    "mantis": "<|start_header_id|>user<|end_header_id|>\n\nWhy?\n<image><|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral3": "<s>[INST]Why?\n[IMG][/INST]",
    "nemotron_vl": None,
    "nemotron_vl_v2": None,
    "NVLM_D": None,
    "minicpmv": None,
    "molmo": "<|im_start|>user <image>\nWhy?<|im_end|><|im_start|>assistant\n",
    "ovis": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<image>\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "paddleocr_vl": "<|begin_of_sentence|>User: Why?<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>\n"
    "Assistant: ",
    "paligemma": "caption en",
    "paligemma2": "caption en",
    "phi3_v": "<|user|>\n<|image_1|>\nWhy?<|end|>\n<|assistant|>\n",
    "phi4_mm": "<|user|><|image_1|>Why?<|end|><|assistant|>",
    "pixtral_hf": "<s>[INST]Why?\n[IMG][/INST]",
    "qwen_vl": "Why?Picture 1: <img></img>\n",
    "qwen2_vl": QWEN_IMAGE,
    "qwen2_5_vl": QWEN_IMAGE,
    "qwen2_5_omni": OMNI % "<|vision_bos|><|IMAGE|><|vision_eos|>Why?",
    "qwen3_vl": QWEN_IMAGE,
    "qwen3_vl_moe": QWEN_IMAGE,
    "qwen3_5": None,
    "smolvlm": "<|im_start|>User:<image>Why?<end_of_utterance>\nAssistant:",
    "rvl": "<|im_start|>user <image>\nWhy?<|im_end|><|im_start|>assistant\n",
    "skywork_chat": None,
    "tarsier2": QWEN_IMAGE,
    "video_llava": "USER: <image>\nWhy? ASSISTANT:",
}
"""Key -> the prompt; None: by the checkpoint's template."""
ONE_VIDEO = {
    "ernie45_vl": "<|begin_of_sentence|>User: Video 1:<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>Why?"
    "\nAssistant: <think></think>",
    "glm4_1v": GLM_VIDEO,
    "glm4_5v": GLM_VIDEO,
    "llava-next-video": "USER: <video>\nWhy? ASSISTANT:",
    "llava-onevision": "<|im_start|>user <video>\nWhy?<|im_end|><|im_start|>assistant\n",
    "minicpmv": None,
    "qwen2_vl": QWEN_VIDEO,
    "qwen2_5_vl": QWEN_VIDEO,
    "qwen2_5_omni": OMNI % "<|vision_bos|><|VIDEO|><|vision_eos|>Why?",
    "qwen3_vl": QWEN_VIDEO,
    "qwen3_vl_moe": QWEN_VIDEO,
    "tarsier2": QWEN_VIDEO,
    "video_llava": "USER: <video>\nWhy? ASSISTANT:",
}
THREE_IMAGES = {
    "aria": "<|im_start|>user\n<fim_prefix><|img|><fim_suffix>\n<fim_prefix><|img|><fim_suffix>\n"
    "<fim_prefix><|img|><fim_suffix>\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "aya_vision": None,
    "bee": None,
    "command_a_vision": None,
    "gemma3": None,
    "glm4_5v": None,
    "hunyuan_vl": HUNYUAN_PROMPT % (HUNYUAN * 3),
    "idefics3": "<|begin_of_text|>User:Image-1: <image>\n\nImage-2: <image>\n\nImage-3: <image>\n\n"
    "Why?<end_of_utterance>\nAssistant:",
    "keye_vl": None,
    "keye_vl1_5": None,
    "kimi_vl": None,
    "h2ovl_chat": None,
    "interns1": None,
    "internvl_chat": None,
    "llama4": None,
    "llava": None,
    "llava-next": None,
    "llava-onevision": None,
    "mistral3": "<s>[INST]Why?\n[IMG][IMG][IMG][/INST]",
    "NVLM_D": None,
    "paddleocr_vl": "<|begin_of_sentence|>User: Why?<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>\nAssistant: ",
    "phi3_v": "<|user|>\n<|image_1|>\n<|image_2|>\n<|image_3|>\nWhy?<|end|>\n<|assistant|>\n",
    "phi4_mm": "<|user|><|image_1|><|image_2|><|image_3|>Why?<|end|><|assistant|>",
    "pixtral_hf": "<s>[INST]Why?\n[IMG][IMG][IMG][/INST]",
    "qwen2_vl": None,
    "qwen2_5_vl": None,
    "rvl": None,
    "smolvlm": "<|im_start|>User:Image-1: <image>\n\nImage-2: <image>\n\nImage-3: <image>\n\n"
    "Why?<end_of_utterance>\nAssistant:",
    "tarsier2": QWEN_IMAGE.replace("<|image_pad|>", "<|image_pad|>" * 3),
}
FLAMINGO = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n%sWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024.\n"
    "Today's Date: April 9, 2025.\nYou are Granite, developed by IBM. You are a helpful AI assistant"
    "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>%sWhy?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>"
)
ASR = "<|im_start|>system\nWhy?<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
ASR_CLIP = "<|audio_start|><|audio_pad|><|audio_end|>"
LLAMA_3 = (
    "<|start_header_id|>user<|end_header_id|>\n\n%sWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
FUN_ASR = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhy?%s<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TWO_CLIPS = {
    "phi4_mm": "<|user|><|audio_1|><|audio_2|>Why?<|end|><|assistant|>",
    "fun_asr_nano": FUN_ASR % "<|object_ref_start|><|object_ref_start|>",
    "ultravox": LLAMA_3 % "<|audio|>\n<|audio|>\n",
    "gemma3n": GEMMA_3N % "<audio_soft_token><audio_soft_token>",
    "musicflamingo": FLAMINGO % "<sound><sound>",
    "qwen3_asr": ASR % (2 * ASR_CLIP),
    "audioflamingo3": FLAMINGO % "<sound><sound>",
    "granite_speech": GRANITE % "<|audio|><|audio|>",
    "qwen2_audio": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nAudio 2: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "Why?<|im_end|>\n<|im_start|>assistant\n",
    "qwen2_5_omni": OMNI % f"{OMNI_CLIP}{OMNI_CLIP}Why?",
}
ONE_CLIP = {
    "phi4_mm": "<|user|><|audio_1|>Why?<|end|><|assistant|>",
    "fun_asr_nano": FUN_ASR % "<|object_ref_start|>",
    "ultravox": LLAMA_3 % "<|audio|>\n",
    "gemma3n": GEMMA_3N % "<audio_soft_token>",
    "musicflamingo": FLAMINGO % "<sound>",
    "qwen3_asr": ASR % ASR_CLIP,
    "audioflamingo3": FLAMINGO % "<sound>",
    "granite_speech": GRANITE % "<|audio|>",
    "qwen2_audio": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "qwen2_5_omni": OMNI % f"{OMNI_CLIP}Why?",
    "whisper": "<|startoftranscript|>",
}
PROMPTS = [
    (table, key, modality, count, text)
    for table, modality, count, texts in [
        ("ONE_ITEM", "image", 1, ONE_IMAGE),
        ("ONE_ITEM", "video", 1, ONE_VIDEO),
        ("SEVERAL_IMAGES", "image", 3, THREE_IMAGES),
        ("AUDIO", "audio", 1, ONE_CLIP),
        ("AUDIO", "audio", 2, TWO_CLIPS),
    ]
    for key, text in texts.items()
]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import what is beside them, as when python runs them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize(("table", "key", "modality", "count", "text"), PROMPTS)
def test_a_row_writes_its_prompt(
    table: str, key: str, modality: str, count: int, text: str | None
) -> None:
    import media_prompts

    row = getattr(media_prompts, table)[key]
    if text is not None:
        assert row.text("Why?", modality, count) == text
        return
    assert row.prompt is None
    with pytest.raises(ValueError, match="written by its chat template"):
        row.text("Why?", modality, count)


def test_every_row_is_tested() -> None:
    import media_prompts

    for table, modality, texts in [
        (media_prompts.ONE_ITEM, "image", ONE_IMAGE),
        (media_prompts.ONE_ITEM, "video", ONE_VIDEO),
        (media_prompts.SEVERAL_IMAGES, "image", THREE_IMAGES),
        (media_prompts.AUDIO, "audio", ONE_CLIP),
    ]:
        assert {key for key, row in table.items() if modality in row.media} == set(texts)


def test_settings_of_rows_are_those_of_the_engine() -> None:
    import media_prompts

    for table in (
        media_prompts.ONE_ITEM, media_prompts.SEVERAL_IMAGES, media_prompts.AUDIO, media_prompts.OMNI,
    ):  # fmt: skip
        for row in table.values():
            config = EngineArgs(model=row.checkpoint, **row.settings).create_engine_config()
            assert config.model.model == row.checkpoint


def test_a_rows_settings_are_defaults_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    import media_calls
    import media_prompts

    def parsed(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        parser = EngineArgs.add_cli_args(Parser())
        parser.add_argument("-m", dest="model_type")
        return media_calls.parse(parser, media_prompts.ONE_ITEM, lambda _: ("video", 1))[0]

    args = parsed("-m", "qwen2_vl")
    assert args.model == "Qwen/Qwen2-VL-7B-Instruct"
    assert args.limit_mm_per_prompt == {"image": 0, "video": 1, "audio": 0}
    assert (args.max_model_len, args.max_num_seqs) == (4096, 5)
    assert args.mm_processor_kwargs == {"min_pixels": 784, "max_pixels": 1003520}
    assert args.seed == 0
    args = parsed("-m", "qwen2_vl", "--model", "other", "--max-model-len", "99")
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("other", 99, 5)


def test_a_template_gets_the_rows_system_turn() -> None:
    import media_calls
    import media_prompts

    part = {"type": "image_pil"}
    text = {"type": "text", "text": "Why?"}
    user = {"role": "user", "content": [part, text]}
    system = {"role": "system", "content": "You are a helpful assistant."}
    table = media_prompts.SEVERAL_IMAGES
    assert media_calls.conversation(table["qwen2_vl"], "Why?", [part]) == [system, user]
    assert media_calls.conversation(table["llava"], "Why?", [part]) == [user]


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script with a command line, and gives what it printed."""

    def script(name: str, *words: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return script


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save_qwen2(folder)
    return folder


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listener")
    save_qwen2_audio(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 512  # the prompt has many tokens here
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that went to ``LLM.generate``."""
    found: list[Any] = []
    generate = LLM.generate

    def noted(self: LLM, prompts: Any, *args: Any, **settings: Any) -> Any:
        found.extend(prompts)
        return generate(self, prompts, *args, **settings)

    monkeypatch.setattr(LLM, "generate", noted)
    return found


@pytest.fixture
def processed(llava: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each image that is processed for a prompt, not for the measure of memory."""
    found: list[int] = []
    config = json.loads((llava / "config.json").read_text())
    kind: Any = type(processor_for("LlavaForConditionalGeneration", config, llava))
    one, generate = kind.one, LLM.generate
    monkeypatch.setattr(kind, "one", lambda *a: (found.append(1), one(*a))[1])

    def counted(*args: Any, **settings: Any) -> Any:
        found.clear()
        return generate(*args, **settings)

    monkeypatch.setattr(LLM, "generate", counted)
    return found


def test_an_image_in_four_prompts(llava: Path, run: Run) -> None:
    said = run(
        "vision_language", "-m", "llava", "--model", llava, *TINY, "--time-generate",
        "--use-different-prompt-per-request",
    )  # fmt: skip
    time, *answers = said.splitlines()
    assert time.startswith("4 prompts in ")
    assert [line.split("' -> ")[0] for line in answers] == [
        "'What is in the picture?",
        "'Describe the picture in detail.",
        "'Which colours does the picture have?",
        "'Where may the picture have been taken?",
    ]


def test_a_file_is_read(llava: Path, run: Run, tmp_path: Path) -> None:
    from media_files import picture

    picture(number=3).save(tmp_path / "other.png")
    words = ("vision_language", "--model", llava, *TINY, "--num-prompts", 1)
    drawn, other = run(*words), run(*words, "--image", tmp_path / "other.png")
    assert drawn.startswith("'What is in the picture?' -> ")
    assert drawn != other


@pytest.mark.parametrize(
    ("words", "times"),
    [(["--image-repeat-prob", 1], 1), (["--image-repeat-prob", 0], 5), ([], 1),
     (["--disable-mm-processor-cache"], 5)],
)  # fmt: skip
def test_images_that_repeat_are_processed_once(
    llava: Path, run: Run, processed: list[int], words: list[Any], times: int
) -> None:
    run("vision_language", "--model", llava, *TINY, "--num-prompts", 5, *words)
    assert len(processed) == times


def test_names_stand_for_images(llava: Path, run: Run, processed: list[int]) -> None:
    words = ("vision_language", "--model", llava, *TINY, "--verify-mm-cache-hit-with-uuids")
    said = run(*words, "--image-repeat-prob", 0)
    assert said.endswith("4 prompts have the same answers with names in place of media.\n")
    assert processed == []
    with pytest.raises(SystemExit) as ended:
        run(*words, "--disable-mm-processor-cache")
    assert str(ended.value.code).startswith("Media were not found by their names: ")
    assert "'uuid_0': no item of that name is kept" in str(ended.value.code)


def test_names_in_chats(llava: Path, run: Run) -> None:
    said = run(
        "vision_language", "-m", "llama4", "--model", llava, *TINY,
        "--verify-mm-cache-hit-with-uuids",
    )  # fmt: skip
    assert said.endswith("4 prompts have the same answers with names in place of media.\n")


@pytest.mark.parametrize(("key", "with_metadata"), [("qwen2_vl", False), ("qwen3_vl", True)])
def test_a_video(
    qwen: Path, run: Run, tmp_path: Path, sent: list[Any], key: str, with_metadata: bool
) -> None:
    (tmp_path / "clip.mp4").write_bytes(video_file(24))
    words = (
        "vision_language", "-m", key, "--model", qwen, *TINY, "--modality", "video", "--num-prompts", 2,
        "--mm-processor-kwargs", '{"max_pixels": 4096}', "--num-frames", 4,
    )  # fmt: skip
    drawn = run(*words, "--verify-mm-cache-hit-with-uuids").splitlines()
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith("'What happens in the video?' -> ")
    assert drawn[2] == "2 prompts have the same answers with names in place of media."
    assert run(*words, "--video", tmp_path / "clip.mp4").splitlines()[0] != drawn[0]
    for prompt in sent[-2:]:
        [video] = prompt["multi_modal_data"]["video"]
        assert (isinstance(video, tuple) and video[1]["fps"] == 8.0) == with_metadata
        assert len(video[0] if with_metadata else video) == 4


def test_frames_of_a_file(tmp_path: Path) -> None:
    from media_files import frames_of

    (tmp_path / "clip.mp4").write_bytes(video_file(24))
    frames, known = frames_of(tmp_path / "clip.mp4", 4)
    assert frames.shape == (4, 48, 64, 3)
    assert known == {"fps": 8.0, "total_num_frames": 24, "frames_indices": [0, 8, 15, 23]}
    every, _ = frames_of(tmp_path / "clip.mp4", 99)
    np.testing.assert_array_equal(frames, every[[0, 8, 15, 23]])


@pytest.mark.parametrize("count", [2, 12])
def test_several_images_by_both_calls(llava: Path, run: Run, count: int) -> None:
    words = ("vision_language_multi_image", "-m", "smolvlm", "--model", llava, *TINY, "-n", count)
    by_prompt = run(*words)
    assert len(by_prompt) > 20
    assert run(*words, "--method", "chat") == by_prompt


def test_several_images_by_the_template(llava: Path, run: Run) -> None:
    words = ("vision_language_multi_image", "--model", llava, *TINY, "-m")
    # The tiny model's template writes the prompt of SmolVLM.
    assert run(*words, "llava") == run(*words, "smolvlm")


def test_more_images_than_the_limit(llava: Path, run: Run) -> None:
    with pytest.raises(RequestError, match="3 items; at most 1 are taken"):
        run(
            "vision_language_multi_image", "-m", "smolvlm", "--model", llava, *TINY, "-n", 3,
            "--limit-mm-per-prompt", '{"image": 1}',
        )  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2])
def test_recordings(listener: Path, run: Run, tmp_path: Path, count: int) -> None:
    words = (
        "audio_language", "-m", "qwen2_audio", "--model", listener, *TINY, "--num-audios", count,
        "--num-prompts", 2,
    )  # fmt: skip
    first, again = run(*words).splitlines()
    assert first == again
    assert first.count("<|AUDIO|>") == count
    if count:
        (tmp_path / "speech.wav").write_bytes(wav(sound(1, 1.0)))
        assert run(*words, "--audio", tmp_path / "speech.wav").splitlines()[0] != first


def test_whisper_hears_one_recording(run: Run, tmp_path: Path) -> None:
    save_whisper(tmp_path)
    words = ("audio_language", "-m", "whisper", "--model", tmp_path, *TINY, "--max-model-len", 64)
    assert run(*words).startswith("'<|startoftranscript|>' -> ")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("vision_language", ["-m", "nobody"], "invalid choice: 'nobody' (choose from"),
        ("audio_language", ["-m", "moshi"], "choose from 'audioflamingo3', 'fun_asr_nano', "),
        ("vision_language", ["-tp", "0"], "--tensor-parallel-size: 0: must be at least 1"),
        ("vision_language_multi_image", ["-tp", "0"], "--tensor-parallel-size: 0: must be at"),
        ("audio_language", ["-tp", "-1"], "--tensor-parallel-size: -1: must be at least 1"),
        ("vision_language", ["--modality", "video"], "--modality: llava takes image only"),
        ("vision_language", ["--image-repeat-prob", "1.5"], "--image-repeat-prob: 1.5: must be in"),
        ("vision_language", ["--video", "a.mp4"], "--video: is for --modality video only"),
        ("vision_language", ["--num-prompts", "0"], "--num-prompts: must be at least 1"),
        ("vision_language_multi_image", ["-n", "13"], "--num-images/-n: invalid choice: 13"),
        (
            "vision_language_multi_image",
            ["--image", "a", "b", "c"],
            "--image: 3 files for --num-images 2",
        ),
        ("audio_language", ["-m", "whisper", "--num-audios", "2"], "--num-audios: 2: whisper takes"),
        ("audio_language", ["--audio", "a", "b"], "--audio: 2 files for --num-audios 1"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        run(name, *words)
    assert message in capsys.readouterr().err


def test_a_tower_whose_heads_ranks_cannot_divide(llava: Path, run: Run) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"vision_tower.* 3 heads .*tensor_parallel_size = 2"
    ):
        run("vision_language", "--model", llava, *TINY, "-tp", 2)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    save_qwen2_5_omni(folder)
    return folder


def test_several_modalities_in_a_prompt(omni: Path, run: Run, sent: list[Any]) -> None:
    words = ("omni", "--model", omni, *TINY, "--max-model-len", 1024, "--num-frames", 4)
    said = run(*words)
    [asked] = sent
    assert said.startswith(f"{asked['prompt']!r} -> ")
    marks = "<|audio_bos|><|AUDIO|><|audio_eos|><|vision_bos|><|IMAGE|><|vision_eos|>"
    assert f"{marks}<|vision_bos|><|VIDEO|><|vision_eos|>What is said" in asked["prompt"]
    assert {name: len(items) for name, items in asked["multi_modal_data"].items()} == {
        "audio": 1, "image": 1, "video": 1,
    }  # fmt: skip
    sent.clear()
    run(*words, "--query-type", "multi_audios")
    [asked] = sent
    assert len(asked["multi_modal_data"]["audio"]) == 2
    assert asked["prompt"].count("<|AUDIO|>") == 2
    with pytest.raises(RequestError, match="2 items; at most 1"):
        run(*words, "--query-type", "multi_audios", "--limit-mm-per-prompt", '{"audio": 1}')


def test_the_row_of_qwen3_omni() -> None:
    import media_prompts

    row = media_prompts.OMNI["qwen3_omni"]
    assert row.text("Why?", "audio") == OMNI % "<|audio_start|><|audio_pad|><|audio_end|>Why?"
    assert row.text("Why?", "video") == OMNI % "<|vision_start|><|video_pad|><|vision_end|>Why?"


def test_the_sound_of_a_video_is_not_put_between_its_frames(
    omni: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("omni", "--model", omni, "--query-type", "use_audio_in_video")
    assert "choose from mixed_modalities, multi_audios" in capsys.readouterr().err.replace("'", "")
