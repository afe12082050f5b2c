"""Embeddings from clients: read elsewhere, refused for every reason, never trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import CharTokenizer, served_model
from safetensors.torch import save

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarSpec
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams
from headrace_core.text import ParsedDelta, ReasoningParser
from headrace_engine.input_processing.embeds import EmbedsDecodeJob, EmbedsDecoder
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.structured.admission import Admitted

HIDDEN = 6
MODEL: dict[str, Any] = {
    "prompt_embeds": True, "hidden_size": HIDDEN, "dtype": "float32", "max_model_len": 64,
}  # fmt: skip


def torch_file(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def rows(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HIDDEN, generator=generator).to(dtype)


def decoder_of(
    *, hidden_size: int, dtype: str, max_model_len: int, prompt_embeds: bool = True
) -> EmbedsDecoder:
    return EmbedsDecoder(hidden_size, dtype, max_model_len)


@pytest.fixture(scope="module")
def decoder() -> Iterator[EmbedsDecoder]:
    made = decoder_of(**MODEL)
    yield made
    made.close()


def as_rows(embeds: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(embeds.data), dtype=torch.float32).view(-1, HIDDEN)


FORMS = {
    "tensor": lambda x: x,
    "strided": lambda x: torch.stack([x, x], dim=1)[:, 0],
    "needs grad": lambda x: x.clone().requires_grad_(),
    "one leading dimension": lambda x: x[None],
    "torch": torch_file,
    "torch, 3-D": lambda x: torch_file(x[None]),
    "torch, parameter": lambda x: torch_file(torch.nn.Parameter(x)),
    "safetensors": lambda x: save({"prompt_embeds": x}),
    "memoryview": lambda x: memoryview(torch_file(x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_rows(decoder: EmbedsDecoder, form: str, dtype: Any) -> None:
    given = rows(dtype=dtype)
    found = decoder.decode(FORMS[form](given))
    assert (found.dtype, found.num_tokens, found.hidden_size) == ("float32", 4, HIDDEN)
    assert torch.equal(as_rows(found), given.float())


def test_rows_come_in_the_models_dtype() -> None:
    made = decoder_of(**{**MODEL, "dtype": "bfloat16"})
    given = rows()
    found = made.decode(given)
    values = torch.frombuffer(bytearray(found.data), dtype=torch.bfloat16)
    assert torch.equal(values.view(-1, HIDDEN), given.bfloat16())
    half = decoder_of(**{**MODEL, "dtype": "float16"})
    with pytest.raises(RequestError, match="not finite in float16"):
        half.decode(given * 1e6)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def with_nan() -> torch.Tensor:
    values = rows()
    values[1, 2] = torch.nan
    return values


def crafted_sparse() -> torch.Tensor:
    """Indices beyond the shape, unchecked: densified, it would write outside its memory."""
    return torch.sparse_coo_tensor(
        torch.tensor([[10**6], [10**6]]), torch.ones(1), (4, HIDDEN), check_invariants=False
    )


def replaced(data: bytes, name: str, content: bytes) -> bytes:
    """A torch file with one record replaced."""
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for item in old.infolist():
            new.writestr(item.filename, content if item.filename.endswith(name) else old.read(item))
    return target.getvalue()


def safetensors_with(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [4, HIDDEN], "data_offsets": [0, 16 * HIDDEN], **changes}
    header = json.dumps({"x": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16 * HIDDEN)


BAD_TENSORS: dict[str, Any] = {
    "NaN": lambda: with_nan(),
    "infinite": lambda: rows() / 0,
    "float64": lambda: rows().double(),
    "integers": lambda: torch.ones(4, HIDDEN, dtype=torch.int64),
    "complex": lambda: rows().to(torch.complex64),
    "hidden size": lambda: torch.zeros(4, HIDDEN + 1),
    "flat": lambda: torch.zeros(4 * HIDDEN),
    "scalar": lambda: torch.tensor(1.0),
    "two prompts": lambda: torch.zeros(2, 4, HIDDEN),
    "4-D": lambda: torch.zeros(1, 1, 4, HIDDEN),
    "empty": lambda: torch.zeros(0, HIDDEN),
    "sparse": lambda: rows().to_sparse(),
    "sparse rows": lambda: rows().to_sparse_csr(),
    "crafted sparse": crafted_sparse,
    "too large": lambda: torch.full((4, HIDDEN), 3e38),
    "quantized": lambda: torch.quantize_per_tensor(rows(), 0.1, 0, torch.qint8),
}

BAD_FILES: dict[str, Any] = {
    "nothing": lambda: b"",
    "text": lambda: b"hello",
    "pickle": lambda: pickle.dumps([1, 2]),
    "old torch form": lambda: torch_file(rows(), _use_new_zipfile_serialization=False),
    "cut": lambda: torch_file(rows())[:-200],
    "cut safetensors": lambda: save({"x": rows()})[:-8],
    "two tensors": lambda: save({"x": rows(), "y": rows()}),
    "no tensor": lambda: save({}),
    "a list": lambda: torch_file([rows()]),
    "a dictionary": lambda: torch_file({"x": rows()}),
    "no pickle in it": lambda: replaced(torch_file(rows()), "data.pkl", b""),
    "text for a pickle": lambda: replaced(torch_file(rows()), "data.pkl", b"hello"),
    "storage too short": lambda: replaced(torch_file(rows()), "data/0", b"1234"),
    "header too long": lambda: struct.pack("<Q", 2**62) + b"{}",
    "header lies": lambda: safetensors_with(data_offsets=[0, 2**40]),
    "shape lies": lambda: safetensors_with(shape=[2**31, HIDDEN]),
    "negative": lambda: safetensors_with(shape=[-4, -HIDDEN]),
    "other dtype": lambda: safetensors_with(dtype="I32"),
}


@pytest.mark.req("SEC-10")
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensors_are_refused_however_they_come(decoder: EmbedsDecoder, kind: str) -> None:
    tensor = BAD_TENSORS[kind]()
    with pytest.raises(RequestError, match="prompt_embeds: ") as caught:
        decoder.decode(tensor)
    assert caught.value.param == "prompt_embeds"
    if tensor.layout is torch.strided:
        with pytest.raises(RequestError, match="prompt_embeds: "):
            decoder.decode(torch_file(tensor))
    assert decoder.decode(torch_file(rows())).num_tokens == 4


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_and_too_large_tensors_are_told_so(decoder: EmbedsDecoder) -> None:
    for kind, message in (
        ("quantized", r"a quantized tensor \(torch.qint8\)"),
        ("too large", "so large that a norm"),
    ):
        with pytest.raises(RequestError, match=message):
            decoder.decode(torch_file(BAD_TENSORS[kind]()))


@pytest.mark.req("SEC-10")
@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused(decoder: EmbedsDecoder, kind: str) -> None:
    with pytest.raises(RequestError, match="prompt_embeds: ") as caught:
        decoder.decode(BAD_FILES[kind]())
    assert "Traceback" not in str(caught.value)
    assert "/" not in str(caught.value), "no paths of ours"


@pytest.mark.req("SEC-10")
def test_64_threads_with_hostile_and_good_files_at_once(
    decoder: EmbedsDecoder, tmp_path: Path
) -> None:
    marker = tmp_path / "was-here"
    hostile = [
        torch_file(Evil(marker)),
        replaced(torch_file(rows()), "data.pkl", pickle.dumps(Evil(marker), protocol=2)),
        pickle.dumps(Evil(marker)),
        torch_file(crafted_sparse()),
        torch_file(with_nan()),
        torch_file(torch.zeros(4, HIDDEN + 1)),
        b"\x80\x04.",
    ]

    def send(i: int) -> bool:
        if i % 8 == 7:
            return bool(torch.equal(as_rows(decoder.decode(torch_file(rows(i)))), rows(i)))
        try:
            decoder.decode(hostile[i % 8])
        except RequestError as error:
            return error.param == "prompt_embeds"
        return False

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(send, range(64)))
    assert not marker.exists()


@pytest.mark.req("SEC-10")
def test_sizes_are_looked_at_before_the_content(decoder: EmbedsDecoder) -> None:
    with pytest.raises(RequestError, match=f"at most {decoder.max_bytes}"):
        decoder.decode(bytes(decoder.max_bytes + 1))


@pytest.mark.req("SEC-10")
def test_a_file_that_unpacks_to_gigabytes_ends_in_a_refusal(decoder: EmbedsDecoder) -> None:
    """Less than 1 MB of deflated zeros; the reading process may not take what they unpack to."""
    big = decoder_of(**{**MODEL, "max_model_len": 1 << 17})
    source = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_file(rows()))) as old,
        zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for item in old.infolist():
            with new.open(item.filename, "w", force_zip64=True) as record:
                if item.filename.endswith("data/0"):
                    for _ in range(700):
                        record.write(bytes(1 << 20))
                else:
                    record.write(old.read(item))
    data = source.getvalue()
    assert len(data) < big.max_bytes
    try:
        with pytest.raises(RequestError, match="prompt_embeds: "):
            big.decode(data)
        assert big.decode(torch_file(rows())).num_tokens == 4
    finally:
        big.close()


@pytest.mark.req("SEC-10")
def test_a_process_that_dies_or_takes_too_long_is_replaced(decoder: EmbedsDecoder) -> None:
    worker, job = decoder._worker, EmbedsDecodeJob(torch_file(rows()), HIDDEN, "float32")
    assert worker.decode(job).num_tokens == 4
    child = worker._process.pid
    assert child is not None
    os.kill(child, signal.SIGSTOP)  # it hangs
    worker._seconds, limit = 0.2, worker._seconds
    assert "too long" in worker.decode(job).error
    assert not worker._process.running
    worker._seconds = limit
    assert worker.decode(job).num_tokens == 4


def input_processor(**model: Any) -> InputProcessor:
    return InputProcessor(CharTokenizer(), served_model(**{**MODEL, **model}), clock=lambda: 1.0)


def test_a_request_of_embeddings() -> None:
    given = rows(5)
    made = input_processor().prepare(
        {"prompt_embeds": given, "cache_salt": "s"}, SamplingParams(), "r"
    )
    [core] = made.core_requests
    assert made.prompt is None
    assert core.prompt_token_ids == [0] * 5
    assert core.cache_salt == "s"
    assert torch.equal(as_rows(core.prompt_embeds), given)
    short = SamplingParams(truncate_prompt_tokens=2)
    [core] = input_processor().prepare({"prompt_embeds": given}, short, "r").core_requests
    assert torch.equal(as_rows(core.prompt_embeds), given[-2:])
    assert core.prompt_token_ids == [0] * 2


def test_what_a_prompt_without_tokens_cannot_do() -> None:
    prompt: Any = {"prompt_embeds": rows()}
    with pytest.raises(UnsupportedFeature, match="--enable-prompt-embeds") as caught:
        input_processor(prompt_embeds=False).prepare(prompt, SamplingParams(), "r")
    assert caught.value.param == "prompt_embeds"
    with pytest.raises(UnsupportedFeature, match="prompt_logprobs"):
        input_processor().prepare(prompt, SamplingParams(prompt_logprobs=1), "r")
    with pytest.raises(UnsupportedFeature, match="no tokens"):
        input_processor().tokenize(prompt)
    with pytest.raises(RequestError, match="beside 'prompt_embeds'"):
        input_processor().prepare({**prompt, "prompt": "x"}, SamplingParams(), "r")
    with pytest.raises(RequestError, match="str"):
        input_processor().prepare({"prompt_embeds": "AAAA"}, SamplingParams(), "r")
    with pytest.raises(RequestError, match="context length is 64"):
        input_processor().prepare({"prompt_embeds": rows(64)}, SamplingParams(), "r")


class _Thinks(ReasoningParser):
    start_marker, end_marker = "<think>", "</think>"

    def feed(self, text: str) -> ParsedDelta:
        raise AssertionError("only its marks matter here")

    def finish(self) -> ParsedDelta:
        raise AssertionError("only its marks matter here")


def test_what_the_zeros_spell_does_not_begin_the_reasoning() -> None:
    class ZeroThinks(CharTokenizer):
        def decode(self, token_ids: Any, **_: Any) -> str:
            return "".join("<think>" if i == 0 else chr(i) for i in token_ids)

    made = InputProcessor(ZeroThinks(), served_model(**MODEL), reasoning_parser=_Thinks)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    admitted = Admitted(GrammarSpec("guidance", "regex", "a"), 10)
    given = {"prompt_embeds": rows()}
    [core] = made.prepare(given, params, "r", admitted=admitted).core_requests
    assert core.constraint.start_after == ""
    [core] = made.prepare({"prompt_token_ids": [0]}, params, "r", admitted=admitted).core_requests
    assert core.constraint.start_after == "</think>"
    made.close()


@pytest.mark.timeout(60)
def test_tensors_need_no_other_process() -> None:
    made = input_processor()
    made.prepare({"prompt_embeds": rows()}, SamplingParams(), "r")
    assert made._prompts._embeds is not None
    assert not made._prompts._embeds._worker._process.running
    made.close()
