"""A plain reading of MiniCPM-V 2.6 and later, which transformers does not have: its tower and its language
model are transformers' (Idefics 2's tower has the same places), its resampler is written with torch's
attention, by the paper (arXiv:2408.01800) and the names in the published files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_EPS = 1e-6
_OF_THE_WHOLE = ("architectures", "model_type")
_TEXTS = {"2.6": "Qwen2", "4.0": "Llama", "4.5": "Qwen3"}
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


class PlainMiniCPMV(nn.Module):
    """
    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        import transformers
        from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        kind = _TEXTS[str(config["version"])]
        config_class = getattr(transformers, f"{kind}Config")
        known = config_class().to_dict()
        own = {key: value for key, value in config.items() if key in known}
        own = {key: value for key, value in own.items() if key not in _OF_THE_WHOLE}
        self.config, self.image = config, config["image_token"]
        self.llm: Any = getattr(transformers, f"{kind}ForCausalLM")(config_class(**own))
        vision = {**config["vision_config"]}
        vision.pop("model_type", None)
        self.patch = vision["patch_size"]
        self.vpm = Idefics2VisionTransformer(
            Idefics2VisionConfig(**vision, hidden_act="gelu_pytorch_tanh")
        )
        self.resampler = PlainResampler(
            vision["hidden_size"], config["hidden_size"], config["query_num"]
        )
        self.generation_config = self.llm.generation_config

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
            states = self.vpm(pixels, patch_attention_mask=mask).last_hidden_state[0]
            found.append(self.resampler(states, rows, columns))
        return torch.cat(found)

    def embeds(self, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """[1, T, size]: of tokens, and of images in place of theirs."""
        made: Tensor = self.llm.get_input_embeddings()(input_ids).clone()
        if images:
            made[input_ids == self.image] = torch.cat([self.embed(image) for image in images])
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Any:
        """An object with ``logits``."""
        given = self.embeds(input_ids, images)
        return SimpleNamespace(
            logits=self.llm(inputs_embeds=given, attention_mask=attention_mask).logits
        )

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
        **settings: Any,
    ) -> Tensor:
        """[1, T + new tokens]."""
        made = self.llm.generate(
            inputs_embeds=self.embeds(input_ids, images), attention_mask=attention_mask, **settings
        )
        return torch.cat((input_ids, made), dim=1)

    def save_pretrained(self, folder: Path) -> None:
        """Write tensors and config. Needs safetensors."""
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        whole = {**self.llm.config.to_dict(), **self.config}
        (Path(folder) / "config.json").write_text(json.dumps(whole))
