"""Images and videos of models that differ from Qwen2-VL in the tokens of their prompts: OpenCUA, Tarsier2."""

from __future__ import annotations

from headrace_multimodal.images.processor import token_id
from headrace_multimodal.images.qwen_vl import QwenVLProcessor
from headrace_multimodal.images.vocabulary import special_token_id
from headrace_multimodal.video.qwen_vl import Qwen2VLVideos


class OpenCUAProcessor(QwenVLProcessor):
    """Images in Kimi-VL's prompts."""

    text = "<|media_begin|>image<|media_content|><|media_placeholder|><|media_end|>"

    def find_placeholder(self) -> int:
        return token_id(self.config, "media_placeholder_token_id", "image_token_id")


class Tarsier2Videos(Qwen2VLVideos):
    """Configs do not name the tokens."""

    def find_placeholder(self) -> int:
        return special_token_id(self.path, "<|image_pad|>")

    def find_video_placeholder(self) -> int | None:
        return special_token_id(self.path, "<|video_pad|>")
