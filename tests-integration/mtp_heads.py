"""Tiny checkpoints with layers for predicting further tokens (MTP), in the layouts of published ones, and
what the layers guess, computed plainly over whole sequences: their blocks are transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draft_heads import SIZE, VOCAB, Guess, Weights, draw, go_on, rms, save, states_of
from families import FAMILIES, STATE_FAMILIES, Families, save_model
from safetensors.torch import load_file
from torch import Tensor, nn

_MOE = {
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1,
}  # fmt: skip
_PLAIN = FAMILIES["llama"][1]
_NOT_LATENT = ("num_hidden_layers", "intermediate_size", "n_routed_experts", "n_group", "topk_group",
               "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")  # fmt: skip
_LATENT = {k: v for k, v in FAMILIES["deepseek_v3"][1].items() if k not in _NOT_LATENT}
MTP_FAMILIES: Families = {
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "glm4_moe": ("Glm4MoeConfig", {**_PLAIN, **_MOE, "head_dim": 16, "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**FAMILIES["deepseek_v3"][1], **_MOE}),
    "mimo": ("Qwen2Config", {**FAMILIES["qwen2"][1], "tie_word_embeddings": False}),
    "qwen3_next": STATE_FAMILIES["qwen3_next"],
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **_PLAIN,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
        },
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **_LATENT,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 112,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 48,
            "n_routed_experts": 5,
            "zero_expert_num": 3,
        },
    ),
    "pangu_ultra_moe": ("DeepseekV3Config", {**FAMILIES["deepseek_v3"][1], "n_group": 1}),
}
"""Of "mimo" and "pangu_ultra_moe", which transformers has not, the model that they were made of."""


class Layer(NamedTuple):
    """A layer for predicting further tokens, and how a family's checkpoints have it."""

    block: nn.Module
    place: str
    """Beginning of the names of the block's tensors."""
    names: tuple[str, str, str, str]
    """Modules: norm of embeddings, norm of states, what joins both, norm of the output; "": the model's."""
    rename: Callable[[str], str] = lambda name: name
    """A name within transformers' block -> as published."""
    config: dict[str, Any] = {"num_nextn_predict_layers": 1}  # noqa: RUF012
    """What the checkpoint's config says besides."""
    others: Weights = {}  # noqa: RUF012
    """Tensors that are published, and not read."""
    state_first: bool = False
    less_one: bool = False
    """Norms are stored less 1."""


def mtp(family: str, folder: Path) -> tuple[Any, Guess]:
    """A checkpoint with such a layer: the model of transformers, and what the layer guesses."""
    model = save_model(family, folder, MTP_FAMILIES)
    if family == "pangu_ultra_moe":
        _make_pangu(model, folder)
    torch.manual_seed(8)
    layer = _LAYERS.get(family, _deepseek)(model)
    with torch.no_grad():
        for key, parameter in layer.block.named_parameters():
            parameter.normal_(0.0 if layer.less_one or "norm" not in key else 1.0, 0.12)
    w = draw(7, {
        "norm.t": (SIZE,), "norm.s": (SIZE,), "join": (SIZE, 2 * SIZE), "norm.o": (SIZE,),
    })  # fmt: skip
    keys = ("norm.t", "norm.s", "join", "norm.o")
    stored = {f"{n}.weight": w[key] for n, key in zip(layer.names, keys, strict=True) if n}
    if not layer.names[3]:
        w["norm.o"] = model.model.norm.weight.detach()
    state = _as_published(layer.block.state_dict())
    stored |= {f"{layer.place}.{layer.rename(key)}": tensor for key, tensor in state.items()}
    config = json.loads((folder / "config.json").read_text())
    save(folder, config | layer.config,
         {**load_file(folder / "model.safetensors"), **stored, **layer.others})  # fmt: skip
    eps = model.config.rms_norm_eps

    def step(states: Tensor, vectors: Tensor) -> Tensor:
        more = int(layer.less_one)
        pair = [rms(vectors, w["norm.t"] + more, eps), rms(states, w["norm.s"] + more, eps)]
        x = (torch.cat(pair[::-1] if layer.state_first else pair, -1) @ w["join"].T)[None]
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        turns = model.model.rotary_emb(x, places)
        out = layer.block(x, attention_mask=mask, position_ids=places, position_embeddings=turns)
        return rms(out[0], w["norm.o"] + more, eps)

    def guess(model: Any, ids: Sequence[int], count: int) -> list[int]:
        return go_on(model, ids, count, states_of(model, ids[:-1])[0], step, model.lm_head)

    return model, guess


def _block(model: Any, index: int) -> Any:
    """A further layer of the model's own kind, with weights that say nothing yet."""
    return type(model.model.layers[index])(model.config, index).eval()


