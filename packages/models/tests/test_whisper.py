"""Whisper against transformers, on a tiny config; and what its tokens, rules and words say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import choose, with_adapters

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, UnsupportedFeature, UnsupportedModel, WeightsError
from headrace_core.model import ModelInfo, SupportsAlignment, SupportsEncoderDecoder
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import linear_modules, merged, write_adapter
from headrace_testing.model.decoders import build_context, randomise, run_ranks
from headrace_testing.model.encoder_decoders import EncoderDecoderDriver

STATES = 23
START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS, END = 101, 102, 104, 106, 100
HEADS = [[0, 1], [1, 0], [1, 2]]
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
SPECIAL = {
    "<|endoftext|>": END, "<|startoftranscript|>": START, "<|en|>": ENGLISH, "<|de|>": 103,
    "<|transcribe|>": TRANSCRIBE, "<|translate|>": 105, "<|notimestamps|>": NO_TIMESTAMPS,
}  # fmt: skip
GENERATION = {
    "decoder_start_token_id": START, "eos_token_id": END, "no_timestamps_token_id": NO_TIMESTAMPS,
    "alignment_heads": HEADS, "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": 103},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": 105},
}  # fmt: skip


def config(**overrides: Any) -> Any:
    from transformers import WhisperConfig

    own = {
        "vocab_size": 131, "num_mel_bins": 11, "d_model": 36, "encoder_layers": 3,
        "encoder_attention_heads": 6, "encoder_ffn_dim": 51, "decoder_layers": 2,
        "decoder_attention_heads": 3, "decoder_ffn_dim": 72, "max_source_positions": STATES,
        "max_target_positions": 40, "decoder_start_token_id": START, "eos_token_id": END,
        "pad_token_id": 0, "bos_token_id": 0, "median_filter_width": 5, "suppress_tokens": None,
        "begin_suppress_tokens": None, "attn_implementation": "eager",
    }  # fmt: skip
    return WhisperConfig(**{**own, **overrides})


def make(folder: Path, **overrides: Any) -> Any:
    """A checkpoint in the folder; what transformers holds of it."""
    from transformers import WhisperForConditionalGeneration

    reference = WhisperForConditionalGeneration(config(**overrides)).eval()
    randomise(reference)
    reference.save_pretrained(folder)
    (folder / "added_tokens.json").write_text(json.dumps(SPECIAL))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return reference


def resolved(folder: Path, **settings: Any) -> ModelInfo:
    return resolve(ModelConfig(model=str(folder), **settings), LoadConfig(), CpuPlatform())


def opened(folder: Path, **settings: Any) -> Any:
    info = resolved(folder, **settings)
    return load_model(info, build_context(info))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def model(reference: Any, folder: Path) -> Any:
    return opened(folder)


def clip(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn((2 * STATES, 11), generator=generator)
    frames[-7:] = 0
    return {"input_features": frames, "num_frames": torch.tensor([2 * STATES - 7])}


def encoded(reference: Any, media: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        states = reference.model.encoder(media["input_features"].T[None])
    return states.last_hidden_state[0]


def logprobs(reference: Any, media: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference(
            media["input_features"].T[None], decoder_input_ids=torch.tensor([tokens])
        ).logits[0]
    return torch.log_softmax(logits, dim=-1)


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.log_softmax(logits, dim=-1), expected, atol=1e-4, rtol=0)


def test_what_it_is_resolved_to(reference, folder):
    info = resolved(folder)
    assert info.tasks == ("transcription", "align")
    assert info.is_encoder_decoder
    assert (info.runner, info.max_model_len, info.vocab_size) == ("generate", 40, 131)
    without = resolved(folder, override_generation_config={"alignment_heads": None})
    assert without.tasks == ("transcription",)


def test_it_cannot_be_made_to_pool(reference, folder):
    with pytest.raises(ConfigError, match=r"encoder-decoder.*must be generate or auto"):
        resolved(folder, runner="pooling")


def test_it_has_the_capabilities(model):
    assert isinstance(model, SupportsEncoderDecoder)
    assert isinstance(model, SupportsAlignment)


def test_reference_hears_and_is_not_flat(reference):
    tokens = [*PROMPT, 7, 8, 9]
    one, other = logprobs(reference, clip(0), tokens), logprobs(reference, clip(1), tokens)
    assert float(one.std()) > 0.5
    assert float((one - other).abs().max()) > 0.5


def test_encoder_states_alone_and_in_a_batch(reference, model):
    clips = [clip(seed) for seed in range(3)]
    with torch.inference_mode():
        states = model.encode(clips)
        alone = model.encode(clips[1:2])
    assert states.shape == (3 * STATES, 36)
    expected = torch.cat([encoded(reference, one) for one in clips])
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone, states[STATES : 2 * STATES], atol=1e-6, rtol=0)


def test_requests_of_different_audio_and_length(reference, model):
    tokens = {"a": [*PROMPT, 5], "b": [START], "c": [3, 4, 5, 6, 7, *PROMPT, 9, 10]}
    media = {name: clip(seed) for seed, name in enumerate(tokens)}
    driver = EncoderDecoderDriver(model)
    expected = [logprobs(reference, media[name], ids) for name, ids in tokens.items()]
    close(driver.listen(tokens, media, STATES), torch.cat(expected))
    more = {"c": [11], "a": [12], "b": [13, 14]}
    expected = [
        logprobs(reference, media[name], tokens[name] + ids)[-len(ids) :]
        for name, ids in more.items()
    ]
    close(driver.listen(more), torch.cat(expected))


def test_decoding_step_by_step_while_another_begins(reference, model):
    driver, media, sequence = EncoderDecoderDriver(model), clip(3), list(PROMPT)
    logits = driver.listen({"a": sequence}, {"a": media}, STATES)
    for step in range(8):
        sequence.append(int(logits[0 if step else -1].argmax()))
        chunks = {"a": [sequence[-1]], f"new{step}": [START, 5]}
        logits = driver.listen(chunks, {f"new{step}": clip(step)}, STATES)
    expected = list(PROMPT)
    for _ in range(8):
        expected.append(int(logprobs(reference, media, expected)[-1].argmax()))
    assert sequence == expected


def test_prompt_in_chunks(reference, model):
    driver, media, tokens = EncoderDecoderDriver(model), clip(4), [*PROMPT, 1, 2, 3, 4, 5]
    pieces = [
        driver.listen({"a": tokens[:3]}, {"a": media}, STATES),
        driver.listen({"a": tokens[3:8]}),
        driver.listen({"a": tokens[8:]}),
    ]
    close(torch.cat(pieces), logprobs(reference, media, tokens))


def test_profiling_without_a_cache(model):
    driver = EncoderDecoderDriver(model)
    batch = driver.listening({"a": PROMPT}, {"a": clip(0)}, STATES)
    from dataclasses import replace

    for layer in model.attention_layers().values():
        layer.bind_cache(None, 0)
    with torch.inference_mode():
        hidden = model.forward(replace(batch, groups=(), attention=()))
    assert hidden.shape == (4, 36)
    assert bool(hidden.isfinite().all())


@pytest.mark.parametrize(
    "overrides",
    [
        {"decoder_layers": 1, "d_model": 48, "encoder_attention_heads": 4},
        {"tie_word_embeddings": False},
        {"activation_function": "relu", "num_mel_bins": 8},
    ],
    ids=["distilled", "untied", "relu"],
)
def test_other_sizes(tmp_path, overrides):
    reference, tokens = make(tmp_path, **overrides), [*PROMPT, 5, 6]
    media = clip(5)
    media["input_features"] = media["input_features"][:, : reference.config.num_mel_bins]
    media["input_features"] = media["input_features"].contiguous()
    logits = EncoderDecoderDriver(opened(tmp_path)).listen({"a": tokens}, {"a": media}, STATES)
    close(logits, logprobs(reference, media, tokens))


def test_bfloat16(reference, folder):
    media, tokens = clip(6), [*PROMPT, 5, 6]
    driver = EncoderDecoderDriver(opened(folder, dtype="bfloat16"))
    found = torch.log_softmax(driver.listen({"a": tokens}, {"a": media}, STATES), dim=-1)
    expected = logprobs(reference, media, tokens)
    assert float(torch.cosine_similarity(found, expected, dim=-1).min()) > 0.97


def test_tensor_parallel(reference, folder):
    info, media, tokens = resolved(folder), clip(7), [*PROMPT, 5, 6]

    def work(communicator: Any) -> torch.Tensor:
        part = load_model(info, build_context(info, communicator=communicator))
        return EncoderDecoderDriver(part).listen({"a": tokens}, {"a": media}, STATES)

    for logits in run_ranks(3, work):
        close(logits, logprobs(reference, media, tokens))


def test_a_stored_head_that_is_the_embedding_is_passed_over(reference, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    opened(tmp_path)
    del tensors["model.encoder.layers.1.self_attn.v_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"encoder\.layers\.1\.self_attn\.v_proj\.bias"):
        opened(tmp_path)


def test_a_context_beyond_the_learned_positions_is_refused(reference, folder, monkeypatch):
    assert resolved(folder).max_model_len == 40
    monkeypatch.setenv("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(UnsupportedModel, match="max_target_positions = 40"):
        opened(folder, max_model_len=41)


# ---- times of words


def test_alignment_equals_what_token_timestamps_come_from(reference, folder):
    """transformers' own times, from a matrix made here and its own dynamic time warping."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    model, media = opened(folder), clip(8)
    for key, value in GENERATION.items():
        setattr(reference.generation_config, key, value)
    reference.generation_config.suppress_tokens = [END, *range(NO_TIMESTAMPS, 131)]
    num_frames = int(media["num_frames"][0])
    out = reference.generate(
        media["input_features"].T[None],
        attention_mask=torch.arange(2 * STATES)[None] < num_frames,
        language="en", task="transcribe", return_token_timestamps=True, return_timestamps=False,
        return_dict_in_generate=True, max_new_tokens=9, do_sample=False,
    )  # fmt: skip
    sequence = out["sequences"][0].tolist()
    assert sequence[:4] == PROMPT
    fed = sequence[:-1]  # transformers has no weights of the last token
    driver = EncoderDecoderDriver(model)
    batch = driver.listening({"a": fed}, {"a": media}, STATES)
    with torch.inference_mode():
        matrix = model.align(batch, media)
    assert matrix.shape == (len(fed), num_frames // 2)
    assert not matrix[: len(PROMPT)].any()
    text, states = _dynamic_time_warping(-matrix[len(PROMPT) :].double().numpy())
    starts = [states[list(text).index(i)] * 0.02 for i in range(len(fed) - len(PROMPT))]
    expected = out["token_timestamps"][0][len(PROMPT) : -1].tolist()
    assert starts == pytest.approx(expected)
    assert max(starts) > 0


def test_alignment_forgets_its_layers_afterwards(folder, reference):
    model, media = opened(folder), clip(9)
    driver = EncoderDecoderDriver(model)
    batch = driver.listening({"a": [*PROMPT, 5]}, {"a": media}, STATES)
    with torch.inference_mode():
        model.align(batch, media)
    assert all(layer.cross_attention.watch is None for layer in model.layers)


def test_without_alignment_heads_times_are_refused_by_name(reference, folder):
    info = resolved(folder, override_generation_config={"alignment_heads": None})
    model = load_model(info, build_context(info))
    batch = EncoderDecoderDriver(model).listening({"a": PROMPT}, {"a": clip(0)}, STATES)
    with pytest.raises(UnsupportedFeature, match="alignment_heads"):
        model.align(batch, clip(0))
    info = resolved(folder, override_generation_config={"alignment_heads": [[0, 3]]})
    model = load_model(info, build_context(info))
    with pytest.raises(UnsupportedModel, match="head below 3"):
        model.align(batch, clip(0))


def test_an_adapter_of_the_decoder(reference, folder, tmp_path):
    """Of what runs on tokens; the encoder, and keys and values of its states, are refused by name."""
    info = resolved(folder)
    context, slots = with_adapters(build_context(info))
    model = load_model(info, context)
    foreign = ("encoder_attn.k_proj", "encoder_attn.v_proj")
    modules = {n: size for n, size in linear_modules(reference).items() if ".decoder." in n}
    taken = {n: size for n, size in modules.items() if not n.endswith(foreign)}
    terms = write_adapter(tmp_path, taken)
    slots.place(1, slots.read(str(tmp_path)))
    choose(slots, [1] * 4 + [-1] * 4)
    media = {"a": clip(0), "b": clip(1)}
    logits = EncoderDecoderDriver(model).listen({"a": PROMPT, "b": PROMPT}, media, STATES)
    close(logits[:4], logprobs(merged(reference, terms), media["a"], PROMPT))
    close(logits[4:], logprobs(reference, media["b"], PROMPT))
    encoder = next(n for n in linear_modules(reference) if ".encoder." in n)
    for name in (encoder, *(n for n in modules if n.endswith(foreign))):
        write_adapter(tmp_path, {name: (36, 36)})
        with pytest.raises(UnsupportedModel, match=name):
            slots.read(str(tmp_path))
