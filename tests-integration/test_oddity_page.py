"""The diff of the page on an oddity of one model is all that such a model touches.

It is applied to a copy of the packages; there the model passes the suite of families, which compares the
op's definition with transformers, and answers with the implementation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending" / "an-oddity-of-one-model.md"
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
SUITE = '''
"""Transformers' Llama with the same bias on its scores, and the suite of families."""

import pytest
import torch
from model_families_conformance import FamilyConformance
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from headrace import LLM, ModelRegistry, SamplingParams
from headrace_core.errors import HeadraceError

PROMPT = list(range(3, 30))
ModelRegistry.register_model(
    "LeaningLlamaForCausalLM",
    "headrace_models.families.decoder.leaning_llama:LeaningLlamaForCausalLM",
)
without_bias = modeling_llama.eager_attention_forward


def with_bias(module, query, key, value, attention_mask, **options):
    bias = getattr(module, "score_bias", None)
    if bias is not None:
        others = 1.0 - torch.eye(key.shape[2])[-query.shape[2] :]
        attention_mask = attention_mask + bias[None, :, None, None] * others
    return without_bias(module, query, key, value, attention_mask, **options)


modeling_llama.eager_attention_forward = with_bias


class LeaningLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.score_bias = torch.nn.Parameter(torch.zeros(config.num_attention_heads))


class TestLeaningLlama(FamilyConformance):
    def hf_class(self):
        return LeaningLlamaForCausalLM

    def hf_config(self, **overrides):
        own = {"vocab_size": 100, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
        return LlamaConfig(**{**own, **overrides})

    def test_the_bias_matters(self, checkpoint):
        biased = checkpoint.logprobs(PROMPT)
        kept = [layer.self_attn.__dict__["_parameters"].pop("score_bias")
                for layer in checkpoint.reference.model.layers]
        plain = checkpoint.logprobs(PROMPT)
        for layer, bias in zip(checkpoint.reference.model.layers, kept):
            layer.self_attn.score_bias = bias
        assert (biased - plain).abs().max() > 100 * self.tolerance

    def test_the_implementation(self, checkpoint):
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        with LLM(model=str(checkpoint.path), skip_tokenizer_init=True, enforce_eager=True) as llm:
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == checkpoint.greedy(PROMPT, 8)

    def test_a_backend_without_the_feature(self, checkpoint):
        with pytest.raises(HeadraceError, match="score_bias not supported"):
            LLM(model=str(checkpoint.path), skip_tokenizer_init=True, attention_backend="paged")
'''


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages that the page's diff is about, with that diff."""
    folder = tmp_path_factory.mktemp("tree")
    for language, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        source = Path(*Path(name).parts[:3])
        if not (folder / source).exists():
            shutil.copytree(ROOT / source, folder / source)
        target = folder / name
        target.write_text(text if language == "python" else applied(target.read_text(), text))
    return folder


def applied(text: str, diff: str) -> str:
    """``text`` with the hunks of ``diff``; each must fit in exactly one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, hunk
        text = text.replace(before, after)
    return text


def test_it_touches_a_family_an_op_and_its_implementation(tree: Path) -> None:
    changed = [
        str(file.relative_to(tree))
        for file in sorted(tree.rglob("*.py"))
        if not (before := ROOT / file.relative_to(tree)).exists()
        or before.read_bytes() != file.read_bytes()
    ]
    assert changed == [
        "packages/attention/src/headrace_attention/sdpa.py",
        "packages/models/src/headrace_models/families/decoder/leaning_llama.py",
        "packages/reference/src/headrace_reference/attention.py",
    ]


def test_it_is_what_transformers_computes(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "test_leaning.py").write_text(SUITE, encoding="utf-8")
    sources = sorted(tree.glob("packages/*/src"))
    paths = [*sources, ROOT / "packages" / "models" / "tests", os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 18
