"""A plain reading of MiniCPM-V 2.0, which transformers does not have: timm's vision transformer under the
names in the published files, a resampler whose queries have places, and that library's Granite, which
multiplies where MiniCPM does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_testing.model.plain.minicpmv import PlainResampler, waves
from headrace_testing.model.plain.wrapper import PlainWrapper

_EPS = 1e-6


class PlainVit(nn.Module):
    """
    Args:
        sizes: hidden size, that of the MLP, blocks, heads, patch, patches along a side.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        hidden, inner, layers, self.heads, patch, self.side = sizes
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, hidden, patch, patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2, hidden))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(hidden, eps=_EPS), "norm2": nn.LayerNorm(hidden, eps=_EPS),
                "attn": nn.ModuleDict(
                    {"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)}
                ),
                "mlp": nn.ModuleDict({"fc1": nn.Linear(hidden, inner), "fc2": nn.Linear(inner, hidden)}),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(hidden, eps=_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [1, 3, height, width] -> [patches, hidden]."""
        x = self.patch_embed["proj"](pixels)
        places = self.pos_embed.view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        if x.shape[2:] != places.shape[2:]:
            places = functional.interpolate(places, x.shape[2:], mode="bicubic", antialias=True)
        x = (x + places).flatten(2).transpose(1, 2)
        for block in self.blocks:
            own: Any = block
            q, k, v = own["attn"]["qkv"](own["norm1"](x)).chunk(3, dim=-1)
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
            seen = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
            x = x + own["attn"]["proj"](seen.transpose(1, 2).flatten(2))
            x = x + own["mlp"]["fc2"](functional.gelu(own["mlp"]["fc1"](own["norm2"](x))))
        found: Tensor = self.norm(x)[0]
        return found


class PlacedResampler(PlainResampler):
    """Queries have the places of a square."""

    def __init__(self, states: int, size: int, queries: int) -> None:
        super().__init__(states, size, queries)
        self.pos_embed = nn.Parameter(torch.zeros(queries, size))

    def forward(self, states: Tensor, rows: int, columns: int) -> Tensor:
        x = self.ln_kv(self.kv_proj(states))
        across = waves(self.size // 2, torch.arange(columns)).repeat(rows, 1)
        down = waves(self.size // 2, torch.arange(rows)).repeat_interleave(columns, dim=0)
        placed = torch.cat((across, down), dim=1)
        seen, _ = self.attn(self.ln_q(self.query) + self.pos_embed, x + placed, x)
        made: Tensor = self.ln_post(seen) @ self.proj
        return made


class PlainMiniCPMV20(PlainWrapper):
    """
    Args:
        config: ``config.json``, and ``image_token``: the token that stands for a vector.
        sizes: see :class:`PlainVit`; without the block that is dropped.
    """

    def __init__(self, config: Mapping[str, Any], sizes: Sequence[int]) -> None:
        from transformers import GraniteConfig, GraniteForCausalLM

        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
        text = GraniteConfig(
            **{key: config[key] for key in keys}, embedding_multiplier=config["scale_emb"],
            residual_multiplier=config["scale_depth"] / math.sqrt(layers),
            logits_scaling=hidden / config["dim_model_base"], tie_word_embeddings=False,
            attention_multiplier=(hidden / config["num_attention_heads"]) ** -0.5,
            pad_token_id=None, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        super().__init__(config, GraniteForCausalLM(text))
        self.patch, self.multiplier = sizes[4], config["scale_emb"]
        self.vpm = PlainVit(sizes)
        self.resampler = PlacedResampler(sizes[0], hidden, config["query_num"])

    def published_name(self, name: str) -> str:
        return name.replace("language_model.", "llm.", 1)

    def embeds(self, input_ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Granite multiplies all vectors; those of images are meant as they are."""
        made: Tensor = self.language_model.get_input_embeddings()(input_ids).clone()
        if images:
            seen = torch.cat([self.embed(image) for image in images])
            made[input_ids == self.image] = seen / self.multiplier
        return made

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        """See :class:`headrace_testing.model.plain.minicpmv.PlainMiniCPMV`."""
        found, flat, patch = [], image["pixel_values"], self.patch
        for rows, columns in image["tgt_sizes"].tolist():
            patches = flat[: rows * columns].view(rows, columns, 3, patch, patch)
            flat = flat[rows * columns :]
            pixels = patches.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * patch, columns * patch)
            found.append(self.resampler(self.vpm(pixels), rows, columns))
        return torch.cat(found)
