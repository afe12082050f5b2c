"""A plain reading of Bagel as far as it understands: transformers' SigLIP layers over an image's patches, a
connector, and Qwen 3 (whose norms over heads Bagel has) with biases of Qwen 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace_testing.model.plain.wrapper import PlainWrapper


class PlainBagel(PlainWrapper):
    """An image is ``pixel_values`` [patches, numbers] and ``image_grid`` [2]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import (
            Qwen3Config,
            Qwen3ForCausalLM,
            SiglipVisionConfig,
            SiglipVisionModel,
        )

        text = {**config["llm_config"], "model_type": "qwen3", "attention_bias": True}
        size = text["hidden_size"]
        text["head_dim"] = size // text["num_attention_heads"]
        super().__init__(config, Qwen3ForCausalLM(Qwen3Config(**text)))
        for layer in self.language_model.model.layers:
            layer.self_attn.o_proj = nn.Linear(size, size, bias=False)
        vision = {**config["vit_config"]}
        vision["num_hidden_layers"] -= 1
        vision.pop("rope", None)
        vision |= {"vision_use_head": False, "attn_implementation": "sdpa"}
        self.tower: Any = SiglipVisionModel(SiglipVisionConfig(**vision))
        numbers, width = 3 * vision["patch_size"] ** 2, vision["hidden_size"]
        embeddings: Any = self.tower.embeddings
        embeddings.patch_embedding = nn.Linear(numbers, width)
        self.connector = nn.ModuleDict(
            {"fc1": nn.Linear(width, size), "fc2": nn.Linear(size, size)}
        )
        self.side = config["vit_max_num_patch_per_side"]
        self.places = nn.Parameter(torch.zeros(self.side**2, size))

    def embed(self, image: Mapping[str, Tensor]) -> Tensor:
        rows, columns = image["image_grid"].tolist()
        ids = torch.tensor([self.side * y + x for y in range(rows) for x in range(columns)])
        inner = self.tower.embeddings
        x = inner.patch_embedding(image["pixel_values"]) + inner.position_embedding(ids)
        x = self.tower.encoder(inputs_embeds=x[None]).last_hidden_state
        x = self.connector["fc1"](self.tower.post_layernorm(x)[0])
        x = self.connector["fc2"](functional.gelu(x, approximate="tanh"))
        made: Tensor = x + self.places[ids]
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Any:
        return SimpleNamespace(logits=self._run(input_ids, self.embeds(input_ids, images), 0))

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
        **settings: Any,
    ) -> Tensor:
        """[1, T + new tokens], the likeliest, each computed with all before it."""
        ids, embeds = input_ids, self.embeds(input_ids, images)
        for step in range(settings["max_new_tokens"]):
            chosen = self._run(input_ids, embeds, step)[:, -1:].argmax(-1)
            ids = torch.cat((ids, chosen), dim=1)
            new = self.language_model.get_input_embeddings()(chosen)
            embeds = torch.cat((embeds, new), dim=1)
        return ids

    def _run(self, input_ids: Tensor, embeds: Tensor, answered: int) -> Tensor:
        """Logits of a prompt and so many tokens of an answer."""
        tokens = [*input_ids[0].tolist(), *[-1] * answered]
        sees = torch.ones(len(tokens), len(tokens)).tril().bool()
        places: list[int] = []
        for place, (begin, end) in enumerate(self._parts(tokens)):
            sees[begin:end, begin:end] = True
            places += [place] * (end - begin)
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        made: Tensor = self.language_model(
            inputs_embeds=embeds,
            attention_mask=mask[None, None],
            position_ids=torch.tensor([places]),
            use_cache=False,
        ).logits
        return made

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Images, with a token on either side, and tokens of text."""
        at = 0
        while at < len(tokens):
            end = at + 1
            while end < len(tokens) and tokens[end] == self.image:
                end += 1
            end += end > at + 1
            yield at, end
            at = end

    def published_name(self, name: str) -> str:
        if name == "places":
            return "vit_pos_embed.pos_embed"
        return name.replace("tower.", "vit_model.vision_model.", 1)

    def save_pretrained(self, folder: Path) -> None:
        """Beside the rest, what draws: layers of its own, and another encoder in a file of its own."""
        from safetensors.torch import save_file

        super().save_pretrained(folder)
        (Path(folder) / "model.safetensors").rename(Path(folder) / "ema.safetensors")
        save_file({"decoder.conv_in.weight": torch.ones(2)}, Path(folder) / "ae.safetensors")

    def stored(self) -> dict[str, Tensor]:
        own = super().stored()
        draws = {
            name.replace(part, f"{part}_moe_gen"): torch.ones_like(tensor)
            for name, tensor in own.items()
            for part in ("q_proj", "q_norm", "input_layernorm", "mlp", "model.norm")
            if f"{part}." in name and name.startswith("language_model.")
        }
        return {**own, **draws, "time_embedder.mlp.0.weight": torch.ones(2, 2)}
