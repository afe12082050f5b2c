"""Images, audio and video on their way into a model."""

from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.pixels import ImageLimits, decode_image
from headrace_multimodal.registry import processor_for, supported_architectures

__version__ = "0.1.0"

__all__ = [
    "ImageLimits",
    "content_hash",
    "decode_image",
    "processor_for",
    "supported_architectures",
]
