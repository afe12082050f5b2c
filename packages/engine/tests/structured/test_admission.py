"""Constraints compile in processes that are killed: hostile ones end with a refusal."""

import json
import os
import threading

import pytest

from headrace_core.errors import PluginError, RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarSpec
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.admission import MAX_VERDICTS, Admission
from headrace_engine.structured.backend_loading import backend_class
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.compile_process import CompileProcesses
from headrace_testing.engine.grammars import word_vocabulary
from headrace_testing.waiting import wait_until


@pytest.fixture(scope="module")
def admission():
    made = Admission(StructuredOutputsConfig(compile_processes=1), word_vocabulary)
    yield made
    made.close()


def children(admission):
    return [c.process._process for c in admission._processes._children if c.process.running]


def refused(admission, **constraint):
    with pytest.raises(RequestError) as caught:
        admission.admit(StructuredOutputsParams(**constraint))
    return caught.value


def test_a_constraint_is_admitted_once(admission, monkeypatch):
    params = StructuredOutputsParams(json={"type": "object"})
    assert admission.known(params) is None
    first = admission.admit(params)
    assert first.grammar.backend == "guidance"
    assert first.size_bytes > 0
    monkeypatch.setattr(admission._processes, "compile", None)
    assert admission.admit(params) == admission.known(params) == first
    assert len(children(admission)) == 1


@pytest.mark.req("SEC-14")
@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems", "#/properties/a"),
        ({"properties": {"a": {"pattern": "a(?=b)"}}}, "pattern", "#/properties/a"),
        ({"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 3}, "minItems": 1},
         "minimum", "#/items"),
        ({"anyOf": [{"oneOf": [{"type": "number"}, {"type": "integer"}]}]}, "oneOf", "#/anyOf/0"),
        ({"$ref": "http://example.com/schema"}, "$ref", "#"),
    ],
)  # fmt: skip
def test_refusals_name_keyword_and_pointer(admission, schema, keyword, pointer):
    error = refused(admission, json=schema)
    assert isinstance(error, UnsupportedFeature)
    assert f"{keyword!r} at {pointer!r}" in str(error)
    assert error.param == "structured_outputs.json"


def test_what_no_text_satisfies_is_refused(admission):
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert "no text" in str(refused(admission, json=loop))
    assert "never ends" in str(refused(admission, grammar="start: a\na: start"))


def test_a_pinned_backend_without_fallback_says_what_it_lacks():
    pytest.importorskip("outlines_core")
    config = StructuredOutputsConfig(backend="outlines", disable_fallback=True)
    admission = Admission(config, word_vocabulary)
    try:
        schema = {"type": "integer", "minimum": 3}
        assert "'minimum' at '#'" in str(refused(admission, json=schema))
        config = StructuredOutputsConfig(backend="outlines")
        other = Admission(config, word_vocabulary)
        admitted = other.admit(StructuredOutputsParams(json=schema))
        assert admitted.grammar.backend == "guidance"
        strict = StructuredOutputsParams(json=schema, disable_fallback=True)
        with pytest.raises(UnsupportedFeature, match="backend outlines"):
            other.admit(strict)
        other.close()
    finally:
        admission.close()


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize(
    ("backend", "constraint", "served_by"),
    [
        ("xgrammar", {"regex": r"\d+"}, "guidance"),
        ("xgrammar", {"regex": "[0-9]+"}, "xgrammar"),
        ("xgrammar", {"grammar": 'root ::=\n "a" |\n "b"'}, "xgrammar"),
        ("xgrammar", {"grammar": 'start: "a"'}, "guidance"),
        ("outlines", {"regex": "^a$"}, "outlines"),
        ("outlines", {"regex": "(^a)b"}, "guidance"),
        ("lm-format-enforcer", {"regex": "(?i)a"}, "guidance"),
    ],
)
def test_what_a_backend_cannot_hold_another_serves(backend, constraint, served_by):
    pytest.importorskip(backend_class(backend).library)
    admission = Admission(
        StructuredOutputsConfig(backend=backend, compile_processes=1), word_vocabulary
    )
    try:
        assert admission.admit(StructuredOutputsParams(**constraint)).grammar.backend == served_by
    finally:
        admission.close()


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_a_malformed_constraint_is_refused_in_the_same_words_by_all(admission, backend):
    pytest.importorskip(backend_class(backend).library)
    other = Admission(
        StructuredOutputsConfig(backend=backend, compile_processes=1), word_vocabulary
    )
    try:
        for constraint in (
            {"regex": "a^b"}, {"regex": r"ab\Z"}, {"regex": "(?=a)ab"}, {"regex": "(a"}, {"regex": r"\ud83d"},
            {"regex": "a\\"}, {"grammar": 'root ::= "a" root'}, {"grammar": "root ::= b"},
        ):  # fmt: skip
            error = refused(other, **constraint)
            assert str(error) == str(refused(admission, **constraint))
            assert type(error) is RequestError
    finally:
        other.close()


