"""Kimi K2.5 over a socket, from a folder whose tokenizer is a ``tiktoken.model``, as it is published: chats
with images against transformers' tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import data_url, picture
from posted import post, stream
from servers import RunningServer, serving

from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for
from headrace_testing.model.decoders import randomise

PATCH, NUM_TOKENS = 4, 6
NAMES = ("[BOS]", "[EOS]", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
IDS = {name: 300 + index for index, name in enumerate(NAMES)}
"""With a gap behind the bytes, as reserved tokens leave one."""
MARK = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image_url' in part %}"
    + MARK
    + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
CODE = (
    'import not_there\n\nclass Own:\n    pat_str = "|".join([r"[\\p{Han}]+", r"\\s+", r"\\S+"])\n'
)
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "num_experts_per_tok": 2, "pad_token_id": None,
    "bos_token_id": IDS["[BOS]"], "eos_token_id": IDS["[EOS]"],
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "pos_emb_height": 5, "pos_emb_width": 5, "patch_size": PATCH,
}  # fmt: skip


def save(folder: Path) -> Any:
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = Kimi_K25Config(
        vision_config=VISION, text_config=TEXT, projection_hidden_size=32, tie_word_embeddings=False,
        image_token_id=IDS["<|media_pad|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Kimi_K25ForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text(CODE)
    added = {str(index): {"content": name, "special": True} for name, index in IDS.items()}
    words = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]",
             "auto_map": {"AutoTokenizer": ["tokenization_kimi.Own", None]}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"patch_size": PATCH, "in_patch_limit": 128, "merge_kernel_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": settings}))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("kimi")
    return folder, save(folder)


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, Any]) -> Iterator[RunningServer]:
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(checkpoint[0]), *words, "--served-model-name", "kimi") as running:
        yield running


def expected(checkpoint: tuple[Path, Any], parts: Sequence[str | int]) -> tuple[str, int]:
    """What transformers' model says of texts and numbered pictures; and the prompt's tokens."""
    folder, oracle = checkpoint
    config = json.loads((folder / "config.json").read_text())
    processor = processor_for("KimiK25ForConditionalGeneration", config, folder)
    pictures = [np.asarray(picture(part)) for part in parts if isinstance(part, int)]
    media = processor.process([MediaItem("image", x, "", {}) for x in pictures], {})
    begin, content, pad, end = (IDS[name] for name in NAMES[2:])
    mark = [begin, *b"image", content, pad, end]
    ids = [token for part in parts for token in (mark if isinstance(part, int) else part.encode())]
    tokens = torch.tensor([processor.place(ids, media).token_ids])
    given: dict[str, Any] = {}
    if media:
        arrays = [
            {
                name: np.frombuffer(x.data, x.dtype).reshape(x.shape)
                for name, x in one.inputs.items()
            }
            for one in media
        ]
        pixels = np.concatenate([one["pixel_values"] for one in arrays])
        given["pixel_values"] = torch.tensor(pixels).view(-1, 3, PATCH, PATCH)
        grids = [[1, *one["image_grid_hws"].tolist()] for one in arrays]
        given["image_grid_thw"] = torch.tensor(grids)
    out = oracle.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
        max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, **given,
    )  # fmt: skip
    said = [token for token in out[0, tokens.shape[1] :].tolist() if token < 256]
    return bytes(said).decode(errors="replace"), tokens.shape[1]


def body(parts: Sequence[str | int]) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture(part))}}
        if isinstance(part, int)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"model": "kimi", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": NUM_TOKENS, "ignore_eos": True}  # fmt: skip


def test_chats_with_images(server: RunningServer, checkpoint: tuple[Path, Any]) -> None:
    url = f"{server.api}/chat/completions"
    found = []
    for parts in (["the ", 1, " water"], [1, "runs ", 2], ["in the race"]):
        text, count = expected(checkpoint, parts)
        made = post(url, body(parts))
        assert made["choices"][0]["message"]["content"] == text
        assert made["usage"]["prompt_tokens"] == count
        events = stream(url, body(parts))
        pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
        assert "".join(pieces) == text
        found.append(text)
    assert len(set(found)) == 3
    wrong = body(["the ", 1])
    data = base64.b64encode(b"a text that is called x.png").decode()
    wrong["messages"][0]["content"][1]["image_url"]["url"] = f"data:image/png;base64,{data}"
    answer = httpx2.post(url, json=wrong, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    assert post(url, body(["in the race"]))["choices"][0]["message"]["content"] == found[-1]
