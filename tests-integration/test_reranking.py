"""Rerankers and multi-vector models end to end: score templates, language models' heads, MaxSim."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_checkpoints import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_engine.input_processing.chat.sandbox import render_template
from headrace_testing.model.decoders import randomise

EXAMPLES = Path(__file__).parents[1] / "examples"
QUERY, DOCUMENTS = "what turns the wheel", ["water", "bread is made of flour", "a river, a dam"]
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer "
    "the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TEMPLATES = {
    "qwen3_reranker": QWEN3,
    "qwen3_vl_reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a search query, retrieve relevant candidates that answer "
        "the query.<Query>:{query}\n<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "bge_reranker_v2_gemma": (
        "A: {query}\nB: {document}\nGiven a query A and a passage B, determine whether the passage "
        "contains an answer to the query by providing a prediction of either 'Yes' or 'No'."
    ),
    "mxbai_rerank_v2": (
        "<|endoftext|><|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.\n<|im_end|>\n<|im_start|>user\nquery: {query} \ndocument: {document} \nYou are a "
        "search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide "
        "your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "nemotron_rerank": "question:{query} \n \n passage:{document}",
}
"""The models' own prompts."""


def template(name: str) -> str:
    return (EXAMPLES / f"score_template_{name}.jinja").read_text(encoding="utf-8")


def render(name: str, query: str, document: str) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return render_template(template(name), {"messages": messages}, 1 << 16)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str) -> None:
    text = render(name, "a {b}", 'c "d"\n')
    assert text == TEMPLATES[name].replace("{query}", "a {b}").replace("{document}", 'c "d"\n')