def test_a_byte_order_mark_before_a_grammar_or_schema_is_not_text(admission):
    for kind, text in (("grammar", 'root ::= "a"'), ("grammar", 'start: "a"'), ("json", "{}")):
        params = StructuredOutputsParams(**{kind: "\ufeff" + text})
        assert admission.admit(params).size_bytes


def test_messages_are_in_our_words(admission):
    either = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
    said = str(refused(admission, json={"properties": {"a": either}}))
    assert "'oneOf' at '#/properties/a': two alternatives may hold for the same value" in said
    assert "coerce" not in said
    error = refused(admission, json_object=True, whitespace_pattern="[ ]{0,100000}")
    assert str(error) == "structured_outputs.whitespace_pattern: too complex: must repeat less"
    cured = {"oneOf": [
        {"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"
    ]}  # fmt: skip
    for schema in ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, cured):
        admission.admit(StructuredOutputsParams(json=schema))


def test_a_library_that_is_broken_is_passed_over_once_and_for_all(monkeypatch, caplog):
    asked = []

    def compile_(spec):
        asked.append(spec.backend)
        raise PluginError("it does not import")

    admission = Admission(StructuredOutputsConfig(), word_vocabulary)
    monkeypatch.setattr(admission._processes, "compile", compile_)
    for _ in range(2):
        with pytest.raises(UnsupportedFeature, match="no grammar backend"):
            admission.admit(StructuredOutputsParams(regex="a"))
    assert len(asked) == len(set(asked)) >= 1
    assert "cannot be used" in caplog.text
    pinned = Admission(StructuredOutputsConfig(backend="guidance"), word_vocabulary)
    monkeypatch.setattr(pinned._processes, "compile", compile_)
    with pytest.raises(PluginError):
        pinned.admit(StructuredOutputsParams(regex="a"))


HOSTILE = {
    "repeated": [
        "(a{1,1000}){1,1000}",
        "((a{0,100}){0,100}){0,100}",
        "((((a{20}){20}){20}){20}){20}",
    ],
    "nested": ["(" * 2000 + "a" + ")" * 2000, "(?:" * 1500 + "a" + ")*" * 1500],
    "ambiguous": ["(a*)*b", "(.*a){30}x", "[ab]*a[ab]{40}", "(a|aa)+" * 300 + "b"],
    "classes": ["\\p{L}{1,4000}", "[^\\x00-\\x7F]{0,5000}\\d{0,3000}", "(?i)" + "ß" * 4000],
    "malformed": ["(", "[", "a{", "*", "\\", "(?P<", "a{2,1}", "[z-a]", "(?<=a)b", "\\1"],
}