def _deepseek(model: Any, block: Any = None) -> Layer:
    """Copies of the model's table and head are published, too."""
    number = model.config.num_hidden_layers
    place = f"model.layers.{number}"
    names = tuple(f"{place}.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    copies = {f"{place}.{n}.weight": torch.zeros(VOCAB, SIZE)
              for n in ("embed_tokens", "shared_head.head")}  # fmt: skip
    return Layer(block or _block(model, number - 1), place, names, others=copies)  # type: ignore[arg-type]


def _mimo(model: Any) -> Layer:
    place = "model.mtp_layers.0"
    ends = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo",
              "num_nextn_predict_layers": 1}  # fmt: skip
    names: Any = tuple(f"{place}.{end}" for end in ends)
    return Layer(_block(model, -1), place, names, config=config, state_first=True)


def _qwen(model: Any) -> Layer:
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    attends = model.config.layer_types.index("full_attention")
    further = {"mtp.layers.1.input_layernorm.weight": torch.zeros(SIZE)}
    return Layer(_block(model, attends), "mtp.layers.0", names, others=further,
                 config={"mtp_num_hidden_layers": 2}, less_one=True)  # fmt: skip


def _ernie(model: Any) -> Layer:
    """A dense block; its output goes through the model's own norm."""
    block = _block(model, 0)
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeMLP

    block.mlp = Ernie4_5_MoeMLP(model.config)
    names = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "")
    further = {"model.mtp_emb_norm.1.weight": torch.zeros(SIZE)}
    return Layer(block, "model.mtp_block.0", names, others=further)


class _HalfLongcat(nn.Module):
    """A plain pre-norm layer of LongCat's pieces."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        whole = model.model.layers[0]
        self.input_layernorm, self.post_attention_layernorm = (
            type(model.model.norm)(SIZE, eps=model.config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = type(whole.self_attn[0])(config=model.config, layer_idx=0)
        self.mlp = type(whole.mlps[0])(model.config)

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **how)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def _longcat(model: Any) -> Layer:
    """The config need not say that there is one; a table of its own is published, too."""
    place = "model.mtp.layers.0"
    names = (f"{place}.enorm.m", f"{place}.hnorm.m", f"{place}.eh_proj", "model.mtp.norm")
    table = {"model.mtp.embed_tokens.weight": torch.zeros(VOCAB, SIZE)}
    return Layer(_HalfLongcat(model).eval(), place, names, others=table, config={},
                 rename=lambda name: name.replace("mlp.", "transformer_layer.mlp."))  # fmt: skip


def _with_sandwich(block: Any) -> Any:
    """DeepSeek's block with Pangu's norms behind its halves, drawn at random."""
    norms = [type(block.input_layernorm)(SIZE) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight, 1.0, 0.12)
    block.self_attn.o_proj = nn.Sequential(block.self_attn.o_proj, norms[0])
    block.mlp = nn.Sequential(block.mlp, norms[1])
    return block


def _as_pangu(name: str) -> str:
    """DeepSeek's name of a tensor, with those norms -> Pangu's."""
    for old, new in (
        ("post_attention_layernorm", "pre_mlp_layernorm"),
        ("self_attn.o_proj.1", "post_attention_layernorm"), ("o_proj.0", "o_proj"),
        ("mlp.1.", "post_mlp_layernorm."), ("mlp.0.", "mlp."),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def _make_pangu(model: Any, folder: Path) -> None:
    """Give the model of transformers the norms, and save it as published."""
    torch.manual_seed(4)
    for layer in model.model.layers:
        _with_sandwich(layer)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe"}
    del config["num_nextn_predict_layers"]
    tensors = _as_published(model.state_dict())
    save(folder, config, {_as_pangu(name): tensor for name, tensor in tensors.items()})


def _pangu(model: Any) -> Layer:
    """The number of layers under the first release's name."""
    layer = _deepseek(model, _with_sandwich(_block(model, model.config.num_hidden_layers - 1)))
    return layer._replace(rename=_as_pangu, config={"num_mtp_layers": 1})


_LAYERS: dict[str, Callable[[Any], Layer]] = {
    "mimo": _mimo, "qwen3_next": _qwen, "ernie4_5_moe": _ernie, "longcat_flash": _longcat,
    "pangu_ultra_moe": _pangu,
}  # fmt: skip
"""What makes a family's layer, if it is not as DeepSeek V3's."""


def _as_published(state: Weights) -> Weights:
    """Experts one by one, where transformers holds them stacked."""
    found: Weights = {}
    for key, tensor in state.items():
        base, _, last = key.rpartition(".")
        if last == "gate_up_proj" and base.endswith("experts"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{base}.{i}.gate_proj.weight": gate, f"{base}.{i}.up_proj.weight": up}
        elif last == "down_proj" and base.endswith("experts"):
            found |= {f"{base}.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            found[key] = tensor
    return {key: tensor.clone() for key, tensor in found.items()}
