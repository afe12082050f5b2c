"""The connectors ``nixl`` and ``mooncake``, where their libraries are installed."""

from __future__ import annotations

import importlib
import logging.config
from typing import Any

import pytest
from test_p2p import KEYS, closing, fetch, save
from test_rank_connectors import free_ports

from headrace_core.errors import ConfigError
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_distributed.kv_connectors.p2p.mooncake import MooncakeConnector
from headrace_distributed.kv_connectors.p2p.nixl import NixlConnector, _keeping_log_handlers
from headrace_testing.engine.kv_connectors import BLOCK_BYTES, KVConnectorConformance

KINDS: dict[str, tuple[type[P2PConnector], dict[str, Any], str]] = {
    "nixl": (NixlConnector, {}, "nixl._api"),
    "mooncake": (MooncakeConnector, {"trust_network": True}, "mooncake.engine"),
}


def made(kind: str, role: str = "kv_both", **own: Any) -> P2PConnector:
    connector, extra, library = KINDS[kind]
    try:
        importlib.import_module(library)
    except ImportError as error:
        pytest.skip(f"{library} cannot be imported: {error}")
    stated = {"kv_role": role, "kv_port": 0, "kv_buffer_size": 1 << 20, **own}
    return connector({**stated, "kv_connector_extra_config": extra})


@pytest.mark.parametrize("kind", KINDS)
class TestRemoteMemory(KVConnectorConformance):
    @pytest.fixture(autouse=True)
    def choose(self, kind: str) -> None:
        self.kind = kind

    def connected(self) -> Any:
        return closing(made(self.kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_read_from_another_engine(kind: str) -> None:
    with closing(made(kind, "kv_producer"), made(kind, "kv_consumer")) as (giver, taker):
        save(giver, *range(300))
        assert fetch(taker, giver.address(), *range(250)) == list(range(250))
        assert fetch(taker, giver.address(), 280, 299, 7, 8) == [280, 299, 7, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_reads_the_memory_of_two(kind: str) -> None:
    of_both = {"num_ranks": 2, "engine_id": "two", "kv_port": free_ports(2)}
    with (
        closing(made(kind, "kv_producer", rank=0, **of_both)) as first,
        closing(made(kind, "kv_producer", rank=1, **of_both)) as second,
        closing(made(kind, "kv_consumer", kv_head_parts=2)) as taker,
    ):
        save(first, *range(0, 280, 2))
        save(second, *range(1, 280, 2))
        every = list(range(280))
        assert fetch(taker, first.address(), *every) == every


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_was_written_over_meanwhile_is_not_believed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made(kind, "kv_producer"), made(kind, "kv_consumer")) as (giver, taker):
        save(giver, 1, 2)
        slot = giver._store.pin(KEYS[2])
        assert slot is not None
        giver._store.digest(KEYS[2], slot)
        giver._store.view(slot)[9:10] = b"!"
        giver._store.unpin(slot)
        assert fetch(taker, giver.address(), 1, 2) == [1]
        assert fetch(taker, giver.address(), 1) == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_comes_back_is_read_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace_distributed.kv_connectors.p2p import fetcher

    monkeypatch.setattr(fetcher, "REST_SECONDS", 0.0)
    with closing(made(kind, "kv_consumer")) as taker:
        for n in range(2):
            with closing(made(kind, "kv_producer")) as giver:
                save(giver, n)
                where = giver.address()
                assert fetch(taker, where, n) == [n]
            assert fetch(taker, where, n, size=BLOCK_BYTES) == []


@pytest.mark.parametrize(
    ("kind", "own", "extra", "message"),
    [
        (NixlConnector, {}, {"backends": ["GDS"]}, r"backends = \['GDS'\]: must be \['UCX'\]"),
        (NixlConnector, {}, {"peers": ["10.1.1.1:9"], "secret_file": "FILE"},
         r"trust_network = None: must be true: whoever reaches the ports of UCX"),
        (MooncakeConnector, {}, {}, r"trust_network = None: must be true: .* ports of Mooncake"),
        (MooncakeConnector, {}, {"mooncake_protocol": "rdma"}, r"_protocol = 'rdma': must be 'tcp'"),
    ],
)  # fmt: skip
def test_wrong_settings(kind: Any, own: Any, extra: Any, message: str, tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 16)
    extra = {k: str(secret) if v == "FILE" else v for k, v in extra.items()}
    with pytest.raises(ConfigError, match=message):
        kind({"kv_role": "kv_both", "kv_connector_extra_config": extra, "kv_port": 0, **own})


def test_handlers_of_the_programs_log_outlive_the_librarys_import() -> None:
    class Handler(logging.StreamHandler[Any]):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    handler, configure = Handler(), logging.config.dictConfig
    with _keeping_log_handlers():
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    assert not handler.is_closed
    assert logging.config.dictConfig is configure
