from __future__ import annotations

import json

from headrace.assembly.model_description import describe, facts
from headrace_core.pooling import LateInteraction, PoolingInfo
from headrace_testing.fakes.engine import fake_served_model

MODEL = fake_served_model(
    class_path="ears:Ears", source="plugin:ears 1.0", tasks=("transcription", "generate"),
    unmet={"embed": ("Ears.pooler is missing: add it", "and more")},
)  # fmt: skip


def test_facts_are_plain_data():
    found = facts(MODEL, routes=["/b", "/a"], interfaces=["LoRA"])
    assert json.loads(json.dumps(found)) == found
    assert found["supported_tasks"] == ["generate", "transcription"]
    assert found["routes"] == ["/a", "/b"]
    assert found["unmet"] == {"embed": ["Ears.pooler is missing: add it", "and more"]}


def test_lines_leave_out_what_is_empty_and_end_with_what_is_unmet():
    lines = describe(MODEL, routes=["/a"]).splitlines()
    assert "class            ears:Ears" in lines
    assert "supported_tasks  generate, transcription" in lines
    assert not any(line.startswith(("interfaces", "modalities")) for line in lines)
    assert lines[-3:] == ["no embed:", "- Ears.pooler is missing: add it", "- and more"]


def test_a_pooler_is_one_line_however_long_its_template():
    late = LateInteraction(query_marker="[Q]", skip_ids=tuple(range(500)))
    pooling = PoolingInfo(
        ("token_embed",),
        "ALL",
        causal=False,
        score_template="{{ a }}\n" * 500,
        late_interaction=late,
    )
    model = fake_served_model(runner="pooling", pooling=pooling)
    (line,) = [text for text in describe(model).splitlines() if text.startswith("pooling")]
    assert "causal = False" in line
    assert "late_interaction = (query_marker = [Q]" in line
    assert "prompts" not in line
    assert "... (500)" in line
    assert "score_template = '{{ a }}\\n" in line
    assert len(line) < 1500
    assert facts(model)["pooling"]["score_template"] == "{{ a }}\n" * 500
