"""Write ``docs/errors/``, a page for each entry of the error catalogue.

``python tools/error_pages.py``; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from headrace.error_catalogue import CATALOGUE, ErrorEntry
from headrace_core.errors import BY_CODE

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "errors"


def pages() -> dict[str, str]:
    """File name -> content."""
    found = {f"{entry.code}.md": page(entry) for entry in CATALOGUE}
    return {"index.md": index(), **found}


def page(entry: ErrorEntry) -> str:
    """One entry's page."""
    code, facts = BY_CODE[entry.code], []
    if code.http is not None:
        facts.append(f"- HTTP status: {code.http}")
    if code.exit_status is not None:
        facts.append(f"- exit status of a command: {code.exit_status}")
    if code.classes:
        facts.append(f"- exceptions: {', '.join(f'`{name}`' for name in code.classes)}")
    return (
        f"# {entry.code}: {entry.title}\n\n"
        f"**Cause.** {entry.cause}\n\n**What to do.** {entry.hint}\n\n" + "\n".join(facts) + "\n"
    )


def index() -> str:
    """The table of all."""
    lines = [
        "# Errors",
        "",
        "Every error that reaches a user has a code that does not change. In an answer it is",
        "`error.headrace_code` (`error.code` is the HTTP status, as clients expect); on the command",
        "line it is in the last line of standard error, which also says the cause, and the line",
        "before has the hint. The exit status tells the class: 2 usage, 3 model, 4 memory, 5 device,",
        "6 network, 7 plug-in, 8 port or permission, 70 a bug, or an engine that died; 1 if the",
        "engine died while serving, or if some prompts of `headrace generate` failed and the others",
        "are answered; 130 after Ctrl-C.",
        "",
        "| code | | HTTP | exit |",
        "|---|---|---|---|",
    ]
    for entry in CATALOGUE:
        code = BY_CODE[entry.code]
        http, status = code.http or "", code.exit_status or ""
        lines.append(f"| [{entry.code}]({entry.code}.md) | {entry.title} | {http} | {status} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
