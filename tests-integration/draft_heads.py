"""Tiny heads in the layouts of published checkpoints, and what they guess, computed plainly over whole
sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

SIZE, INNER, HEADS, KV_HEADS, VOCAB, EPS = 64, 112, 4, 2, 320, 1e-5
DRAFT_VOCAB = 90
LLAMA = {
    "hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "rms_norm_eps": EPS, "hidden_act": "silu", "max_position_embeddings": 256, "rope_theta": 10000.0,
    "model_type": "llama",
}  # fmt: skip
Weights = dict[str, Tensor]
Guess = Callable[[Any, Sequence[int], int], list[int]]
"""(target of transformers, tokens, number) -> guesses."""


def draw(seed: int, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Random weights; those of norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and ("norm" in name or "ln" in name)
        else 0.15 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, width: int = SIZE) -> dict[str, tuple[int, ...]]:
    head = SIZE // HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": (SIZE, width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * head, width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * head, width),
        f"{prefix}.self_attn.o_proj.weight": (SIZE, SIZE),
        f"{prefix}.post_attention_layernorm.weight": (SIZE,),
        f"{prefix}.mlp.gate_proj.weight": (INNER, SIZE),
        f"{prefix}.mlp.up_proj.weight": (INNER, SIZE),
        f"{prefix}.mlp.down_proj.weight": (SIZE, INNER),
    }


def save(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return folder


# ---- plain pieces


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attention(x: Tensor, w: Weights, prefix: str) -> Tensor:
    """x [n, width] -> [n, SIZE]; causal, rotated by halves."""
    n, size = len(x), SIZE // HEADS
    query, key, value = (
        (x @ w[f"{prefix}.self_attn.{name}_proj.weight"].T).view(n, -1, size).transpose(0, 1)
        for name in "qkv"
    )
    turn = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([t, t], -1) for t in (turn.cos(), turn.sin()))

    def turned(y: Tensor) -> Tensor:
        low, high = y.chunk(2, -1)
        return y * cos + torch.cat([-high, low], -1) * sin

    key, value = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (turned(key), value))
    out = functional.scaled_dot_product_attention(turned(query), key, value, is_causal=True)
    return out.transpose(0, 1).reshape(n, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(x: Tensor, w: Weights, prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate) * (x @ up)) @ down


def states_of(model: Any, ids: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Last states [n, H], behind the final norm, and the stream before each layer and behind the last."""
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    with torch.no_grad():
        found = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    hook.remove()
    return found[-1][0], (*(stream[0] for stream in found[:-1]), last[0])


def go_on(
    model: Any,
    ids: Sequence[int],
    count: int,
    states: Tensor,
    layer: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> list[int]:
    """Greedy guesses of a head whose layer reads states and the embeddings of the tokens behind them.

    Args:
        states: [n - 1, W]; of all tokens but the last.
        layer: states and embeddings [m, W] -> next states [m, W].
        logits: of a state.
    """
    following, found = list(ids[1:]), list[int]()
    embed = model.get_input_embeddings()
    with torch.no_grad():
        for _ in range(count):
            out = layer(states, embed(torch.tensor(following)))
            found.append(int(logits(out[-1]).argmax()))
            states, following = torch.cat([states, out[-1:]]), [*following, found[-1]]
    return found


# ---- EAGLE


def eagle(folder: Path, *, bias: bool = False, packed: bool = False) -> Guess:
    """A head as SafeAILab publishes them, or as ``speculators`` packs them."""
    fc, layer = ("fusion_fc", "transformer") if packed else ("fc", "layers.0")
    shapes = {f"{fc}.weight": (SIZE, 2 * SIZE), **layer_shapes(layer)}
    if bias:
        shapes[f"{fc}.bias"] = (SIZE,)
    w = draw(3, shapes)
    config: dict[str, Any] = {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": bias}
    if packed:
        config = {
            "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle",
            "layernorms": False, "fusion_bias": bias, "transformer_layer_config": LLAMA,
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "speculators_config": {
                "algorithm": "eagle", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "anybody/model", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
    save(folder, config, {**w, "embed_tokens.weight": torch.zeros(VOCAB, SIZE)})

    def step(states: Tensor, vectors: Tensor) -> Tensor:
        x = torch.cat([vectors, states], -1) @ w[f"{fc}.weight"].T + w.get(f"{fc}.bias", 0.0)
        x = x + attention(x, w, layer)
        return x + mlp(rms(x, w[f"{layer}.post_attention_layernorm.weight"]), w, layer)

    def guess(model: Any, ids: Sequence[int], count: int) -> list[int]:
        states, _ = states_of(model, ids[:-1])
        return go_on(model, ids, count, states, step, model.lm_head)

    return guess


def eagle3(
    folder: Path,
    *,
    packed: bool = False,
    streams: tuple[int, ...] = (),
    normed: bool = False,
    own_table: bool = False,
    verifier: str = "anybody/model",
) -> Guess:
    """A head as SafeAILab publishes them, or as ``speculators`` packs them.

    Args:
        streams: said by the config; else the usual ones of a model of four layers.
        normed: ``norm_before_residual``.
        own_table: it has embeddings of its own.
        verifier: the model that it says it is for.
    """
    layer = "layers.0" if packed else "midlayer"
    of = streams or (2, 2, 1)
    w = draw(4, {
        "fc.weight": (SIZE, len(of) * SIZE), **layer_shapes(layer, 2 * SIZE),
        f"{layer}.input_layernorm.weight": (SIZE,), f"{layer}.hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,), "lm_head.weight": (DRAFT_VOCAB, SIZE),
    })  # fmt: skip
    ids_of = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:DRAFT_VOCAB].sort()[
        0
    ]
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids_of] = True
    maps = {"d2t": ids_of - torch.arange(DRAFT_VOCAB), "t2d": known}
    table = draw(5, {"embed_tokens.weight": (VOCAB, SIZE)}) if own_table else {}
    said: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB}
    if streams:
        said["eagle_aux_hidden_state_layer_ids"] = list(streams)
    config = {**LLAMA, **said, "architectures": ["LlamaForCausalLMEagle3"]}
    if packed:
        config = {
            **said, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "norm_before_residual": normed, "target_hidden_size": None,
            "transformer_layer_config": LLAMA,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": verifier},
            },
        }  # fmt: skip
    save(folder, config, {**w, **maps, **table})

    def step(states: Tensor, vectors: Tensor) -> Tensor:
        low = rms(states, w[f"{layer}.hidden_norm.weight"])
        pair = torch.cat([rms(vectors, w[f"{layer}.input_layernorm.weight"]), low], -1)
        x = (low if normed else states) + attention(pair, w, layer)
        return x + mlp(rms(x, w[f"{layer}.post_attention_layernorm.weight"]), w, layer)

    def logits(state: Tensor) -> Tensor:
        whole = torch.full((VOCAB,), -torch.inf)
        whole[ids_of] = rms(state, w["norm.weight"]) @ w["lm_head.weight"].T
        return whole

    def guess(model: Any, ids: Sequence[int], count: int) -> list[int]:
        _, below = states_of(model, ids[:-1])
        states = torch.cat([below[index] for index in of], -1) @ w["fc.weight"].T
        embedded = model if not table else _With(table["embed_tokens.weight"])
        return go_on(embedded, ids, count, states, step, logits)

    return guess


