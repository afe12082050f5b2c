"""Architectures that join a language model of :data:`~headrace_models.catalogue.ARCHITECTURES` with towers
for media. Their language model is served; towers are read where a row names a class that has them. A module
here holds the rows of one kind."""

from headrace_models.catalogue.multimodal.rows import REFUSED, WRAPPERS
from headrace_models.catalogue.multimodal.settings import (
    fixed_settings,
    joined_settings,
    of_inner_model,
    own_quantization,
    settings_of_towers,
    text_architecture,
    ties_by_tensors,
)
from headrace_models.catalogue.multimodal.wrapper import Wrapper, nested_settings, thinker_of

__all__ = [
    "REFUSED",
    "WRAPPERS",
    "Wrapper",
    "fixed_settings",
    "joined_settings",
    "nested_settings",
    "of_inner_model",
    "own_quantization",
    "settings_of_towers",
    "text_architecture",
    "thinker_of",
    "ties_by_tensors",
]
