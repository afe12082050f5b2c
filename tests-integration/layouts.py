"""The table of families and layouts: how each checkpoint is made, how each layout is asked for, and which
cells are refused. ``python tests-integration/layouts.py`` writes it into ``docs/scaling.md``.

Every cell that is not refused runs in ``test_layouts.py``, and a cell of each layout behind a real socket in
``test_layouts_served.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, STATE_FAMILIES, VOCAB_SIZE, save_model
from image_checkpoints import data_url, picture, save_qwen2_vl
from modes import SETTINGS
from quantized_checkpoints import save_gptq

from headrace import LLM, RequestOutput, SamplingParams

SERVED = "layouts"
"""Name of the model that is served."""
NUM_TOKENS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"

TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
Said = list[list[tuple[int, float]]]
"""Of each request the tokens and their log-probabilities."""


@dataclass(frozen=True)
class Layout:
    """A way to divide a model over processes, or to have several of it."""

    settings: dict[str, Any]
    same_bits: bool = False
    """Nothing is added in another order: log-probabilities are those of one process, bit for bit."""

    @property
    def num_engines(self) -> int:
        """Engines, of which each has requests of its own."""
        return int(self.settings.get(DP, 1))

    @property
    def num_processes(self) -> int:
        """Ranks of all engines."""
        ranks = int(self.settings.get(TP, 1)) * int(self.settings.get(PP, 1))
        return ranks * self.num_engines

    @property
    def argv(self) -> list[str]:
        """The same by the command's flags."""
        flags = {TP: "-tp", PP: "-pp", DP: "-dp"}
        found = []
        for name, value in self.settings.items():
            found += ["-ep"] if name == "enable_expert_parallel" else [flags[name], str(value)]
        return found


EP: dict[str, Any] = {"enable_expert_parallel": True}
LAYOUTS = {
    "-tp 2": Layout({TP: 2}),
    "-tp 4": Layout({TP: 4}),
    "-pp 2": Layout({PP: 2}, same_bits=True),
    "-pp 3": Layout({PP: 3}, same_bits=True),
    "-dp 2": Layout({DP: 2}, same_bits=True),
    "-tp 2 -ep": Layout({TP: 2, **EP}),
    "-tp 2 -pp 2": Layout({TP: 2, PP: 2}),
    "-dp 2 -ep": Layout({DP: 2, **EP}),
}