@pytest.mark.req("SEC-14")
def test_hostile_constraints_end_in_time_and_nothing_breaks():
    """Two hundred of them: an answer or a refusal each, within the limit, and the next one works."""
    config = StructuredOutputsConfig(compile_seconds=2.0, compile_processes=1)
    admission = Admission(config, word_vocabulary)
    patterns = [p for group in HOSTILE.values() for p in group]
    schemas = [{"type": "string", "pattern": p} for p in patterns if len(p) <= 4000]
    many = {f"p{i}": {"type": "string", "enum": [f"v{j}" for j in range(100)]} for i in range(300)}
    schemas += [
        {"properties": many},
        {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(14)]},
        {"type": "array", "minItems": 10**6, "items": {}},
        {"type": "string", "minLength": 10**6},
        {"type": "integer", "multipleOf": 10**30},
        {"enum": list(range(20_000))},
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + k) % 90}"} for k in range(8)]}
                   for i in range(90)}, "$ref": "#/$defs/d0"},
        *({"type": "object", "required": [f"k{i}" for i in range(n)]} for n in range(50, 2000, 50)),
        *({"type": "object", "minProperties": n} for n in range(1000, 40_000, 1000)),
        *({"type": "string", "pattern": f"^({'|'.join('ab' * i for i in range(1, n))})*$"}
          for n in range(10, 40)),
    ]  # fmt: skip
    grammars = [
        "root ::= root", "root ::= root root | \"\"", 'root ::= "a" root "b" | root | ""',
        "root ::= " + "(" * 3000, 'root ::= "a"{1,100000}', "start: " + "x " * 500,
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + "\nr60 ::= \"a\"\nroot ::= r0",
        *(f'root ::= ("a" | "b"){{{n}}}' for n in range(1000, 20_000, 1000)),
        *("root ::= " + " | ".join(f'"{i}" x{i}' for i in range(n)) for n in range(2, 40)),
    ]  # fmt: skip
    jobs = [{"regex": p} for p in patterns] + [{"json": s} for s in schemas]
    jobs += [{"grammar": g} for g in grammars]
    assert len(jobs) >= 200
    answers, said = {"admitted": 0, "refused": 0}, []
    try:
        for job in jobs:
            try:  # one that never ends is ended by the limit of a test
                admission.admit(StructuredOutputsParams(**job, disable_fallback=True))
                answers["admitted"] += 1
            except RequestError as error:
                answers["refused"] += 1
                said.append(str(error))
        assert admission.admit(StructuredOutputsParams(regex="still [a-z]+"))
    finally:
        admission.close()
    assert answers["refused"] > 50
    assert not [text for text in said if len(text) > 700 or "panic" in text]


@pytest.mark.req("SEC-14")
def test_a_compilation_that_takes_too_long_is_killed_and_the_next_one_works():
    pytest.importorskip("outlines_core")
    processes = CompileProcesses(word_vocabulary, count=1, seconds=2.0, memory_bytes=256 << 20)
    try:
        processes.compile(GrammarSpec("outlines", "regex", "ab"))
        slow = GrammarSpec("outlines", "regex", "[ab]*a[ab]{22}")
        with pytest.raises(RequestError, match=r"within 2 s|memory"):
            processes.compile(slow)
        processes.compile(GrammarSpec("outlines", "regex", "abc"))
    finally:
        processes.close()


def test_closing_ends_a_compilation_that_runs():
    pytest.importorskip("outlines_core")
    processes = CompileProcesses(word_vocabulary, count=1, seconds=60, memory_bytes=1 << 30)
    processes.prepare("outlines")
    said = []

    def compile_slowly():
        try:
            processes.compile(GrammarSpec("outlines", "regex", "[ab]*a[ab]{24}"))
        except RequestError as error:
            said.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    wait_until(lambda: any(child.process.running for child in processes._children))
    processes.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(said) == 1
    assert not any(child.process.running for child in processes._children)


@pytest.mark.req("SEC-14")
def test_a_compilation_that_takes_too_much_memory_ends():
    pytest.importorskip("outlines_core")
    processes = CompileProcesses(word_vocabulary, count=1, seconds=30, memory_bytes=16 << 20)
    try:
        with pytest.raises(RequestError, match="memory"):
            processes.compile(GrammarSpec("outlines", "regex", "[ab]*a[ab]{18}"))
        processes.compile(GrammarSpec("outlines", "regex", "abc"))
    finally:
        processes.close()


