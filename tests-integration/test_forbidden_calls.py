"""No package calls what can run code from outside, or waits without a limit."""

from __future__ import annotations

import ast

import pytest
from forbidden import ALLOWED, _Scan, findings


@pytest.mark.req("SEC-01")
@pytest.mark.req("SEC-03")
@pytest.mark.req("SEC-04")
@pytest.mark.req("SEC-15")
@pytest.mark.req("REL-20")
def test_no_package_makes_a_forbidden_call():
    bad = [f for f in findings() if not any(key in ALLOWED for key in f.keys)]
    assert not bad, "\n".join(f"{f.file}:{f.line}: {f.what}" for f in bad)


def test_no_exception_is_stale():
    used = {key for finding in findings() for key in finding.keys}
    assert set(ALLOWED) <= used


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("from dill import loads", "import dill"),
        ("eval(x)", "eval"),
        ("def f():\n exec(x)", "exec"),
        ("torch.load(f)", "torch.load without weights_only"),
        ("torch.load(f, weights_only=False)", "torch.load without weights_only"),
        ("load(trust_remote_code=True)", "trust_remote_code=True"),
        ("run(x, shell=True)", "shell=True"),
        ("ast.literal_eval(x)", "ast.literal_eval"),
        ("from jinja2 import Environment", "jinja2 environment"),
        ("jinja2.sandbox.SandboxedEnvironment()", "jinja2 environment"),
        ("def f(t):\n t.join()", "f: wait join"),
    ],
)
def test_the_scan_sees(source, what):
    assert [found for found, _ in _Scan().of(ast.parse(source))] == [what]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(f, weights_only=True)",
        "t.join(5)",
        "async def f(e):\n await e.wait()",
        "async def f(e):\n create_task(e.wait())",
        "', '.join(x)",
        "OWNER.get()",
    ],
)
def test_the_scan_leaves_alone(source):
    assert _Scan().of(ast.parse(source)) == []
