"""Time to the first token of a prompt with one image: ``python benchmarks/images.py --help``.

Engines run one at a time, in turn, each in the Python of its own environment; every image is new, so that
nothing comes from a cache. ``--towers`` measures images a second of SigLIP's tower in batches instead.

llama.cpp is asked through its server and reads ``gguf/mistral3_08b-bf16.gguf`` and ``gguf/mmproj-...``, which
its converter makes from the checkpoint. OpenVINO reads ``mistral3_08b-ov-fp16``, which ``optimum-cli`` makes
from ``mistral3_08b-older`` (:func:`for_older`), through optimum-intel: the pipelines of OpenVINO GenAI do not
know these classes.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIZES = (448, 1344)
QUESTION = "What is in the picture?"
MARK = "[IMG]"
VISION = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1540, "patch_size": 14,
}  # fmt: skip
TEXT = {
    "model_type": "mistral", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32768,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip


def make(folder: Path) -> Path:
    """Mistral 3's classes at 0.8 billion parameters (tower 0.4, text 0.36): random weights."""
    path = folder / "mistral3_08b"
    if (path / "config.json").is_file():
        return path
    import torch
    from checkpoints import save_tokenizer
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    path.mkdir(parents=True, exist_ok=True)
    marks = [MARK, "[IMG_BREAK]", "[IMG_END]"]
    ids = save_tokenizer(path, TEXT["vocab_size"], marks)
    config = Mistral3Config(
        vision_config=VISION, text_config=TEXT, image_token_index=ids[MARK], spatial_merge_size=2,
        vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1234)
    model = Mistral3ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=28).save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({
        "processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2,
        "image_token": MARK, "image_break_token": marks[1], "image_end_token": marks[2],
    }))  # fmt: skip
    return path


def for_older(path: Path) -> Path:
    """The checkpoint as transformers before 5.20 read it: the tower's rotation is called "default" there."""
    older = path.with_name(f"{path.name}-older")
    older.mkdir(exist_ok=True)
    for file in path.iterdir():
        if file.name != "config.json" and not (older / file.name).exists():
            (older / file.name).symlink_to(file.resolve())
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["rope_parameters"]["rope_type"] = "default"
    (older / "config.json").write_text(json.dumps(config))
    return older


def picture(seed: int, side: int) -> Any:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def run(engine: str, path: str, rounds: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each prompt, by the image's side; one of the smallest before them is not counted."""
    ask = ENGINES[engine](path)
    ask(picture(1, min(sizes)))
    found: dict[str, list[float]] = {}
    for side in sizes:
        for number in range(rounds):
            # A new image in each turn of an engine too: its server may have a cache on disk.
            image = picture(time.time_ns() % (1 << 32) + number, side)
            start = time.perf_counter()
            ask(image)
            found.setdefault(str(side), []).append(time.perf_counter() - start)
    return found


def _headrace(path: str) -> Any:
    from headrace import LLM, SamplingParams

    llm = LLM(path, dtype="bfloat16", max_model_len=8192, kv_cache_memory_bytes=1 << 30,
              max_num_batched_tokens=4096, disable_log_stats=True)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1)
    return lambda image: llm.generate(_asked(image), params, use_tqdm=False)


def _vllm(path: str) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(str(for_older(Path(path))), dtype="bfloat16", max_model_len=8192,
              kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=4096, tokenizer_mode="hf",
              config_format="hf", limit_mm_per_prompt={"image": 1})  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1)
    return lambda image: llm.generate(_asked(image), params, use_tqdm=False)


def _transformers(path: str) -> Any:
    import torch
    from transformers import Mistral3ForConditionalGeneration

    model = Mistral3ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16).eval()
    return _generating(model, path, torch.bfloat16)


def _openvino(path: str) -> Any:
    import torch
    from optimum.intel import OVModelForVisualCausalLM

    # The plugin computes in bfloat16 by itself; its way in is float32.
    return _generating(
        OVModelForVisualCausalLM.from_pretrained(f"{path}-ov-fp16"), path, torch.float32
    )