@dataclass(frozen=True)
class Family:
    """A kind of model, as a tiny checkpoint.

    Attributes:
        title: as the page calls it.
        save: makes the checkpoint in a folder.
        few_blocks: of the cache of an engine: enough for one request, not for those of ``requests`` together.
        settings: of the engine, beside those of all.
        chats: images in each of its requests; none: requests are tokens.
    """

    title: str
    save: Callable[[Path], Any]
    few_blocks: int = 20
    settings: dict[str, Any] = field(default_factory=dict)
    chats: Sequence[Sequence[int]] = ()

    @property
    def requests(self) -> list[Any]:
        """Prompts, or chats with images; some begin alike."""
        return [chat(numbers) for numbers in self.chats] if self.chats else prompts()

    def ask(self, llm: LLM, requests: Sequence[Any]) -> list[RequestOutput]:
        """Complete the requests side by side, greedily."""
        complete = llm.chat if self.chats else llm.generate
        return complete(list(requests), PARAMS, use_tqdm=False)

    def engine(self, **settings: Any) -> dict[str, Any]:
        """Keywords of ``LLM``."""
        return {**SETTINGS, **self.settings, **settings}

    @property
    def argv(self) -> list[str]:
        """The same by flags of ``headrace serve``."""
        found = []
        for name, value in self.engine().items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                found.append(flag)
            elif value is not False:
                found += [flag, str(value)]
        return found

    def body(self, request: Any) -> dict[str, Any]:
        """The JSON that asks a server for what :meth:`ask` does."""
        wanted = {
            "model": SERVED, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        if self.chats:
            return {**wanted, "messages": request, "logprobs": True, "top_logprobs": 1}
        return {**wanted, "prompt": request, "logprobs": 1}


def prompts() -> list[list[int]]:
    """Tokens: of different lengths, three with a beginning of several blocks, one as long as whole blocks."""
    generator = torch.Generator().manual_seed(11)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = draw(40)
    beginnings = [draw(1), draw(21), shared + draw(5), shared + draw(9), shared]
    return [*beginnings, draw(33), draw(64), draw(27)]


def chat(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """A user's message with these pictures."""
    images = [{"type": "image_url", "image_url": {"url": data_url(picture(n))}} for n in numbers]
    words = [{"type": "text", "text": "the race over "}, *images, {"type": "text", "text": "runs"}]
    return [{"role": "user", "content": words}]


def said(outputs: Sequence[RequestOutput]) -> Said:
    """Tokens and log-probabilities of each request's one completion."""
    found = []
    for output in outputs:
        [one] = output.outputs
        assert len(one.token_ids) == NUM_TOKENS
        entries = zip(one.token_ids, one.logprobs, strict=True)
        found.append([(token, entry[token].logprob) for token, entry in entries])
    return found


def _changed(family: str, **changes: Any) -> Callable[[Path], Any]:
    """A family of ``families.py``, with other sizes."""
    kind, sizes = (FAMILIES | STATE_FAMILIES)[family]
    return lambda folder: save_model(family, folder, {family: (kind, {**sizes, **changes})})


def _in_four_bits(family: str, **changes: Any) -> Callable[[Path], Any]:
    return lambda folder: save_gptq(folder, family, **changes)


def _with_images(folder: Path) -> Any:
    return save_qwen2_vl(folder, tower_heads=4, num_hidden_layers=3)


FLOATS = {"quantization_activations": "float"}
KINDS = {
    "dense": Family("dense: Llama", _changed("llama")),
    "mixture": Family("mixture: Qwen3-MoE", _changed("qwen3_moe")),
    "latent": Family("latent attention, mixture: DeepSeek V3", _changed("deepseek_v3")),
    "hybrid": Family("hybrid: Bamba", _changed("bamba", mamba_n_groups=4)),
    "hybrid mixture": Family(
        "hybrid, mixture: Qwen3-Next",
        _changed("qwen3_next", linear_num_key_heads=4, linear_num_value_heads=8),
    ),
    "quantized": Family(
        "4 bits (GPTQ): Llama", _in_four_bits("llama", hidden_size=128, intermediate_size=256),
        settings=FLOATS,
    ),
    "quantized mixture": Family(
        "4 bits (GPTQ), mixture: Qwen3-MoE",
        _in_four_bits("qwen3_moe", hidden_size=128, head_dim=32, moe_intermediate_size=128),
        settings=FLOATS,
    ),
    "vision": Family(
        "images: Qwen2-VL", _with_images, few_blocks=18,
        settings={"skip_tokenizer_init": False}, chats=([1], [2, 3], [], [1, 2], [1, 2, 3], [3, 3]),
    ),
}  # fmt: skip

NO_MIXTURE = "the model has no mixture of experts"
REFUSED = {
    (family, layout): (NO_MIXTURE, "parallel.enable_expert_parallel")
    for family in ("dense", "hybrid", "quantized", "vision")
    for layout in ("-tp 2 -ep", "-dp 2 -ep")
}
"""(family, layout) -> the reason, and what the refusal names."""
CELLS = [
    (family, layout) for family in KINDS for layout in LAYOUTS if (family, layout) not in REFUSED
]


def table() -> str:
    """The text between the marks of the page."""
    heads = [f"`{layout}`" for layout in LAYOUTS]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for family, kind in KINDS.items():
        cells = []
        for name, layout in LAYOUTS.items():
            equal = "bits" if layout.same_bits else "equal"
            cells.append("refused" if (family, name) in REFUSED else equal)
        lines.append(f"| {kind.title} | {' | '.join(cells)} |")
    reasons = sorted({reason for reason, _ in REFUSED.values()})
    return "\n".join([*lines, "", f"*refused*: {'; '.join(reasons)}.", ""])


def page(text: str) -> str:
    """The page's text with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
