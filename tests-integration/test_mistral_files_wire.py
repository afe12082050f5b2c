"""Mistral's own files of a model that sees (params.json, consolidated.safetensors, tekken.json), in the whole
engine and over a socket, against transformers' class of the same weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_checkpoints import CHAT, TEXT, data_url, picture
from posted import post, stream
from servers import serving
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams
from headrace_core.multimodal import MediaItem
from headrace_models.formats.mistral_config import mistral_config
from headrace_models.formats.tekken import tekken_tokenizer
from headrace_multimodal import processor_for
from headrace_testing.model.decoders import randomise
from headrace_testing.model.published_mistral import save_published

NAME = "PixtralForConditionalGeneration"
NUM_TOKENS = 6
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
MERGES: dict[str, Any] = {
    "adapter_bias": False, "mm_projector_id": "patch_merge", "spatial_merge_size": 2,
    "add_pre_mm_projector_layer_norm": True,
}  # fmt: skip


def save_tekken(folder: Path) -> None:
    """All bytes and a few of their pairs, behind twenty control tokens; and a template."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"er", b"in"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    config = {
        "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + 20, "default_num_special_tokens": 20, "version": "v3",
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT.replace("MARK", "[IMG]"))


def save(folder: Path, merge: bool) -> Any:
    """Images of up to 64 pixels of a side, a vector for each patch of 8 by 8, or for four of these. Returns
    the model that is the oracle."""
    import transformers

    save_tekken(folder)
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "hidden_act": "silu",
    }  # fmt: skip
    text = {**TEXT, "model_type": "mistral", "eos_token_id": 2, "bos_token_id": 1, "head_dim": 16,
            "rms_norm_eps": 1e-5, "vocab_size": 281}  # fmt: skip
    own = {"spatial_merge_size": 2} if merge else {"vision_feature_select_strategy": "full"}
    kind = "Mistral3" if merge else "Llava"
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision,
        text_config=text,
        image_token_index=10,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **own,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model)
    save_published(model, folder, image_token=10, **(MERGES if merge else {}))
    return model


def expected(folder: Path, oracle: Any, parts: Sequence[str | int]) -> tuple[list[int], list[int]]:
    """Tokens of a prompt of texts and numbered pictures, and those that follow."""
    tokenizer = Tokenizer.from_str(tekken_tokenizer(folder / "tekken.json").tokenizer)
    text = "".join("[IMG]" if isinstance(part, int) else part for part in parts)
    processor = processor_for(NAME, mistral_config(folder), folder)
    items = [np.asarray(picture(part)) for part in parts if isinstance(part, int)]
    media = processor.process([MediaItem("image", item, "", {}) for item in items], {})
    ids = [1, *tokenizer.encode(text, add_special_tokens=False).ids]
    placed = list(processor.place(ids, media).token_ids)
    given: dict[str, Any] = {}
    if media:
        packed = [one.inputs["pixel_values"] for one in media]
        pixels = [torch.tensor(np.frombuffer(x.data, x.dtype).reshape(x.shape)) for x in packed]
        sizes = [tuple(x.shape[1:]) for x in pixels]
        whole = torch.zeros(len(pixels), 3, *map(max, zip(*sizes, strict=True)))
        for own, (height, width), into in zip(pixels, sizes, whole, strict=True):
            into[:, :height, :width] = own
        given = {"pixel_values": whole, "image_sizes": torch.tensor(sizes)}
    tokens = torch.tensor([placed])
    out = oracle.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
        max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, **given,
    )  # fmt: skip
    return placed, out[0, len(placed) :].tolist()


PROMPTS: list[list[str | int]] = [["the ", 1, " water"], [1, "in ", 2], ["in the race"]]


@pytest.mark.parametrize("merge", [False, True])
def test_prompts_in_the_whole_engine(merge: bool, tmp_path: Path) -> None:
    """Together, in chunks that end within an image, and from caches."""
    oracle = save(tmp_path, merge)
    wanted = [expected(tmp_path, oracle, parts)[1] for parts in PROMPTS]
    prompts = []
    for parts in PROMPTS:
        images = [picture(part) for part in parts if isinstance(part, int)]
        text = "".join("[IMG]" if isinstance(part, int) else part for part in parts)
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}} if images else text)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for more in ({}, {"max_num_batched_tokens": 13}):
        with LLM(str(tmp_path), **{**SETTINGS, **more}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


def test_chats_over_a_socket(tmp_path: Path) -> None:
    oracle = save(tmp_path, True)
    tokenizer = Tokenizer.from_str(tekken_tokenizer(tmp_path / "tekken.json").tokenizer)
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(tmp_path), *words, "--served-model-name", "eyes") as server:
        url = f"{server.api}/chat/completions"
        for parts in PROMPTS:
            ids, wanted = expected(tmp_path, oracle, ["user: ", *parts, "assistant:"])
            content = [
                {"type": "image_url", "image_url": {"url": data_url(picture(part))}}
                if isinstance(part, int)
                else {"type": "text", "text": part}
                for part in parts
            ]
            body = {"model": "eyes", "messages": [{"role": "user", "content": content}],
                    "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}  # fmt: skip
            made = post(url, body)
            text = tokenizer.decode(wanted)
            assert made["choices"][0]["message"]["content"] == text
            assert made["usage"]["prompt_tokens"] in (len(ids), len(ids) - 1)
            events = stream(url, body)
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == text
