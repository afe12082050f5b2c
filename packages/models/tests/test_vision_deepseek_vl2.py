"""DeepSeek-VL2 beside a plain reading of the published model, on transformers' SigLIP and DeepSeek-V2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor, nn
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

SIDE, PATCH, WIDTH, RATIO = 34, 6, 24, 1.72
"""Five patches of a row, so that the last vectors have zeros, and pixels that are left."""
MIXTURE: dict[str, Any] = {
    **TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
LATENT = {"architectures": ["DeepseekV2ForCausalLM"], "use_mla": True}
NAMES = {
    "norm1": "layer_norm1", "attn.proj": "self_attn.out_proj", "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip


class PlainDeepseekVL2(nn.Module):
    """Wu et al. 2024, arXiv:2412.10302, section 2, as its published code reads."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM, SiglipVisionConfig, SiglipVisionModel

        super().__init__()
        self.config = config
        vision = SiglipVisionConfig(
            hidden_size=WIDTH, intermediate_size=int(WIDTH * RATIO), num_hidden_layers=2,
            num_attention_heads=2, image_size=SIDE, patch_size=PATCH, vision_use_head=False,
        )  # fmt: skip
        self.tower = SiglipVisionModel(vision)
        self.language = AutoModelForCausalLM.from_config(config)
        size = config.hidden_size
        self.up, self.down = nn.Linear(4 * WIDTH, size), nn.Linear(size, size)
        self.newline, self.separator = (nn.Parameter(torch.empty(size)) for _ in range(2))

    def vectors(self, pixels: Tensor, grid: Tensor) -> Tensor:
        states = self.tower(pixels).last_hidden_state.view(len(pixels), 5, 5, WIDTH)
        wide = nn.functional.pad(states, (0, 0, 0, 1, 0, 1))
        units = wide.view(-1, 3, 2, 3, 2, WIDTH).permute(0, 1, 3, 5, 2, 4).flatten(3)
        made = self.down(nn.functional.gelu(self.up(units)))
        columns, rows = grid.tolist()
        found = [self._lines(made[0]), self.separator[None]]
        lines = [
            torch.cat([made[1 + row * columns + column] for column in range(columns)], dim=1)
            for row in range(rows)
        ]
        return torch.cat([*found, self._lines(torch.cat(lines))])

    def _lines(self, plane: Tensor) -> Tensor:
        return torch.cat([torch.cat((line, self.newline[None])) for line in plane])

    def forward(self, input_ids: Tensor, images: Sequence[Any] = (), **_: Any) -> Any:
        embeds = self.language.get_input_embeddings()(input_ids)
        if images:
            vectors = torch.cat([self.vectors(*image) for image in images])
            embeds[input_ids == IMAGE] = vectors
        return self.language(inputs_embeds=embeds)


class TestDeepseekVL2(VisionConformance):
    """The rest of a tile's rows are zeros; latent attention."""

    router: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        return PlainDeepseekVL2

    def hf_config(self) -> Any:
        from transformers import DeepseekV2Config

        return DeepseekV2Config(**MIXTURE)

    def save(self, reference: Any, folder: Path) -> None:
        """With the names and the config as published."""
        reference.language.save_pretrained(folder)
        text = load_file(folder / "model.safetensors")
        made = {f"language.{name}": tensor for name, tensor in text.items()}
        for own, theirs in (("up", "layers.0"), ("down", "layers.2")):
            for kind, tensor in getattr(reference, own).state_dict().items():
                made[f"projector.{theirs}.{kind}"] = tensor
        made |= {
            "image_newline": reference.newline.data,
            "view_seperator": reference.separator.data,
        }
        made |= {f"vision.{name}": tensor for name, tensor in timms(reference.tower).items()}
        save_file({k: v.contiguous() for k, v in made.items()}, folder / "model.safetensors")
        whole = {
            "architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2",
            "language_config": {**MIXTURE, "model_type": "deepseek_v2", **LATENT, **self.router},
            "projector_config": {"input_dim": WIDTH, "n_embed": 48, "model_type": "mlp_projector"},
            "tile_tag": "2D", "global_view_pos": "head", "candidate_resolutions": [[SIDE, SIDE]],
            "vision_config": {
                "image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "layers": 2, "heads": 2,
                "mlp_ratio": RATIO, "model_type": "vision", "model_name": "siglip_so400m_patch14_384",
            },
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(whole))

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(columns, 1 + columns * rows, 3, SIDE, SIDE),
                "patches_grid": torch.tensor([columns, rows]),
            }
            for columns, rows in ((3, 2), (1, 1))
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": [(image["pixel_values"], image["patches_grid"]) for image in images]}

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"tile_tag": "1D"}, "tile_tag = '1D'"),
            ({"global_view_pos": "tail"}, "global_view_pos = 'tail'"),
            ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_type = 'mlp_gelu'"),
            ({"projector_config": {"depth": 3}}, "depth = 3"),
            ({"vision_config": {"class_token": True}}, "class_token = True"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, **change))


class TestDeepseekVL2Base(TestDeepseekVL2):
    """The largest one, whose experts are chosen as V3's are."""

    router: ClassVar = {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
    }  # fmt: skip

    def hf_config(self) -> Any:
        from transformers import DeepseekV3Config

        return DeepseekV3Config(**{**MIXTURE, **self.router})


def timms(tower: Any) -> dict[str, Tensor]:
    """SigLIP's tensors by their names in timm."""
    own = {name.removeprefix("vision_model."): t for name, t in tower.state_dict().items()}
    made = {
        "pos_embed": own["embeddings.position_embedding.weight"][None],
        "attn_pool.latent": torch.zeros(1, 1, WIDTH),
    }
    for kind in ("weight", "bias"):
        made[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embedding.{kind}"]
        made[f"norm.{kind}"] = own[f"post_layernorm.{kind}"]
        for index in range(2):
            block, inner = f"blocks.{index}", f"encoder.layers.{index}"
            parts = [own[f"{inner}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            made[f"{block}.attn.qkv.{kind}"] = torch.cat(parts)
            for theirs, name in NAMES.items():
                made[f"{block}.{theirs}.{kind}"] = own[f"{inner}.{name}.{kind}"]
    return made