class _With:
    """Something with that table of embeddings."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda ids: self._table[ids]


# ---- heads without attention


def mlp_speculator(
    folder: Path, *, steps: int = 3, tied: bool = False, scaled: bool = False, inner: int = 40
) -> Guess:
    """A head as IBM publishes them; tied ones list each tensor as often as there are steps."""
    own = 1 if tied else steps
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(own):
        shapes |= {
            f"emb.{i}.weight": (VOCAB, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,),
            f"head.{i}.weight": (VOCAB, inner),
        }  # fmt: skip
    for i in range(min(2, steps) if tied else steps):
        shapes[f"proj.{i}.weight"] = (inner, inner if i else SIZE)
    w = draw(6, shapes)
    if tied:
        for i in range(1, steps):
            w |= {f"{n}.{i}.{k}": w[f"{n}.0.{k}"].clone() for n, k in (
                ("emb", "weight"), ("ln", "weight"), ("ln", "bias"), ("head", "weight"))}  # fmt: skip
            w[f"proj.{i}.weight"] = w["proj.1.weight"].clone()
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "n_predict": steps, "inner_dim": inner, "emb_dim": SIZE, "vocab_size": VOCAB,
        "tie_weights": tied, "scale_input": scaled, "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
    }  # fmt: skip
    save(folder, config, {f"speculator.{name}": tensor for name, tensor in w.items()})

    def guess(model: Any, ids: Sequence[int], count: int) -> list[int]:
        state = states_of(model, ids[:-1])[0][-1]
        if scaled:
            state = rms(state, eps=1e-6) / 2**0.5
        token, found = ids[-1], list[int]()
        weight = 0.5 ** (0.5 / steps)
        share = ((1 - weight**2) * inner / 2) ** 0.5 / weight
        for i in range(min(count, steps)):
            state = w[f"proj.{i}.weight"] @ state + share * w[f"emb.{i}.weight"][token]
            state = functional.gelu(rms(state, w[f"ln.{i}.weight"], 1e-6) + w[f"ln.{i}.bias"])
            token = int((w[f"head.{i}.weight"] @ state).argmax())
            found.append(token)
        return found

    return guess


def medusa(folder: Path, *, heads: int = 3, blocks: int = 1, published: bool = True) -> Guess:
    """Heads as FasterDecoding publishes them, or as ``model_type: medusa`` has them."""
    w: Weights = {}
    for i in range(heads):
        for j in range(blocks):
            name = f"{i}.{j}.linear" if published else f"blocks.{i}.layers.{j}"
            w |= draw(10 * i + j, {f"{name}.weight": (SIZE, SIZE), f"{name}.bias": (SIZE,)})
        name = f"{i}.{blocks}.weight" if published else f"lm_heads.{i}.weight"
        w |= draw(90 + i, {name: (VOCAB, SIZE)})
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
    if not published:
        config = {
            "model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": heads,
            "num_hidden_layers": blocks, "truncated_vocab_size": VOCAB, "medusa_fc_bias": True,
        }  # fmt: skip
    save(folder, config, w)

    def guess(model: Any, ids: Sequence[int], count: int) -> list[int]:
        state, found = states_of(model, ids[:-1])[0][-1], list[int]()
        for i in range(min(count, heads)):
            x = state
            for j in range(blocks):
                name = f"{i}.{j}.linear" if published else f"blocks.{i}.layers.{j}"
                x = x + functional.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
            matrix = w[f"{i}.{blocks}.weight" if published else f"lm_heads.{i}.weight"]
            found.append(int((matrix @ x).argmax()))
        return found

    return guess
