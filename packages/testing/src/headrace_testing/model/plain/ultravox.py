"""A plain reading of Ultravox, which transformers does not have, on that library's Whisper and language
models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import WhisperForConditionalGeneration


class PlainUltravox(nn.Module):
    """The published classes, in few words.

    Args:
        whisper, text: configs of the tower and of the language model.
        group: states that are a vector together.
        ends: whether the second norm is the last thing, as until version 0.4.1.
    """

    def __init__(self, whisper: Any, text: Any, group: int, ends: bool) -> None:
        super().__init__()
        self.group, self.ends, self.window = group, ends, 2 * whisper.max_source_positions
        self.whisper = WhisperForConditionalGeneration(whisper)
        self.language_model = AutoModelForCausalLM.from_config(text)  # type: ignore[no-untyped-call]
        size, wide, out = group * whisper.d_model, 20, text.hidden_size
        self.projector = nn.ModuleDict({
            "ln_pre": LlamaRMSNorm(size, eps=1e-6),
            "linear_1": nn.Linear(size, wide, bias=False),
            "linear_2": nn.Linear(wide // 2, out, bias=False),
            "ln_post" if ends else "ln_mid": LlamaRMSNorm(out if ends else wide // 2, eps=1e-6),
        })  # fmt: skip

    def get_input_embeddings(self) -> Any:
        return self.language_model.get_input_embeddings()

    def forward(self, **given: Any) -> Any:
        return self.language_model(**given)

    def heard(self, frames: Tensor) -> Tensor:
        """frames [F, bins] -> vectors."""
        found = []
        for begin in range(0, len(frames), self.window):
            window = frames[begin : begin + self.window]
            length, more = len(window), self.window - len(window) if begin else 0
            states = self.states(functional.pad(window, (0, 0, 0, more)), (length - 1) // 2 + 1)
            stacked = functional.pad(states, (0, 0, 0, -len(states) % self.group))
            stacked = stacked.view(-1, self.group * states.shape[1])
            found.append(self.projected(stacked)[: -(-length // (2 * self.group))])
        return torch.cat(found)

    def states(self, window: Tensor, seen: int) -> Tensor:
        encoder = self.whisper.model.encoder
        x = functional.gelu(encoder.conv1(window.t()[None]))
        x = functional.gelu(encoder.conv2(x)).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        hidden = torch.arange(x.shape[1]) >= seen
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(hidden, -1e30)[None, None]
        for layer in encoder.layers:
            made = layer(x, mask)
            x = made[0] if isinstance(made, tuple) else made
        found: Tensor = encoder.layer_norm(x)[0]
        return found

    def projected(self, stacked: Tensor) -> Tensor:
        own = self.projector
        made, gate = own["linear_1"](own["ln_pre"](stacked)).chunk(2, dim=-1)
        x = functional.silu(gate) * made
        x = own["linear_2"](x if self.ends else own["ln_mid"](x))
        found: Tensor = own["ln_post"](x) if self.ends else x
        return found


def tower(reference: Any) -> dict[str, Tensor]:
    return {
        f"audio_tower.{name}": tensor
        for name, tensor in reference.whisper.model.encoder.state_dict().items()
    }


def projector(reference: Any) -> dict[str, Tensor]:
    return {
        f"multi_modal_projector.{name}": tensor
        for name, tensor in reference.projector.state_dict().items()
    }