def _generating(model: Any, path: str, dtype: Any) -> Any:
    """``model.generate`` with inputs made without its processor, which needs torchvision."""
    import torch
    from transformers import PreTrainedTokenizerFast
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json", pad_token=MARK)
    images = PixtralImageProcessorPil.from_pretrained(path)

    @torch.inference_mode()
    def ask(image: Any) -> None:
        given = images(images=[image], return_tensors="pt")
        rows, columns = (int(size) // 28 for size in given["image_sizes"][0])
        # Breaks between rows cost no more than the text around them.
        ids = tokenizer(MARK * (rows * columns) + QUESTION, return_tensors="pt")
        model.generate(
            input_ids=ids["input_ids"], attention_mask=ids["attention_mask"],
            pixel_values=given["pixel_values"].to(dtype), image_sizes=given["image_sizes"],
            max_new_tokens=1, do_sample=False,
        )  # fmt: skip

    return ask


def _llamacpp(path: str) -> Any:
    """llama-server with one slot, by chat completions of one token; the image travels as a bitmap."""
    import atexit
    import signal

    from processes import Launch, free_port, stop

    port, checkpoint = free_port(), Path(path)
    url = f"http://127.0.0.1:{port}"
    files = checkpoint.parent / "gguf"
    threads, log = str(os.cpu_count()), checkpoint.parent / "llama-server.log"
    launch = Launch([
        os.environ["HEADRACE_BENCH_LLAMA_SERVER"], "--host", "127.0.0.1", "--port", str(port),
        "-m", str(files / f"{checkpoint.name}-bf16.gguf"),
        "--mmproj", str(files / f"mmproj-{checkpoint.name}-bf16.gguf"),
        # By itself it shrinks an image to 1,024 tokens.
        "--image-max-tokens", "4096", "-c", "8192", "-np", "1", "-t", threads, "-b", "4096", "-fa", "on",
    ], {})  # fmt: skip
    process = launch.start(log)
    atexit.register(stop, process)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server goes too
    _wait_for_health(process, url)

    def ask(image: Any) -> None:
        held = io.BytesIO()
        image.save(held, "BMP")
        data = "data:image/bmp;base64," + base64.b64encode(held.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": data}},
            {"type": "text", "text": QUESTION},
        ]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0,
                "cache_prompt": False}  # fmt: skip
        request = urllib.request.Request(
            url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            json.load(response)

    return ask


def _asked(image: Any) -> dict[str, Any]:
    return {"prompt": f"{MARK}{QUESTION}", "multi_modal_data": {"image": image}}


def _wait_for_health(process: subprocess.Popen[str], url: str) -> None:
    """Until the server has its model; with a tower it takes no prompts of token ids to ask for one."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(url + "/health", timeout=10).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server ended with status {process.returncode}")


ENGINES: dict[str, Callable[[str], Any]] = {
    "headrace": _headrace, "vllm": _vllm, "transformers": _transformers, "openvino": _openvino,
    "llamacpp": _llamacpp,
}  # fmt: skip


def towers(folder: Path, engine: str, batch: int, rounds: int) -> list[float]:
    """Images a second of SigLIP's tower (so400m, 224 pixels) in bf16, batch by batch."""
    import torch

    path = make_siglip(folder)
    pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    if engine == "transformers":
        from transformers import PaliGemmaForConditionalGeneration

        model = PaliGemmaForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16).eval()
        return _rates(lambda: model.get_image_features(pixels.bfloat16()), batch, rounds)
    from headrace import LLM

    llm = LLM(str(path), dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    items = [{"pixel_values": one} for one in pixels]
    [found] = llm.apply_model(
        lambda model: _rates(lambda: model.embed_media("image", items), batch, rounds)
    )
    return found


def _rates(call: Any, batch: int, rounds: int) -> list[float]:
    import torch

    found = []
    with torch.inference_mode():
        for number in range(rounds + 1):
            start = time.perf_counter()
            call()
            if number:
                found.append(batch / (time.perf_counter() - start))
    return found


def make_siglip(folder: Path) -> Path:
    """PaliGemma's classes with the tower of its checkpoints, in front of a small decoder."""
    path = folder / "paligemma_so400m"
    if (path / "config.json").is_file():
        return path
    import torch
    from checkpoints import save_tokenizer
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipImageProcessor,
    )

    path.mkdir(parents=True, exist_ok=True)
    ids = save_tokenizer(path, 8192, ["<image>"])
    text = {"model_type": "gemma", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
            "vocab_size": 8192}  # fmt: skip
    config = PaliGemmaConfig(
        vision_config={**SIGLIP, "projection_dim": 256}, text_config=text, projection_dim=256,
        image_token_index=ids["<image>"], hidden_size=256,
    )  # fmt: skip
    torch.manual_seed(1234)
    model = PaliGemmaForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    SiglipImageProcessor(size={"height": 224, "width": 224}).save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where checkpoints are, or are made")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON",
                        help="vllm, transformers or openvino, and the Python that has it; llamacpp and "
                        "its llama-server")  # fmt: skip
    parser.add_argument("--engines", help="of headrace and the peers (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the engines")
    parser.add_argument("--prompts", type=int, default=3, help="images of each size in a turn")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="sides of the images")
    parser.add_argument("--towers", type=int, default=0, metavar="BATCH")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a line of JSON for each turn")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = tuple(map(int, given.sizes.split(",")))
    if given.one:
        if given.towers:
            found_once = {"tower": towers(given.folder, given.one, given.towers, given.prompts)}
        else:
            found_once = run(given.one, str(make(given.folder)), given.prompts, sizes)
        print(json.dumps(found_once))
        return
    (make_siglip if given.towers else make)(given.folder)
    pythons = {"headrace": sys.executable, **dict(peer.split("=", 1) for peer in given.peer)}
    wanted = given.engines.split(",") if given.engines else list(pythons)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.rounds):
        for engine in wanted:
            said = _turn(engine, pythons[engine], given)
            for what, values in said.items():
                found.setdefault(what, {}).setdefault(engine, []).extend(values)
            if given.out and said:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"engine": engine, **said}) + "\n")
    _report(found, "images/s" if given.towers else "s to the first token")


