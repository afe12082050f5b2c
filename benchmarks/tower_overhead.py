"""How much of a tower's time is Python: ``python benchmarks/tower_overhead.py FOLDER [--tower base ...]``.

A SigLIP tower embeds an image; then one with as many layers that has next to nothing to compute, which takes
as long as the other's Python and calls of kernels do. Times are those of one thread's processor, whatever
else runs; the checkpoints, with random weights, are made in FOLDER if they are absent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.assembly import resolve_engine, worker_factory
from headrace.engine_args import EngineArgs
from headrace_engine.startup import StartupTimeline

TEXT = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Tower:
    layers: int
    width: int
    inner: int
    heads: int
    side: int
    patch: int

    @property
    def num_patches(self) -> int:
        return (self.side // self.patch) ** 2

    def empty(self) -> Tower:
        """As many layers, of 32 numbers and four patches."""
        return Tower(self.layers, 32, 32, 2, 2 * self.patch, self.patch)


TOWERS = {
    "small": Tower(12, 384, 1536, 6, 224, 16),
    "base": Tower(12, 768, 3072, 12, 224, 16),
    "tile": Tower(12, 768, 3072, 12, 96, 16),
    "so400m": Tower(27, 1152, 4304, 16, 384, 14),
}


def checkpoint(folder: Path, tower: Tower) -> Path:
    """LLaVA's class with a decoder of one small layer."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    path = folder / f"tower-{tower.layers}-{tower.width}-{tower.num_patches}"
    if (path / "preprocessor_config.json").is_file():
        return path
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": tower.width, "image_size": tower.side,
        "intermediate_size": tower.inner, "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads, "patch_size": tower.patch,
    }  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=TEXT, image_token_index=120, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    size = {"height": tower.side, "width": tower.side}
    settings = {"image_processor_type": "SiglipImageProcessor", "size": size}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def seconds(folder: Path, tower: Tower, dtype: str, turns: int) -> float:
    """Median time of an image."""
    settings: dict[str, Any] = {
        "max_model_len": 2048,
        "skip_tokenizer_init": True,
        "num_threads": 1,
    }
    config = EngineArgs(
        model=str(checkpoint(folder, tower)), dtype=dtype, use_tqdm_on_load=False, **settings
    ).create_engine_config()
    worker = worker_factory(resolve_engine(config), StartupTimeline())()
    worker.load()
    model: Any = worker._model
    image = [{"pixel_values": torch.randn(3, tower.side, tower.side)}]
    times = []
    with torch.inference_mode():
        for _ in range(turns + 2):
            start = time.thread_time()
            list(model.embed_media("image", image))
            times.append(time.thread_time() - start)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower", nargs="+", choices=TOWERS, default=["small", "base", "tile"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args()
    for name in given.tower:
        tower = TOWERS[name]
        for dtype in given.dtype:
            whole = seconds(given.folder, tower, dtype, given.turns) * 1e3
            calls = seconds(given.folder, tower.empty(), dtype, 50) * 1e3
            print(
                f"{name}: {tower.layers} layers of {tower.width}, {tower.num_patches} patches, {dtype}: "
                f"{whole:.1f} ms, of which Python and calls {calls:.2f} ms, {calls / whole:.1%}"
            )


if __name__ == "__main__":
    main()
