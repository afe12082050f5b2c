"""A checkpoint that brings its own code: a small decoder, written as the backend wants it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace_testing.model.decoders import randomise

CONFIG = {
    "architectures": ["TinyForCausalLM"], "model_type": "tiny_of_its_own", "vocab_size": 97,
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "eos_token_id": 2, "tie_word_embeddings": False,
    "auto_map": {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"},
}  # fmt: skip

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_of_its_own"
    base_model_tp_plan = {
        "layers.*.attn.q": "colwise", "layers.*.attn.k": "colwise", "layers.*.attn.v": "colwise",
        "layers.*.attn.o": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise",
    }
    vocab_size: int = 97
    hidden_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 64


class TinyAttention(nn.Module):
    is_causal = True

    def __init__(self, config, index):
        super().__init__()
        self.config, self.layer_idx = config, index
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim)
        self.k = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.v = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.o = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size)

    def forward(self, x, attention_mask=None, **kwargs):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.o(out.reshape(*x.shape[:-1], -1))


class TinyLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.attn = TinyAttention(config, index)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 40)
        self.down = nn.Linear(40, config.hidden_size)

    def forward(self, x, **kwargs):
        x = x + self.attn(self.norm(x), **kwargs)
        return x + self.down(torch.tanh(self.up(x)))


class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        x = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=attention_mask, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=x)
"""


class Written:
    """A folder with code, config and weights, and what the model computes.

    Args:
        changes: pieces of :data:`CODE` -> what stands there instead.
        config: over :data:`CONFIG`.
    """

    def __init__(
        self,
        folder: Path,
        changes: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.config = {**CONFIG, **(config or {})}
        code = CODE
        for old, new in (changes or {}).items():
            assert old in code, old
            code = code.replace(old, new)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "modeling_tiny.py").write_text(code)
        self.model, self.head = self._made()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors["lm_head.weight"] = self.head.weight.detach()
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")

    def _made(self) -> tuple[Any, nn.Linear]:
        """From the unchanged code, so that what the changed one lacks does not matter."""
        source = self.folder / "reference.txt"
        source.write_text(CODE)
        loader = importlib.machinery.SourceFileLoader("written_model", str(source))
        spec = importlib.util.spec_from_loader("written_model", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        config = module.TinyConfig(**{k: v for k, v in self.config.items() if k != "auto_map"})
        model = module.TinyModel._from_config(config, attn_implementation="eager").float().eval()
        randomise(model)
        head = nn.Linear(48, 97, bias=False)
        randomise(head, 1)
        return model, head

    def logprobs(self, tokens: list[int]) -> Tensor:
        """[len(tokens), V]."""
        count = len(tokens)
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        with torch.inference_mode():
            states = self.model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.arange(count)[None],
                attention_mask=mask,
            ).last_hidden_state[0]
            return self.head(states).log_softmax(-1)
