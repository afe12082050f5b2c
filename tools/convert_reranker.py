"""Make a sequence classifier of a language model that reranks.

    python tools/convert_reranker.py --model_name Qwen3-Reranker-0.6B --path Qwen3-Reranker-0.6B-seq-cls \
        --classifier_from_tokens '["no", "yes"]' --method from_2_way_softmax

The new checkpoint needs no overrides to score with. Its classifier is made of rows of the language
model's head, as serving with ``classifier_from_token`` makes it; the other weights are copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace_core.config import LoadConfig
from headrace_core.errors import HeadraceError
from headrace_models.checkpoint.vocabulary import token_ids
from headrace_models.config.json_object import read_object
from headrace_models.formats.index import INDEX, SINGLE, checkpoint_headers
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_models.reranker import METHODS, TokenClassifier, token_classifier

ENDS = ("ForCausalLM", "LMHeadModel")
SCORE_FILE = "model-score.safetensors"
FIRST_FILE = "model-00001-of-00001.safetensors"
TABLES = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight",
          "transformer.wte.weight", "wte.weight")  # fmt: skip
"""Where the head's rows may be: the head itself, else the embedding that it is tied to."""


def convert(
    source: Path,
    target: Path,
    tokens: Sequence[str],
    method: str,
    *,
    use_pad_token: bool = False,
) -> None:
    """Write the classifier to ``target``, which must not exist.

    Raises:
        HeadraceError: the model or the tokens do not fit.
        FileExistsError: ``target`` exists.
    """
    config = read_object(source / "config.json", required=True)
    asked = token_classifier({"classifier_from_token": list(tokens), "method": method})
    assert asked is not None
    ids = token_ids(source, asked.tokens, setting="classifier_from_tokens")
    weight = classifier(source, ids, asked)
    changes = classifier_config(config, asked)
    if use_pad_token:
        changes |= {"use_pad_token": True, "pad_token_id": pad_token_id(source, config)}
    shutil.copytree(source, target)
    kept = {k: v for k, v in config.items() if k not in ("classifier_from_token", "method")}
    write_json(target / "config.json", {**kept, **changes})
    add_weight(target, weight)


def classifier(source: Path, ids: Sequence[int], asked: TokenClassifier) -> torch.Tensor:
    """[labels, H] float32."""
    headers = checkpoint_headers(source)
    names = {entry.name for entries in headers.values() for entry in entries}
    wanted = next((name for name in TABLES if name in names), None)
    if wanted is None:
        raise HeadraceError(f"{source}: has no language-model head: none of {', '.join(TABLES)}")
    for name, tensor, _ in SafetensorsFormat(LoadConfig()).tensors(source):
        if name == wanted:
            rows = tensor[list(ids)].float()
            return rows[1:] - rows[:1] if asked.difference else rows
    raise AssertionError(wanted)


def classifier_config(config: dict[str, Any], asked: TokenClassifier) -> dict[str, Any]:
    """What ``config.json`` says of the new architecture."""
    listed = config.get("architectures") or [""]
    architecture = str(listed[0])
    stem = next((architecture.removesuffix(e) for e in ENDS if architecture.endswith(e)), None)
    if stem is None:
        raise HeadraceError(f"architectures = {listed!r}: must be a language model (...{ENDS[0]})")
    names = ("score",) if asked.difference else tuple(map(str, asked.tokens))
    return {
        "architectures": [f"{stem}ForSequenceClassification"],
        "num_labels": asked.num_labels,
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def pad_token_id(source: Path, config: dict[str, Any]) -> int:
    """The config's, else the one that the tokenizer names."""
    stated = config.get("pad_token_id")
    if isinstance(stated, int):
        return stated
    named = read_object(source / "tokenizer_config.json", required=False).get("pad_token")
    token = named.get("content") if isinstance(named, dict) else named
    if not isinstance(token, str):
        raise HeadraceError(
            f"{source}: neither config.json nor tokenizer_config.json has a pad token"
        )
    return token_ids(source, [token], setting="pad_token")[0]


def add_weight(folder: Path, weight: torch.Tensor) -> None:
    """Put ``score.weight`` into a file of its own, so that no other file is rewritten."""
    if (folder / SINGLE).is_file():  # would hide an index
        (folder / SINGLE).rename(folder / FIRST_FILE)
    placed = {
        entry.name: file.name
        for file, entries in checkpoint_headers(folder).items()
        for entry in entries
    }
    save_file({"score.weight": weight.contiguous()}, folder / SCORE_FILE, metadata={"format": "pt"})
    write_json(
        folder / INDEX, {"metadata": {}, "weight_map": {**placed, "score.weight": SCORE_FILE}}
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model_name", required=True, type=Path, help="folder of the checkpoint")
    parser.add_argument("--path", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--classifier_from_tokens",
        type=json.loads,
        default=["Yes"],
        help='JSON list of tokens; with two classes false, then true (default: ["Yes"])',
    )
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument(
        "--use-pad-token",
        action="store_true",
        help="write use_pad_token and pad_token_id to the config",
    )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    try:
        convert(
            options.model_name,
            options.path,
            options.classifier_from_tokens,
            options.method,
            use_pad_token=options.use_pad_token,
        )
    except (HeadraceError, FileExistsError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
