"""The connector ``multi``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_p2p import KEYS, closing, fetch, save

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.decode_bench import DecodeBenchConnector
from headrace_distributed.kv_connectors.file import FileConnector
from headrace_distributed.kv_connectors.multi import MultiConnector
from headrace_distributed.kv_connectors.offload import OffloadConnector
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_testing.engine.kv_connectors import KVConnectorConformance, content_of, load

CLASSES = {"file": FileConnector, "offload": OffloadConnector, "p2p": P2PConnector,
           "bench": DecodeBenchConnector, "odd": dict}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever distributions are installed."""
    monkeypatch.setattr(plugins, "load", lambda group, name: CLASSES[name])


def part(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    own = {"kv_port": 0, "kv_buffer_size": 1 << 20} if name == "p2p" else {}
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra, **own}


def multi(*parts: Any, **own: Any) -> MultiConnector:
    stated = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **own}
    return MultiConnector({**stated, "kv_connector_extra_config": {"connectors": list(parts)}})


def files(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    return part("file", role, shared_storage_path=str(folder))


MEMORY = part("offload", cpu_bytes_to_use=1 << 16)


class TestMulti(KVConnectorConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def connected(self) -> Any:
        return closing(multi(MEMORY, files(self.path)))


def test_blocks_are_saved_to_all_and_loaded_from_the_first(tmp_path: Path) -> None:
    with closing(multi(files(tmp_path / "a"), files(tmp_path / "b"))) as made:
        save(made, 1, 2, 3)
    [first] = (tmp_path / "a").glob(f"*/{KEYS[1].hex()}.kv")
    assert len(list((tmp_path / "b").rglob("*.kv"))) == 3
    first.write_bytes(b"damaged")
    with closing(multi(files(tmp_path / "a"), files(tmp_path / "b"))) as made:
        assert load(made, KEYS[1]) == content_of(1), "from the second"
        assert load(made, KEYS[2]) == content_of(2)


def test_each_has_a_role(tmp_path: Path) -> None:
    with closing(multi(files(tmp_path / "a", "kv_producer"), MEMORY)) as made:
        save(made, 1)
        assert made.contains(KEYS[1])
    with closing(multi(files(tmp_path / "a", "kv_producer"))) as made:
        assert not made.contains(KEYS[1])
        assert load(made, KEYS[1]) is None
    with closing(multi(files(tmp_path / "a", "kv_consumer"))) as made:
        assert load(made, KEYS[1]) == content_of(1)
        save(made, 2)
        assert not made.contains(KEYS[2])


def test_what_one_does_not_fetch_another_does(tmp_path: Path) -> None:
    with closing(multi(part("p2p", "kv_producer"), MEMORY)) as giver:
        save(giver, 1, 2)
        with closing(multi(files(tmp_path, "kv_consumer"), part("p2p", "kv_consumer"))) as taker:
            assert fetch(taker, giver.address(), 1, 2, 3) == [1, 2]
            assert giver.address()["remote_port"] > 0
            assert taker.address() == {}
            assert not taker._turns


def test_blocks_are_offered_as_the_most_eager_wants_them(tmp_path: Path) -> None:
    with closing(multi(MEMORY), multi(MEMORY, files(tmp_path))) as (calm, eager):
        assert not calm.saves_full_blocks
        assert eager.saves_full_blocks


def test_all_are_closed_where_one_fails_to(tmp_path: Path) -> None:
    class Stubborn(FileConnector):
        def close(self) -> None:
            raise OSError("it stays open")

    CLASSES["stubborn"] = Stubborn
    try:
        made = multi(part("p2p"), {**files(tmp_path), "kv_connector": "stubborn"})
        port = made.address()["remote_port"]
        with pytest.raises(OSError, match="it stays open"):
            made.close()
        again: KVConnector = multi({**part("p2p"), "kv_port": port})
        again.close()
    finally:
        del CLASSES["stubborn"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"connectors = \[\]: must be a list of settings"),
        ([3], r"connectors\[0\] = 3: must be an object"),
        ([{**MEMORY, "kv_role": "x"}], r"connectors\[0\].kv_role = 'x': must be kv_producer, kv_c"),
        ([{**MEMORY, "kv_connector": 1}], r"connectors\[0\].kv_connector = 1: must be the name"),
        ([{**MEMORY, "kv_load_failure_policy": "fail"}], r"policy = 'fail': must be left out, or 'rec"),
        ([MEMORY, part("offload")], r"cpu_bytes_to_use = None: must be bytes of memory"),
        ([part("odd")], r"connectors\[0\].kv_connector = 'odd': must be a subclass"),
        ([part("p2p"), part("p2p")], r"must be at most one whose blocks other engines ask for"),
        ([{**MEMORY, "kv_port": 1}], r"kv_port = 1: must be left out for this connector"),
    ],
)  # fmt: skip
def test_wrong_settings(parts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        multi(*parts)


def test_each_of_them_must_hold_a_block() -> None:
    with closing(multi(part("offload", cpu_bytes_to_use=99), MEMORY)) as made:
        made.check_block(99)
        with pytest.raises(ConfigError, match="cpu_bytes_to_use = 99: must be at least 100"):
            made.check_block(100)
