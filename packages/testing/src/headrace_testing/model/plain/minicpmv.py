"""A plain reading of MiniCPM-V 2.5 and later, which transformers does not have: its tower and its language
model are transformers' (Idefics 2's tower has the same places), its resampler is written with torch's
attention, by the paper (arXiv:2408.01800) and the names in the published files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper

_EPS = 1e-6
_OF_THE_WHOLE = ("architectures", "model_type")
_TEXTS = {"2.5": "Llama", "2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}
"""Version -> the language model's class in transformers."""


def waves(size: int, positions: Tensor) -> Tensor:
    """[len(positions), size]: sines, then cosines."""
    each = 1.0 / 10000 ** (torch.arange(size // 2) / (size / 2))
    angles = torch.outer(positions.float(), each)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class PlainResampler(nn.Module):
    """States of a slice -> as many vectors as there are queries."""

    def __init__(self, states: int, size: int, queries: int) -> None:
        super().__init__()
        self.size = size
        self.query = nn.Parameter(torch.zeros(queries, size))
        self.kv_proj = nn.Linear(states, size, bias=False)
        self.attn = nn.MultiheadAttention(size, size // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(size, eps=_EPS) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(size, size))

    def forward(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """states [rows * columns, H] -> [queries, size]."""
        x = self.ln_kv(self.kv_proj(states))
        across = waves(self.size // 2, torch.arange(columns)).repeat(rows, 1)
        down = waves(self.size // 2, torch.arange(rows)).repeat_interleave(columns, dim=0)
        placed = torch.cat((across, down), dim=1)
        seen, _ = self.attn(self.ln_q(self.query), x + placed, x)
        made: Tensor = self.ln_post(seen) @ self.proj
        return made


class PlainMiniCPMV(PlainWrapper):
    """
    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        import transformers
        from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        self.version = str(config.get("version") or "2.5")
        kind = _TEXTS[self.version]
        config_class = getattr(transformers, f"{kind}Config")
        known = config_class().to_dict()
        own = {key: value for key, value in config.items() if key in known}
        own = {key: value for key, value in own.items() if key not in _OF_THE_WHOLE}
        llm = getattr(transformers, f"{kind}ForCausalLM")(config_class(**own))
        super().__init__({**llm.config.to_dict(), **config}, llm)
        vision = {**config["vision_config"]}
        vision.pop("model_type", None)
        self.patch = vision["patch_size"]
        self.vpm = Idefics2VisionTransformer(
            Idefics2VisionConfig(**vision, hidden_act="gelu_pytorch_tanh")
        )
        self.resampler = PlainResampler(
            vision["hidden_size"], config["hidden_size"], config["query_num"]
        )

    def published_name(self, name: str) -> str:
        return name.replace("language_model.", "llm.", 1)

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        """Vectors of an image, slice by slice.

        Args:
            image: ``pixel_values`` [patches, 3 * patch * patch] and ``tgt_sizes`` [slices, 2].
        """
        found, flat, patch = [], image["pixel_values"], self.patch
        for rows, columns in image["tgt_sizes"].tolist():
            patches = flat[: rows * columns].view(rows, columns, 3, patch, patch)
            flat = flat[rows * columns :]
            pixels = patches.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * patch, columns * patch)
            mask = torch.ones(1, rows, columns, dtype=torch.bool)
            if self.version == "2.5":  # all patches in a row, of which the mask knows no more
                pixels = patches.permute(2, 3, 0, 1, 4).reshape(1, 3, patch, rows * columns * patch)
                mask = torch.ones(1, 1, rows * columns, dtype=torch.bool)
            states = self.vpm(pixels, patch_attention_mask=mask).last_hidden_state[0]
            found.append(self.resampler(states, rows, columns))
        return torch.cat(found)