@pytest.mark.req("SEC-14")
@pytest.mark.req("SEC-16")
def test_many_distinct_schemas_leave_memory_flat(admission):
    def resident(pid):
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def admit(numbers):
        for i in numbers:
            schema = {"type": "object", "properties": {f"name{i}": {"type": "string"}}}
            admission.admit(StructuredOutputsParams(json=schema))

    admit(range(200))
    (child,) = children(admission)
    before = (resident(os.getpid()), resident(child.pid))
    admit(range(200, 700))
    after = (resident(os.getpid()), resident(child.pid))
    assert all(a - b < 24 << 20 for a, b in zip(after, before))
    assert len(admission._verdicts) <= MAX_VERDICTS


def test_equal_constraints_at_once_compile_once(admission, monkeypatch):
    calls, compile_ = [], admission._processes.compile
    released = threading.Event()

    def slow(spec):
        calls.append(spec)
        released.wait(60)
        return compile_(spec)

    monkeypatch.setattr(admission._processes, "compile", slow)
    params = StructuredOutputsParams(regex="once [0-9]+")
    coming, found = [], []

    def admit():
        coming.append(1)
        found.append(admission.admit(params))

    threads = [threading.Thread(target=admit) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(coming) == 6 and calls)
    released.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6
    assert len(calls) == 1


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "object"}},
        {"json_object": True},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "object"}}}},
    ],
)
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "unclosed group"),
        ("a(?=b)", "look-ahead"),
        ("x*", "'x*' matches more than white space"),
        (r"[ \x0b]", "matches more than white space"),
        ("([ ]{0,3000}\n){0,3000}", "too complex"),
    ],
)
def test_a_pattern_of_white_space_is_checked(admission, constraint, pattern, said):
    error = refused(admission, **constraint, whitespace_pattern=pattern)
    assert said in str(error)
    assert error.param == "structured_outputs.whitespace_pattern"


@pytest.mark.parametrize(
    "pattern", ["[ ]?", r"\s*", r"[\s]{0,3}", r"[\n\t ]*", "", "( |\n){0,500}( |\t){0,500}"]
)
def test_usual_patterns_of_white_space(admission, pattern):
    params = StructuredOutputsParams(
        json={"type": "array", "items": {"type": "integer"}}, whitespace_pattern=pattern
    )
    admitted = admission.admit(params)
    matcher = GuidanceBackend(word_vocabulary()).compile(admitted.grammar).matcher()
    assert matcher.advance(list(b"[1,2]"))
    assert matcher.complete
    assert (
        not GuidanceBackend(word_vocabulary())
        .compile(admitted.grammar)
        .matcher()
        .advance(list(b"[\x0b1]"))
    )


def test_a_library_that_runs_out_of_memory_writes_nothing(capfd):
    """Its process ends with a line of its own, which would stand before the plain refusal."""
    pytest.importorskip("outlines_core")
    processes = CompileProcesses(word_vocabulary, count=1, seconds=10.0, memory_bytes=64 << 20)
    inner = {"type": "array", "minItems": 10**6, "items": {"type": "string", "maxLength": 10**6}}
    schema = {"type": "array", "minItems": 10**7, "items": inner}
    try:
        with pytest.raises(RequestError, match="needed more than 64 MiB of memory to compile it"):
            processes.compile(GrammarSpec("outlines", "json", json.dumps(schema)))
    finally:
        processes.close()
    assert capfd.readouterr().err == ""


def test_white_space_is_optional_whatever_the_pattern():
    """So the page says of guidance."""
    backend = GuidanceBackend(word_vocabulary())
    schema = json.dumps({"const": [1]})
    grammar = backend.compile(GrammarSpec("guidance", "json", schema, whitespace_pattern="[ ]{2}"))
    for text, whole in ((b"[1]", True), (b"[  1  ]", True), (b"[ 1]", False)):
        matcher = grammar.matcher()
        assert (matcher.advance(list(text)) and matcher.complete) is whole, text
