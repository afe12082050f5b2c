"""A random-weight model with a byte-level tokenizer, and oracles of what it must write."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import tokenizers
from families import VOCAB_SIZE, make_model

from headrace import SamplingParams
from headrace.sampling_params import StructuredOutputsParams

SPECIAL = ["<pad>", "<s>", "</s>", "<think>", "</think>", "<tool>"]
EOS = 2
CORPUS = [
    '{"name": "value", "items": [1, 2, 3], "flag": true, "none": null, "text": ""}, {"a": false}',
    'free text about nothing, and numbers 10 20 30; "quoted" words and "keys": "values"',
]
SETTINGS = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 48, "num_threads": 1,
    "kv_cache_memory_bytes": 64 << 20, "use_tqdm_on_load": False, "block_size": 8,
    "structured_outputs_config": {"compile_seconds": 60.0, "compile_processes": 1},
}  # fmt: skip
UNHURRIED = SETTINGS | {
    "structured_outputs_config": {
        **SETTINGS["structured_outputs_config"],
        "matching_seconds": 30.0,
    },
}
"""For tests of what is written, which no slow machine may end: a virtual processor's time counts what its
host gives to others."""


def save(folder: Path) -> None:
    """Write the checkpoint."""
    model = make_model("llama")
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def closing_bias(llm, strength: float = 4.0) -> dict[int, float]:
    """Makes marks that end something likelier and white space less so, so that random texts end."""
    tokenizer = llm.get_tokenizer()
    bias = {EOS: strength}
    for token_id in range(3, tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        if text in ('"', "}", "]", '"}', ")", "e"):
            bias[token_id] = strength
        elif not text.strip():
            bias[token_id] = -strength
    return bias


def params(seed: int = 0, *, bias=None, **values: Any) -> SamplingParams:
    """Temperature 1, seeded; constraint by keyword."""
    options = {k: values.pop(k) for k in list(values) if k in SamplingParams.__annotations__}
    made = {"temperature": 1.0, "max_tokens": 80, "seed": seed, "logit_bias": bias, **options}
    if values:
        made["structured_outputs"] = StructuredOutputsParams(**values)
    return SamplingParams(**made)


def _parenthesised(text: str) -> bool:
    """Oracle of the grammar below: balanced, and not empty."""
    level = 0
    for index, character in enumerate(text):
        level += {"(": 1, ")": -1}.get(character, 99)
        if level <= 0 and index < len(text) - 1:
            return False
    return level == 0 and text != ""


def _tagged(text: str) -> bool:
    """Oracle of the tag below: every begin is followed by an integer and an end."""
    parts = text.split("<n=")
    return all(re.match(r"-?(0|[1-9][0-9]*)</n>", part) for part in parts[1:])


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{1,4}-[0-9]+(\.[0-9]{2})?"
CHOICES = ["yes", "no", "not at all", 'so "quoted"']
EBNF = 'root ::= "(" inner ")"\ninner ::= root inner | ""'
LARK = 'start: item ("," item)*\nitem: /[0-9]{1,3}/ | "[" start "]"'
TAG = {
    "structures": [{"begin": "<n=", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n="],
}


def valid(schema: Any, value: Any) -> bool:
    """Whether a JSON value satisfies a schema, formats included."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=_formats()).is_valid(value))


def _formats() -> jsonschema.FormatChecker:
    """The library's, and those for which it would need others."""
    checker = jsonschema.FormatChecker()
    offset = r"(?:[Zz]|[+-]\d\d:\d\d)"
    time = rf"\d\d:\d\d:\d\d(?:\.\d+)?{offset}"
    checks = {
        "time": lambda text: re.fullmatch(time, text) and _clock(text[:8]),
        "date-time": lambda text: (
            re.fullmatch(rf"\d{{4}}-\d\d-\d\d[Tt ]{time}", text)
            and datetime.date.fromisoformat(text[:10])
            and _clock(text[11:19])
        ),
        "duration": lambda text: re.fullmatch(
            r"P(?=[\dT])(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", text
        ),
        "hostname": lambda text: (
            len(text) <= 253 and re.fullmatch(r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", text)
        ),
        "uri": lambda text: re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text),
    }
    for name, check in checks.items():
        checker.checks(name, raises=ValueError)(
            lambda value, check=check: not isinstance(value, str) or bool(check(value))
        )
    return checker


def _clock(text: str) -> bool:
    hours, minutes, seconds = map(int, text.split(":"))
    return hours < 24 and minutes < 60 and seconds <= 60


def _is_json(text: str, schema: Any) -> bool:
    try:
        return valid(schema, json.loads(text))
    except ValueError:
        return False


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": PERSON}, lambda text: _is_json(text, PERSON)),
    "json_object": ({"json_object": True}, lambda text: _is_json(text, {"type": "object"})),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "ebnf": ({"grammar": EBNF}, _parenthesised),
    "lark": (
        {"grammar": LARK},
        lambda text: re.fullmatch(r"[0-9\[\],]+", text) and text.count("[") == text.count("]"),
    ),
    "structural_tag": ({"structural_tag": TAG}, _tagged),
    "compact": (
        {"json": PERSON, "disable_any_whitespace": True},
        lambda text: (
            _is_json(text, PERSON)
            and text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        ),
    ),
}
"""Kind -> (constraint, oracle of a finished output)."""
