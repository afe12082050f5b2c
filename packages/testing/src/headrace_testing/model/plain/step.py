"""Plain readings of StepFun's vision models: Step3-VL 10B by transformers' tower of Step 3.7 and Qwen 3, Step
3 by the published code on that library's Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_testing.model.plain.wrapper import PlainWrapper


class PlainStep(PlainWrapper):
    """Subclasses have :attr:`projector`."""

    projector: nn.Linear

    def states(self, pictures: Tensor) -> Tensor:
        """pictures [I, 3, side, side] -> [I, vectors, size]."""
        raise NotImplementedError

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        pictures = [*image.get("tiles", ()), image["pixel_values"]]
        found = [self.projector(self.states(picture[None]))[0] for picture in pictures]
        return torch.cat(found)


class PlainStepVL(PlainStep):
    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            Qwen3Config,
            Qwen3ForCausalLM,
            Step3p7VisionConfig,
            Step3p7VisionModel,
        )

        super().__init__(config, Qwen3ForCausalLM(Qwen3Config(**config["text_config"])))
        self.tower: Any = Step3p7VisionModel(Step3p7VisionConfig(**config["vision_config"]))
        size, out = config["vision_config"]["width"], config["text_config"]["hidden_size"]
        self.projector = nn.Linear(4 * size, out, bias=config.get("projector_bias", False))

    def states(self, pictures: Tensor) -> Tensor:
        made: Tensor = self.tower(pictures).last_hidden_state
        return made

    def stored(self) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        tower = revert_weight_conversion(self.tower, self.tower.state_dict())
        return {
            **self.language_model.state_dict(),
            **{f"vision_model.{name}": tensor for name, tensor in tower.items()},
            **{f"vit_large_projector.{k}": v for k, v in self.projector.state_dict().items()},
        }


class PlainStep3VL(PlainStep):
    def __init__(self, config: Mapping[str, Any]) -> None:
        vision, text = config["vision_config"], config["text_config"]
        super().__init__(config, step3_text(text))
        size, between = vision["hidden_size"], vision["output_hidden_size"]
        self.patch, self.side = vision["patch_size"], vision["image_size"] // vision["patch_size"]
        self.conv: Any = nn.Conv2d(3, size, self.patch, self.patch)
        self.first = nn.Parameter(torch.zeros(1, size))
        self.table: Any = nn.Embedding(self.side**2 + 1, size)
        heads, inner = vision["num_attention_heads"], vision["intermediate_size"]
        number = vision["num_hidden_layers"]
        self.blocks: Any = nn.ModuleList(Block(size, heads, inner) for _ in range(number))
        step = config["understand_projector_stride"]
        self.down1: Any = nn.Conv2d(size, between, 2, step)
        self.down2: Any = nn.Conv2d(between, 2 * between, 3, 2, 1)
        self.projector = nn.Linear(2 * between, text["hidden_size"], bias=config["projector_bias"])

    def states(self, pictures: Tensor) -> Tensor:
        x = self.conv(pictures).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), 1, -1), x), dim=1)
        side = pictures.shape[-1] // self.patch
        places = self.table.weight
        if side != self.side:
            plane = places[1:].T.view(1, -1, self.side, self.side)
            plane = functional.interpolate(plane, (side, side), mode="bicubic", antialias=True)
            places = torch.cat((places[:1], plane[0].flatten(1).T))
        x = x + places
        x = torch.cat((x[:, :1], x[:, :1], x[:, :1], x), dim=1)
        for block in self.blocks:
            x = block(x)
        x = x[:, 4:].transpose(1, 2).unflatten(2, (side, side))
        return self.down2(self.down1(x)).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]

    def stored(self) -> dict[str, Tensor]:
        inner = "vision_model.embeddings"
        found = {
            f"{inner}.class_embedding": self.first,
            f"{inner}.position_embedding.weight": self.table.weight,
        }
        for part, name in (
            (self.conv, f"{inner}.patch_embedding"),
            (self.blocks, "vision_model.transformer.layers"),
            (self.down1, "vit_downsampler"),
            (self.down2, "vit_downsampler2"),
            (self.projector, "vit_large_projector"),
        ):
            found |= {f"{name}.{own}": tensor for own, tensor in part.state_dict().items()}
        return {**found, **published_step3_text(self.language_model)}


class Block(nn.Module):
    """Norms stand behind what they are of, in front of the sum."""

    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn: Any = nn.Module()
        self.self_attn.qkv_proj = nn.Linear(size, 3 * size)
        self.self_attn.out_proj = nn.Linear(size, size)
        self.mlp: Any = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(size, eps=1e-6) for _ in range(2))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        made = self.self_attn.qkv_proj(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = made.permute(2, 0, 3, 1, 4)
        share = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.layer_norm1(self.self_attn.out_proj((share @ v).transpose(1, 2).flatten(2)))
        y = self.mlp.fc1(x)
        made_: Tensor = x + self.layer_norm2(self.mlp.fc2(y * torch.sigmoid(1.702 * y)))
        return made_


def step3_text(config: Mapping[str, Any]) -> Any:
    """Llama of one key a token, whose queries are made in two steps, with mixtures in some layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    own |= {"num_key_value_heads": 1, "max_position_embeddings": config["max_position_embedding"]}
    model = LlamaForCausalLM(LlamaConfig(**own))
    hidden = config["hidden_size"]
    for index, layer in enumerate(model.model.layers):
        wide = config["num_attention_heads"] * config["head_dim"]
        layer.self_attn.q_proj = nn.Sequential(
            nn.Linear(hidden, config["share_q_dim"], bias=False),
            nn.RMSNorm(config["share_q_dim"], eps=config["rms_norm_eps"]),
            nn.Linear(config["share_q_dim"], wide, bias=False),
        )
        if str(index) in config["moe_layers_enum"].split(","):
            layer.mlp = Mixture(config)
    return model


