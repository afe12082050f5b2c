"""The words of ``--lora-modules``."""

from __future__ import annotations

import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings, create_app
from headrace_server.lora.modules import AdapterModule, parse_modules
from headrace_testing.fakes.engine import FakeEngine


def test_three_forms() -> None:
    given = [
        "sql=/a/b=c",
        '{"name": "chat", "path": "/c", "base_model_name": "llama"}',
        '[{"name": "x", "path": "d"}, {"name": "y", "path": "e", "base_model_name": null}]',
    ]
    assert parse_modules(given) == [
        AdapterModule("sql", "/a/b=c"),
        AdapterModule("chat", "/c", "llama"),
        AdapterModule("x", "d"),
        AdapterModule("y", "e"),
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sql", "name=path"),
        ("sql=", "name=path"),
        ("=path", "name=path"),
        (" sql =path", "printable"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[" + "1" * 5000 + "]", "not valid JSON"),
        ('{"name": "x"}', "name=path"),
        ('{"name": "x", "path": 3}', "name=path"),
        ('{"name": "x", "path": "p", "rank": "3"}', "field 'rank' is unknown; must be name=path"),
        ('{"name": "x", "pth": "p"}', "field 'pth' is unknown"),
        ("[3]", "name=path"),
        ('{"name": "x\\n", "path": "p"}', "printable"),
    ],
)
def test_other_words_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ServerSettings(lora_modules=(word,))
    assert caught.value.field == "lora_modules"


def test_names_must_differ(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="'a' is given twice"):
        ServerSettings(lora_modules=("a=1", '{"name": "a", "path": "2"}'))
    with pytest.raises(ConfigError, match="the model's own"):
        create_app(engine, ServerSettings(lora_modules=("fake-model=1",)))


def test_an_engine_that_takes_none() -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        create_app(FakeEngine(), ServerSettings(lora_modules=("a=1",)))
