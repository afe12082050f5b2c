from __future__ import annotations

import json

from headrace_core.inspection import describe, facts
from headrace_core.testing.engine import fake_served_model

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