def _turn(engine: str, python: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """The figures of one engine in a process of its own; none where it failed, which is printed."""
    environment = dict(os.environ)
    if engine == "llamacpp":
        environment["HEADRACE_BENCH_LLAMA_SERVER"], python = python, sys.executable
    elif engine != "headrace":
        from peers import Peers, unset

        home = Path(python).parent.parent
        at_best = Peers({engine: home}, given.folder, os.cpu_count() or 1).environment(engine, 1)
        environment = {k: v for k, v in environment.items() if k not in unset(engine)} | at_best
    # -P: modules beside this one have names of packages that engines look for.
    alone = [] if engine == "llamacpp" else ["-P"]
    words = [python, *alone, __file__, str(given.folder), "--one", engine, "--sizes", given.sizes,
             "--prompts", str(given.prompts), "--towers", str(given.towers)]  # fmt: skip
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=1800, check=False, env=environment
    )
    if done.returncode:
        print(f"{engine}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    # The last such line: vLLM logs its end to the same place.
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said: dict[str, list[float]] = json.loads(results[-1])
    print(f"{engine}: {said}", file=sys.stderr, flush=True)
    return said


def _report(found: dict[str, dict[str, list[float]]], unit: str) -> None:
    for what, engines in found.items():
        for engine, values in engines.items():
            middle = statistics.median(values)
            print(f"{what:>6} {engine:<13} {middle:8.3f} {unit} (of {len(values)}, "
                  f"{min(values):.3f} to {max(values):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