def test_each_template_is_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("score_template_*.jinja")}
    assert names == {f"score_template_{name}.jinja" for name in TEMPLATES}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Qwen3 with a tokenizer of bytes and a few words; returns transformers' model."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("reranker")
    backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["no yes", "yes no", QUERY, *DOCUMENTS] * 3, trainer)
    backend.add_tokens(["no", "yes"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=backend.get_vocab_size(), hidden_size=48, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
            max_position_embeddings=1024, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    randomise(model)
    model.save_pretrained(folder)
    return folder, model


def test_scores_of_a_language_model(reranker: tuple[Path, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    from headrace import LLM

    folder, model = reranker
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    with LLM(str(folder), hf_overrides=overrides, dtype="float32", max_model_len=512) as llm:
        scored = llm.score(QUERY, DOCUMENTS, chat_template=template("qwen3_reranker"))
    both = [tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes")]
    for output, document in zip(scored, DOCUMENTS):
        text = QWEN3.replace("{query}", QUERY).replace("{document}", document)
        ids = tokenizer.encode(text)
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected = torch.softmax(logits[both], 0)[1]
        assert output.outputs.score == pytest.approx(float(expected), abs=1e-4)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood }}{% endif %}"
)
PARTED_CHAT = CHAT.replace("message.content", "message.content[0].text")


@pytest.mark.parametrize(
    ("false", "template", "prompts"),
    [("no", CHAT, {"web": "Judge."}), (None, PARTED_CHAT, {}), ("no", None, {})],
    ids=["two tokens, a prompt", "one token, parts", "no template"],
)
def test_a_logit_score_equals_sentence_transformers(
    reranker: tuple[Path, Any],
    tmp_path: Path,
    false: str | None,
    template: str | None,
    prompts: dict[str, str],
) -> None:
    """A repository that the library itself has written, served without a word about it."""
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    from headrace import LLM

    source = tmp_path / "source"
    shutil.copytree(reranker[0], source)
    settings = {"pad_token": "<|endoftext|>", "padding_side": "left"}
    if template is not None:
        settings["chat_template"] = template
    told = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**told, **settings}))
    chat = {"chat_template": {"add_generation_prompt": True, "mood": "So: "}}
    transformer = Transformer(
        str(source),
        transformer_task="text-generation",
        processing_kwargs=chat if template else None,
    )
    ids = transformer.tokenizer.convert_tokens_to_ids
    theirs = st.CrossEncoder(
        modules=[transformer, LogitScore(ids("yes"), false and ids(false))],
        activation_fn=torch.nn.Identity() if false else None,
        prompts=prompts,
        default_prompt_name=next(iter(prompts), None),
        device="cpu",
    )
    theirs.save(str(tmp_path / "st"))
    expected = theirs.predict([(QUERY, document) for document in DOCUMENTS])
    with LLM(str(tmp_path / "st"), dtype="float32", max_model_len=512) as llm:
        scored = llm.score(QUERY, DOCUMENTS)
    assert [output.outputs.score for output in scored] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose tokenizer has the markers of all who store ColBERT."""
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    write_tokenizer(folder, marked=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([",", "."])
    markers = ["[Q]", "[D]", "[unused0]", "[unused1]", "[Q] ", "[D] "]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.save_pretrained(folder)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    randomise(model)
    model.save_pretrained(folder)
    return folder


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def projection() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(5)) * 0.3


def as_sentence_transformers_store_it(encoder: Path, folder: Path, **expansion: Any) -> None:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    expansion = {"strategy": "fixed", "length": 12, **expansion}
    modules: list[Any] = [
        Transformer(str(encoder), query_expansion=expansion, document_length=24),
        Dense(32, 16, bias=False, activation_function=torch.nn.Identity(),
              init_weight=projection(), module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=[",", "."]),
        Normalize(module_input_name="token_embeddings"),
    ]  # fmt: skip
    prompts = {"query": "[Q] ", "document": "[D] "}
    MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu").save_pretrained(str(folder))


def as_its_authors_store_it(encoder: Path, folder: Path) -> None:
    shutil.copytree(encoder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    write_json(folder / "artifact.metadata", {"doc_maxlen": 24})
    tensors = load_file(folder / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file(
        {**named, "linear.weight": projection()}, folder / "model.safetensors", {"format": "pt"}
    )


def as_pylate_stores_it(encoder: Path, folder: Path) -> None:
    shutil.copytree(encoder, folder)
    dense = {"in_features": 32, "out_features": 16, "bias": False,
             "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
    write_json(folder / "1_Dense/config.json", dense)
    save_file({"linear.weight": projection()}, folder / "1_Dense/model.safetensors")
    kinds = [("", "sentence_transformers.models.Transformer"),
             ("1_Dense", "pylate.models.Dense.Dense")]  # fmt: skip
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(
        folder / "config_sentence_transformers.json",
        {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ",
         "document_length": 24, "skiplist_words": [",", "."]},
    )  # fmt: skip


@pytest.mark.parametrize(
    "store",
    [
        as_sentence_transformers_store_it,
        partial(as_sentence_transformers_store_it, attend=True),
        partial(as_sentence_transformers_store_it, token="bears"),
        as_its_authors_store_it,
        as_pylate_stores_it,
    ],
    ids=["sentence-transformers", "attended", "another token", "authors", "pylate"],
)
def test_colbert_beside_sentence_transformers(
    encoder: Path, tmp_path: Path, store: Callable[[Path, Path], None]
) -> None:
    """Its own encoder of such checkpoints is the oracle: markers, queries filled up with tokens that
    ask and (unless it is said) are not asked, skipped punctuation, projection, MaxSim."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import MultiVectorEncoder

    from headrace import LLM

    folder = tmp_path / "colbert"
    store(encoder, folder)
    oracle = MultiVectorEncoder(str(folder), device="cpu")
    queries = ["quiet rivers", "stars", "seven bears sleep in quiet woods while rivers run down"]
    documents = ["a wide, blue sea.", "seven bears sleep in woods", "dog"]
    asked, found = oracle.encode_query(queries), oracle.encode_document(documents)
    pairs = [(q, d) for q in range(3) for d in range(3)]
    with LLM(str(folder), dtype="float32") as llm:
        scored = llm.score([queries[q] for q, _ in pairs], [documents[d] for _, d in pairs])
    expected = oracle.similarity(asked, found)
    for output, (q, d) in zip(scored, pairs, strict=True):
        assert len(output.prompt_token_ids) > len(asked[q])
        assert output.outputs.score == pytest.approx(float(expected[q][d]), abs=1e-4)
