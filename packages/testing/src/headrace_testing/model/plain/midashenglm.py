"""A plain reading of MiDashengLM, which transformers does not have: the encoder and the projector as the
published code reads, in front of transformers' Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper

_RATE = 1_000_000.0
"""Base of the rotation."""


class PlainBlock(nn.Module):
    """Norm, attention, scale; norm, MLP, scale."""

    def __init__(self, size: int, heads: int, scaled: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.fc1, self.fc2 = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.ls1, self.ls2 = (
            (nn.Parameter(torch.zeros(size)) if scaled else None) for _ in range(2)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [T, size]; mask [T]: states that are heard."""
        joined = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        made = nn.functional.scaled_dot_product_attention(
            joined[0], joined[1], joined[2], attn_mask=mask[None, None]
        )
        own = self.proj(made.transpose(0, 1).flatten(1))
        x = x + (own if self.ls1 is None else own * self.ls1)
        wide = self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))
        added: Tensor = x + (wide if self.ls2 is None else wide * self.ls2)
        return added


class PlainMiDashengLM(PlainWrapper):
    """Patches are columns of four frames; the next ones are heard by themselves after as many as have places
    in time; five states are a vector."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        text = {k: v for k, v in config["text_config"].items() if k != "model_type"}
        rope = {"rope_type": "default", "rope_theta": _RATE}
        super().__init__(config, Qwen2ForCausalLM(Qwen2Config(**text, rope_parameters=rope)))
        own = config["audio_encoder_config"]
        size, self.step = own["embed_dim"], own["patch_size"][1]
        self.longest, self.joined = own["target_length"] // self.step, config["subsample_factor"]
        self.init_bn = nn.BatchNorm2d(own["n_mels"])
        self.patch_embed = nn.Conv2d(1, size, own["patch_size"], own["patch_stride"])
        self.time_pos_embed = nn.Parameter(torch.zeros(1, size, 1, self.longest))
        self.freq_pos_embed = nn.Parameter(torch.zeros(1, size, 1, 1))
        scaled = own.get("init_values") is not None
        blocks = [PlainBlock(size, own["num_heads"], scaled) for _ in range(own["depth"])]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size, eps=1e-6)
        out = text["hidden_size"]
        self.up, self.down = nn.Linear(size * self.joined, out), nn.Linear(out, out)

    def published_name(self, name: str) -> str:
        if name.startswith("language_model."):
            return f"decoder.{name.removeprefix('language_model.')}"
        for own, theirs in (("up.", "net.0."), ("down.", "net.2.")):
            if name.startswith(own):
                return f"audio_projector.{name.replace(own, theirs, 1)}"
        name = name.replace("patch_embed.", "patch_embed.proj.")
        for own, theirs in (("qkv", "attn.qkv"), ("proj", "attn.proj"), ("fc1", "mlp.fc1"),
                            ("fc2", "mlp.fc2"), ("ls1", "ls1.gamma"), ("ls2", "ls2.gamma")):  # fmt: skip
            if name.startswith("blocks."):
                head, _, rest = name.partition(".")[2].partition(".")
                if rest.partition(".")[0] == own:
                    return f"audio_encoder.blocks.{head}.{rest.replace(own, theirs, 1)}"
        return f"audio_encoder.{name}"

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        """[vectors, size] of a recording's ``input_features`` [frames, bins]."""
        x = self.init_bn(image["input_features"].T[None, :, None]).transpose(1, 2)
        x = self.patch_embed(x)
        mask = torch.arange(x.shape[-1]) < image["num_heard"]
        made = []
        for part, heard in zip(
            torch.split(x, self.longest, -1), torch.split(mask, self.longest), strict=True
        ):
            part = part + self.time_pos_embed[..., : part.shape[-1]] + self.freq_pos_embed
            states = part.flatten(2).transpose(1, 2)[0]
            for block in self.blocks:
                states = block(states, heard)
            made.append(self.norm(states))
        states = torch.cat(made)
        kept = states[: len(states) // self.joined * self.joined]
        wide = nn.functional.gelu(self.up(kept.reshape(-1, kept.shape[1] * self.joined)))
        vectors: Tensor = self.down(wide)
        return vectors