class Mixture(nn.Module):
    """The likeliest experts, weighed as they are, and one that all tokens go to."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        number, self.top_k = config["moe_num_experts"], config["moe_top_k"]
        self.renormalises = config.get("norm_expert_weight", False)
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.moe: Any = nn.Module()
        self.moe.gate = nn.Linear(hidden, number, bias=False)
        for name, shape in (
            ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)),
        ):  # fmt: skip
            part: Any = nn.Module()
            part.weight = nn.Parameter(torch.zeros(number, *shape))
            setattr(self.moe, name, part)
        shared = config["share_expert_dim"]
        self.share_expert: Any = nn.Module()
        self.share_expert.gate_proj, self.share_expert.up_proj = (
            nn.Linear(hidden, shared, bias=False) for _ in range(2)
        )
        self.share_expert.down_proj = nn.Linear(shared, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.moe.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        if self.renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        parts = (self.moe.gate_proj, self.moe.up_proj, self.moe.down_proj)
        gate, up, down = (part.weight[chosen] for part in parts)
        made = functional.silu(gate @ x[..., None, :, None]) * (up @ x[..., None, :, None])
        mixed = ((down @ made)[..., 0] * weights[..., None]).sum(-2)
        own = self.share_expert
        return mixed + own.down_proj(functional.silu(own.gate_proj(x)) * own.up_proj(x))  # type: ignore[no-any-return]


def published_step3_text(model: Any) -> dict[str, Tensor]:
    """Its tensors under their published names."""
    steps = {"q_proj.0": "q_proj", "q_proj.1": "inter_norm", "q_proj.2": "wq",
             "mlp.moe": "moe", "mlp.share_expert": "share_expert"}  # fmt: skip
    found = {}
    for name, tensor in model.state_dict().items():
        for own, published in steps.items():
            name = name.replace(own, published)
        found[name] = tensor
    return found
