# ruff: noqa: E501 (rows of tables)
"""Write ``docs/supported/transformers.md`` from the table of what the transformers backend serves.

``python tools/transformers_page.py``; a test compares. ``--measure`` tries every model first and
writes the tables (``packages/models/tests/transformers_models.json``, ``transformers_image_models.json``); it needs torch, transformers and
the native kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "packages" / "models" / "tests"
MODELS = ROOT / "packages" / "models" / "src"
INTEGRATION = ROOT / "tests-integration"
TABLE = TESTS / "transformers_models.json"
IMAGE_TABLE = TESTS / "transformers_image_models.json"
PAGE = ROOT / "docs" / "supported" / "transformers.md"
SERVED = "served"

_TEXT = """# Models by the transformers backend

headrace has classes of its own for the architectures that people use most. Every other causal language
model of [transformers](https://github.com/huggingface/transformers) is run by that library's code over
headrace's paged cache, scheduler, loader and kernels (`--model-impl auto`, the default); `--model-impl
transformers` does so for any model, `--model-impl headrace` for none. It needs
`pip install 'headrace-models[transformers]'`.

A model is refused, before the port opens, where its code does not leave attention to the library's
interface, keeps a state of its own, or lets tokens meet anywhere else: requests could not share a step.
Loading tries each model for that, so a model that is not in this table is served or refused the same way.

**About as fast as a class of headrace's own where steps are captured** (on a CPU; `yes` below): torch's
additions, products and copies between the kernels are recorded as kernels of the same bits, and norms,
activations, routers and rotary tables are headrace's. A tree with an operation that is none of these runs
eagerly, with more Python between the kernels; the log names the operation. So do steps of more than the
largest captured size ([captured steps](../extending/step-graphs.md)).

**A checkpoint's own code** (`auto_map`) runs only with `--trust-remote-code`. What it must be like:

| requirement | |
|---|---|
| `config.json` | `auto_map` with `AutoModel`, and `AutoConfig` unless `model_type` is one of transformers' |
| Marker | the base class has `_supports_attention_backend = True` |
| Keyword arguments | `kwargs` flow from the base model's `forward` through every module to attention |
| Attention | looks its function up in `ALL_ATTENTION_FUNCTIONS` by `config._attn_implementation`, and passes itself, query, key, value and `kwargs` |
| Encoder-only | the attention module has `is_causal = False` |
| Positions | from `position_ids`; tokens meet in attention only |
| Tensor parallel | the config class has `base_model_tp_plan`: module names to `colwise` or `rowwise` |

Below is what transformers {version} has as causal language models, and what came of a tiny checkpoint of
each: log-probabilities within 1e-4 of transformers' own, in chunks and in batches, or the reason why not.
Captured steps gave the bits of eager ones.
"""

_IMAGES = """
## Images

Models that answer about images (`AutoModelForImageTextToText`) are run the same way: the language model over
headrace's cache, the towers by transformers' code, and prompts by the checkpoint's own processor. `--model-impl
auto` chooses this for checkpoints with a processor whose text alone has a class of headrace's (`yes` below), and
for those that have none; a model whose images have [a class of headrace's own](models.md#models-that-also-see-or-hear)
keeps it. It needs `pip install 'headrace-multimodal[transformers]'`, which brings torchvision: many processors need
that. A checkpoint's own processor code is never run.

When a checkpoint is loaded, its processor is tried on two pictures, together and alone. It is refused where the
results differ: every image is processed once, by itself, and kept. A model is refused where images go elsewhere than
into the stream of vectors: a mask that lets an image's tokens see those after them, cross-attention, features for
inner layers, places on other than one or three axes. `--limit-mm-per-prompt '{{"image": 0}}'` serves the text of such a
model where its text can be served, and loads no tower.

Towers of FastVLM and PerceptionLM are of the library timm, which is installed besides.

Below is what came of a tiny checkpoint of each in transformers {version}: text, one image, two images, and prompts in
pieces that end within an image, with log-probabilities within 1e-4 of transformers' own; or the reason why not.
One that was not tried goes through the same checks when it is loaded.
"""


def page(table: Mapping[str, object], images: Mapping[str, object], chosen: Collection[str]) -> str:
    """The page of both tables.

    Args:
        chosen: architectures that ``auto`` runs this way though their text has a class of headrace's.
    """
    return _text_part(table) + _image_part(images, chosen)


def _image_part(table: Mapping[str, object], chosen: Collection[str]) -> str:
    models = table["models"]
    assert isinstance(models, list)
    served = [row for row in models if row["result"] == SERVED]
    lines = [_IMAGES.format(version=table["transformers"])]
    lines += [f"### Images served ({len(served)})", ""]
    lines += ["| architecture | model_type | chosen in place of text alone |", "|---|---|---|"]
    for row in served:
        told = "yes" if row["architecture"] in chosen else ""
        lines.append(f"| `{row['architecture']}` | `{row['model_type']}` | {told} |")
    others = [row for row in models if row["result"] != SERVED]
    lines += ["", f"### Images not served by the backend ({len(others)})", ""]
    lines += ["Some of these have a class of headrace's own.", ""]
    lines += ["| architecture | model_type | reason |", "|---|---|---|"]
    for row in others:
        reason = row["result"].replace("|", "\\|")
        lines.append(f"| `{row['architecture']}` | `{row['model_type']}` | {reason} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """The page of the stored tables."""
    sys.path.insert(0, str(MODELS))
    from headrace_models.transformers_backend.refusals import IMAGES_SERVED

    return page(
        json.loads(TABLE.read_text()), json.loads(IMAGE_TABLE.read_text()), set(IMAGES_SERVED)
    )


def _text_part(table: Mapping[str, object]) -> str:
    models = table["models"]
    assert isinstance(models, list)
    served = [row for row in models if row["result"] == SERVED]
    others = [row for row in models if row["result"] != SERVED]
    lines = [_TEXT.format(version=table["transformers"])]
    steps = table["steps"]
    assert isinstance(steps, dict)
    captured = sum(steps[row["model_type"]] == "captured" for row in served)
    lines += [f"## Served ({len(served)}, of which {captured} with captured steps)", ""]
    lines += ["| architecture | model_type | captured |", "|---|---|---|"]
    for row in served:
        why = steps[row["model_type"]]
        told = "yes" if why == "captured" else f"no: {why}"
        lines.append(f"| `{row['architecture']}` | `{row['model_type']}` | {told} |")
    lines += ["", f"## Not served by the backend ({len(others)})", ""]
    lines += ["Some of these have a class of headrace's own.", ""]
    lines += ["| architecture | model_type | reason |", "|---|---|---|"]
    for row in others:
        reason = row["result"].replace("|", "\\|")
        lines.append(f"| `{row['architecture']}` | `{row['model_type']}` | {reason} |")
    return "\n".join(lines) + "\n"


def measure() -> None:
    """Try every model and write the table."""
    sys.path[:0] = [str(TESTS), str(INTEGRATION)]
    import captured_trees
    import every_causal_lm
    import every_image_model

    with tempfile.TemporaryDirectory() as folder:
        found = list(every_causal_lm.outcomes(Path(folder)))
        served = [outcome.model_type for outcome in found if outcome.result == SERVED]
        steps = dict(captured_trees.outcomes(Path(folder) / "captured", served))
        every_causal_lm.store(found, steps)
        every_image_model.store(list(every_image_model.outcomes(Path(folder) / "images")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="try every model first")
    if parser.parse_args(arguments).measure:
        measure()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
