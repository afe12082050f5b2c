"""A plain reading of Kanana-V, which transformers does not have: its tower is that library's Qwen2-VL, its
projector is written by the published code and by timm's RegNet, in front of that library's Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace_testing.model.plain.wrapper import PlainWrapper


class ChannelNorm(nn.LayerNorm):
    """Of each place's channels [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Joined(nn.Module):
    """Convolution and norm, by the names of timm."""

    def __init__(self, before: int, after: int, side: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, side, padding=side // 2, groups=groups, bias=False)
        self.bn = ChannelNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.bn(self.conv(x))
        return found


class Squeeze(nn.Module):
    """Channels are weighed by what their means say."""

    def __init__(self, size: int, between: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(size, between, 1), nn.Conv2d(between, size, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        found: Tensor = x * torch.sigmoid(self.fc2(nn.functional.silu(self.fc1(means))))
        return found


class Bottleneck(nn.Module):
    """RegNet's, with a ratio of one and groups of one channel."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Joined(before, after), Joined(after, after, 3, after)
        self.se = Squeeze(after, round(before * 0.25))
        self.conv3 = Joined(after, after)
        self.downsample = Joined(before, after) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        act = nn.functional.silu
        made = self.conv3(self.se(act(self.conv2(act(self.conv1(x))))))
        found: Tensor = act(made + self.downsample(x))
        return found


class Stage(nn.Module):
    """``b1``, ``b2`` ..."""

    def __init__(self, depth: int, before: int, after: int) -> None:
        super().__init__()
        for index in range(depth):
            self.add_module(f"b{index + 1}", Bottleneck(after if index else before, after))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class PlainKananaV(PlainWrapper):
    """See the module. ``hidden_states[-1]`` of the tower is what its last block makes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VisionTransformerPretrainedModel,
        )

        text = {k: v for k, v in config["text_config"].items() if k != "model_type"}
        super().__init__(config, LlamaForCausalLM(LlamaConfig(**text)))
        stated = {k: v for k, v in config["vision_config"].items() if k != "model_type"}
        vision = Qwen2VLVisionConfig(**stated)
        vision._attn_implementation = "sdpa"
        self.vision_model: Any = Qwen2VisionTransformerPretrainedModel(vision)
        own = config["projector_config"]
        size, inner, out = stated["embed_dim"], own["hidden_size"], own["output_hidden_size"]
        self.merge = own["merge_size"]
        self.abstractor: Any = nn.Module()
        self.abstractor.pos_emb = nn.Parameter(torch.zeros(1, own["pos_emb_size"], size))
        stages = Stage(own["depth"], size, inner), Stage(own["depth"], self.merge**2 * inner, inner)
        self.abstractor.net = nn.ModuleList([stages[0], nn.Identity(), stages[1]])
        self.abstractor.readout = nn.Sequential(
            nn.Linear(inner, out), nn.SiLU(), nn.Linear(out, out)
        )

    def stored(self) -> dict[str, Tensor]:
        """Without the tower's merger, which the published model does not have."""
        made = super().stored()
        return {k: v for k, v in made.items() if not k.startswith("vision_model.merger.")}

    def states(self, image: Mapping[str, Tensor]) -> Tensor:
        """[patches, size], in the order in which the tower has them."""
        found: list[Any] = []
        last = self.vision_model.blocks[-1]
        hook = last.register_forward_hook(lambda _, __, made: found.append(made))
        self.vision_model(image["pixel_values"], grid_thw=image["image_grid_thw"][None])
        hook.remove()
        made: Tensor = found[0][0] if isinstance(found[0], tuple) else found[0]
        return made

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        _, rows, columns = image["image_grid_thw"].tolist()
        states, table = self.states(image), self.abstractor.pos_emb
        side = int(table.shape[1] ** 0.5)
        if not rows == columns == side:
            plane = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
            plane = nn.functional.interpolate(
                plane, size=(rows, columns), mode="bicubic", antialias=True
            )
            table = plane.permute(0, 2, 3, 1).reshape(1, rows * columns, -1)
        x = (states + table[0]).view(1, rows, columns, -1).permute(0, 3, 1, 2)
        x = self.abstractor.net[0](x)
        high, wide = rows // self.merge, columns // self.merge
        x = x.reshape(1, -1, high, self.merge, wide, self.merge)
        x = x.permute(0, 1, 3, 5, 2, 4).reshape(1, -1, high, wide)
        x = self.abstractor.net[2](x)
        vectors: Tensor = self.abstractor.readout(x.permute(0, 2, 3, 1).reshape(high * wide, -1))
        return vectors
