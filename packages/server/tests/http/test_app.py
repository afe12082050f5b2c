"""Assembly: routes, OpenAPI, settings, the small routes, metrics."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace_core.errors import ConfigError, PluginNotFound
from headrace_server import ServerSettings, create_app
from headrace_server.routes import health, metrics, models, pooling, tokenize
from headrace_server.routes import openai as openai_routes
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.http_routers import RouterConformance


class _Ours(RouterConformance):
    def settings(self) -> ServerSettings:
        return ServerSettings(enable_tokenizer_info_endpoint=True)


class TestHealthRouter(_Ours):
    router = health.ROUTER


class TestMetricsRouter(_Ours):
    router = metrics.ROUTER


class TestModelsRouter(_Ours):
    router = models.ROUTER


class TestOpenAIRouter(_Ours):
    router = openai_routes.ROUTER


class TestEmbeddingsRouter(_Ours):
    router = pooling.EMBEDDINGS


class TestClassifyRouter(_Ours):
    router = pooling.CLASSIFY


class TestScoreRouter(_Ours):
    router = pooling.SCORE


class TestPoolingRouter(_Ours):
    router = pooling.POOLING


class TestTokenizeRouter(_Ours):
    router = tokenize.ROUTER


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, headrace_server, headrace_server.routes.openai, "
        "headrace_server.tool_parsers.formats.hermes, "
        "headrace_server.reasoning_parsers.formats.qwen3\n"
        "from headrace_testing.fakes.engine import FakeEngine\n"
        "headrace_server.create_app(FakeEngine(), headrace_server.ServerSettings())\n"
        "heavy = {'torch', 'transformers', 'numpy', 'headrace_engine', 'headrace_models'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_reading_the_settings_loads_no_web_stack() -> None:
    code = (
        "import sys\nfrom headrace_server.settings import ServerSettings\n"
        "sys.exit(', '.join(sorted({'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_document_matches_what_is_served(connect: Any) -> None:
    client = connect()
    document = (await client.get("/openapi.json")).json()
    paths = document["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(paths)
    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= set(paths)
    assert not {"/v1/embeddings", "/tokenizer_info"} & set(paths)
    for path, methods in paths.items():
        for method in methods:
            answer = await client.request(method.upper(), path.replace("{name}", "fake-model"))
            assert answer.status_code not in (404, 405), (method, path)
    completion = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"temperature", "structured_outputs", "use_beam_search"} <= set(completion)
    assert not {"suffix", "logits_processors"} & set(completion)


async def test_docs_can_be_switched_off(connect: Any) -> None:
    client = connect(disable_fastapi_docs=True)
    for path in ("/docs", "/docs/start.js", "/openapi.json"):
        assert (await client.get(path)).status_code == 404
        assert (await connect().get(path)).status_code == 200


async def test_routes_that_the_model_cannot_serve(connect: Any) -> None:
    client = connect()
    for path in ("/v1/embeddings", "/v1/audio/transcriptions", "/rerank", "/pooling"):
        answer = await client.post(path, json={})
        assert answer.status_code == 400
        assert "does not support" in answer.json()["error"]["message"]
    pooling = connect(FakeEngine(model=fake_served_model(tasks=("embed",))))
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (await pooling.post(path, json={"prompt": "a"})).status_code == 400
    assert "/v1/completions" not in (await pooling.get("/openapi.json")).json()["paths"]
    assert (await pooling.get("/v1/models")).status_code == 200


async def test_models(connect: Any) -> None:
    model = fake_served_model(name="A", names=("A", "B/b"), root="/weights/a")
    client = connect(FakeEngine("x", model=model))
    cards = (await client.get("/v1/models")).json()["data"]
    assert [c["id"] for c in cards] == ["A", "B/b"]
    assert cards[0]["root"] == "/weights/a"
    assert cards[0]["max_model_len"] == 4096
    assert cards[0]["supported_tasks"] == ["generate"]
    assert cards[0]["permission"][0]["id"].startswith("modelperm-")
    assert (await client.get("/v1/models/B/b")).json()["id"] == "B/b"
    assert (await client.get("/v1/models/C")).status_code == 404
    for name in ("A", "B/b"):
        answer = await client.post("/v1/completions", json={"prompt": "a", "model": name})
        assert answer.json()["model"] == "A"


async def test_tokenize(connect: Any) -> None:
    client = connect(FakeEngine("x"))
    answer = (await client.post("/tokenize", json={"prompt": "aé"})).json()
    assert answer["count"] == 3
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] is None
    body = {"prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == [97, 233]
    assert answer["token_strs"] == ["a", "é"]
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "aé"}
    refused = await client.post("/detokenize", json={"tokens": [0x110002]})
    assert refused.status_code == 400


async def test_tokenize_a_chat(connect: Any) -> None:
    client = connect(FakeEngine("x"))
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    count = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    chat = await client.post("/v1/chat/completions", json={"messages": messages})
    assert chat.json()["usage"]["prompt_tokens"] == count
    refused = await client.post("/tokenize", json={"messages": messages, "chat_template": "{{1}}"})
    assert refused.json()["error"]["param"] == "chat_template"
    refused = await client.post("/tokenize", json={"prompt": "a", "mm_processor_kwargs": {}})
    assert refused.json()["error"]["param"] == "mm_processor_kwargs"


async def test_without_a_tokenizer(connect: Any) -> None:
    engine = FakeEngine("x", model=fake_served_model(has_tokenizer=False))
    client = connect(engine)
    assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 400
    assert (await client.post("/v1/completions", json={"prompt": [97]})).status_code == 200
    assert engine.requests[0].params.detokenize is False


async def test_tokenizer_info(connect: Any) -> None:
    model = fake_served_model(tokenizer_info={"tokenizer_class": "T"})
    client = connect(FakeEngine(model=model), enable_tokenizer_info_endpoint=True)
    assert (await client.get("/tokenizer_info")).json() == {"tokenizer_class": "T"}
    assert (await connect().get("/tokenizer_info")).status_code == 404


async def test_health(connect: Any) -> None:
    engine = FakeEngine()
    client = connect(engine)
    for path in ("/health", "/livez", "/readyz", "/ping"):
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await client.post("/ping")).status_code == 200
    assert (await client.get("/version")).json()["version"] == health.installed_version()
    assert (await client.get("/load")).status_code == 400
    engine.kill()
    for path in ("/health", "/livez", "/readyz", "/ping"):
        assert (await client.get(path)).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


async def test_request_id_headers(connect: Any) -> None:
    client = connect(enable_request_id_headers=True)
    answer = await client.get("/health", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    first, second = [(await client.get("/none")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    assert len(bytes.fromhex(first)) == 16
    assert "x-request-id" not in (await connect().get("/health")).headers


async def test_request_log(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headrace_server.observability.request_log"):
        client = connect(enable_log_requests=True, max_log_len=4)
        body = {"prompt": "abcdefgh", "request_id": "mine", "temperature": 0.5}
        await client.post("/v1/completions", json=body)
        await connect().post("/v1/completions", json=body)
    first, second = caplog.records
    assert first.levelno == logging.INFO
    assert "cmpl-mine" in first.getMessage()
    assert "temperature=0.5" in first.getMessage()
    assert second.getMessage().endswith("'abcd'")


class TestMetrics:
    """GET /metrics."""

    async def read(self, client: Any) -> dict[str, float]:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("le",)}
                if "model_name" in labels:
                    assert labels.pop("model_name") == "fake-model"
                    assert labels.pop("engine") == "0"
                found[sample.name + "".join(f",{v}" for v in labels.values())] = sample.value
        return found

    async def test_names(self, connect: Any) -> None:
        client = connect(FakeEngine("x"))
        await client.post("/v1/completions", json={"prompt": "a"})
        found = await self.read(client)
        for name in (
            "num_requests_running", "num_requests_waiting", "num_requests_suspended",
            "kv_cache_usage_perc",
        ):  # fmt: skip
            assert f"headrace:{name}" in found
        for name in (
            "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries",
            "prefix_cache_hits",
        ):  # fmt: skip
            assert f"headrace:{name}_total" in found
        for name in (
            "time_to_first_token_seconds", "inter_token_latency_seconds",
            "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
            "request_queue_time_seconds", "request_prefill_time_seconds",
            "request_decode_time_seconds", "request_inference_time_seconds",
            "request_prompt_tokens", "request_generation_tokens",
            "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
            "request_prefill_kv_computed_tokens", "iteration_tokens_total",
        ):  # fmt: skip
            assert found[f"headrace:{name}_count"] >= 1, name
        assert any(name.startswith("headrace:cache_config_info") for name in found)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_values(self, connect: Any, stream: bool) -> None:
        client = connect(FakeEngine("sixsix", cached_tokens=2))
        body = {"prompt": "abcd", "stream": stream, "add_special_tokens": False}
        await client.post("/v1/completions", json=body)
        found = await self.read(client)
        assert found["headrace:generation_tokens_total"] == 7
        assert found["headrace:prompt_tokens_total"] == 4
        assert found["headrace:request_generation_tokens_sum"] == 7
        assert found["headrace:request_max_num_generation_tokens_sum"] == 7
        assert found["headrace:request_prefill_kv_computed_tokens_sum"] == 2
        assert found["headrace:request_params_max_tokens_sum"] == 16
        assert found["headrace:request_success_total,stop"] == 1
        assert found["headrace:iteration_tokens_total_sum"] == 7
        assert found["headrace:inter_token_latency_seconds_count"] == (6 if stream else 1)

    async def test_http(self, connect: Any) -> None:
        client = connect(FakeEngine("x"))
        await client.post("/v1/completions", json={"prompt": "a"})
        await client.post("/v1/completions", json={})
        await client.get("/health")
        await client.get("/made-up")
        found = await self.read(client)
        assert found["headrace:http_requests_total,/v1/completions,POST,200"] == 1
        assert found["headrace:http_requests_total,/v1/completions,POST,400"] == 1
        assert found["headrace:http_requests_total,none,GET,404"] == 1
        assert not [name for name in found if "/health" in name]
        assert found["headrace:http_request_size_bytes_sum,/v1/completions,POST"] >= 14

    async def test_prefix(self, connect: Any) -> None:
        client = connect(FakeEngine("x"), metrics_prefix="vllm:")
        text = (await client.get("/metrics")).text
        assert "vllm:num_requests_running" in text
        assert "headrace" not in text

    async def test_applications_share_nothing(self, connect: Any) -> None:
        first, second = connect(FakeEngine("x")), connect(FakeEngine("x"))
        await first.post("/v1/completions", json={"prompt": "a"})
        assert (await self.read(second))["headrace:request_params_n_count"] == 0


def test_settings_have_help() -> None:
    for field in dataclasses.fields(ServerSettings):
        assert field.metadata["help"], field.name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000), ("port", -1), ("drain_timeout", -1.0), ("api_key", "text"),
        ("api_key", ("",)), ("api_key_scope", "most"), ("root_path", "x"), ("root_path", "/x/"),
        ("metrics_prefix", "9"), ("metrics_prefix", "a b"), ("uvicorn_log_level", "loud"),
        ("ssl_keyfile", "k"), ("ssl_cert_reqs", 2), ("enable_auto_tool_choice", True),
        ("tool_call_parser", "hermes"), ("response_role", ""), ("h11_max_header_count", 0),
        ("chat_template_content_format", "xml"), ("max_log_len", -1),
    ],
)  # fmt: skip
def test_bad_settings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**{name: value})
    assert caught.value.field


def test_bad_settings_of_the_app(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        create_app(FakeEngine(), ServerSettings(chat_template="no/such/file"))
    with pytest.raises(PluginNotFound, match="qwen3"):
        create_app(FakeEngine(), ServerSettings(reasoning_parser="qwen4"))
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    app = create_app(FakeEngine(), ServerSettings(chat_template=str(file)))
    assert app.state.headrace.chat_template == "{{ messages }}"
