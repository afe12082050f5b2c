"""A plain reading of MiniCPM-o 2.6, which transformers does not have: MiniCPM-V 2.6 with that library's
encoder of Whisper under the names in the published files, whose states hear their own second and those
before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_testing.model.plain.minicpmv import PlainMiniCPMV


class PlainMiniCPMO(PlainMiniCPMV):
    """
    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__(config)
        audio, size = WhisperConfig(**config["audio_config"]), config["hidden_size"]
        self.apm: Any = WhisperEncoder(audio)
        self.audio_projection_layer = nn.ModuleDict(
            {
                "linear1": nn.Linear(audio.encoder_ffn_dim // 4, size),
                "linear2": nn.Linear(size, size),
            }
        )
        self.window = 2 * audio.max_source_positions
        self.pool = nn.AvgPool1d(config["audio_pool_step"], stride=config["audio_pool_step"])
        self.block = int(config["audio_chunk_length"] * 50)

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        """Vectors of an image, or of a recording (``input_features`` [frames, bins])."""
        if "input_features" not in image:
            return super().embed(image)
        pieces = torch.split(image["input_features"], self.window)
        return torch.cat([self.heard(piece) for piece in pieces])

    def heard(self, frames: Tensor) -> Tensor:
        """frames [F, bins] of a piece -> vectors."""
        own = self.apm
        x = functional.gelu(own.conv1(frames.t()[None]))
        x = functional.gelu(own.conv2(x)).transpose(1, 2)
        x = x + own.embed_positions.weight[: x.shape[1]]
        mask = torch.full((x.shape[1], x.shape[1]), -1e30)
        for at in range(x.shape[1]):
            mask[at, : (at // self.block + 1) * self.block] = 0.0
        for layer in own.layers:
            made = layer(x, mask[None, None])
            x = made[0] if isinstance(made, tuple) else made
        x = functional.relu(self.audio_projection_layer["linear1"](own.layer_norm(x)))
        x = self.audio_projection_layer["linear2"](x)
        found: Tensor = self.pool(x.transpose(1, 2)).transpose(1, 2)[0]
        return found
