"""Write ``docs/supported/models.md``, the architectures that headrace has a class for.

``python tools/supported_models.py``; a test compares. The data is that of ``headrace models``.
"""

from __future__ import annotations

from pathlib import Path

from headrace_models.catalogue import ARCHITECTURES, Architecture
from headrace_models.catalogue.multimodal import REFUSED, WRAPPERS, Wrapper

PAGE = Path(__file__).resolve().parent.parent / "docs" / "supported" / "models.md"
HEADINGS = {
    "generate": "Models that generate text",
    "pool": "Models that pool: embedders, classifiers, rerankers, rewards",
    "speech": "Models that hear",
}


def page() -> str:
    """The whole page."""
    rows = [row for row in ARCHITECTURES.values() if not row.alias_of]
    lines = [
        "# Supported models",
        "",
        "Architectures, as `config.json` names them, that headrace has a class of its own for;",
        "`headrace models` prints the same table for what is installed, plug-ins included. Each is",
        "tested for equality with its reference implementation. **cache** says what its layers keep",
        "for a request: all tokens (`full`), those of a window (`sliding`) or chunk (`chunked`), one",
        "compressed vector for each (`latent`), a state of fixed size (`recurrent`), an encoder's",
        "states (`cross`), or nothing (`none`). Other language models of the transformers library are",
        "served [through it](transformers.md); [your own](../extending/models.md) through a plug-in.",
    ]
    for task, heading in HEADINGS.items():
        chosen = [row for row in rows if row.task == task]
        lines += ["", f"## {heading}", "", f"{len(chosen)} architectures.", ""]
        lines += ["| architecture | known as | cache | other names |", "|---|---|---|---|"]
        lines += [_line(row) for row in chosen]
    seeing, watching = (
        sum(modality in row.media for row in WRAPPERS.values()) for modality in ("image", "video")
    )
    lines += ["", "## Models that also see or hear", ""]
    lines += [
        f"{len(WRAPPERS)} architectures. Their language model, or encoder of texts, is served by the class",
        f"named. {seeing} of them take [images](../multimodal.md) and {watching} videos, with towers of the",
        "kinds named; of others towers are not read, and a request with images or other media is refused.",
        "",
        "| architecture | known as | served by | media | kinds of tower |",
        "|---|---|---|---|---|",
    ]
    lines += [_wrapper_line(row) for row in WRAPPERS.values()]
    lines += [
        "",
        "Refused when they load, by name, until their images are served:",
        "",
        "| architecture | reason |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _wrapper_line(row: Wrapper) -> str:
    texts = ", ".join(f"`{text}`" for text in dict.fromkeys(row.texts.values()))
    kinds = ", ".join(f"`{kind}`" for kind in row.towers if kind)
    return f"| `{row.name}` | {row.models} | {texts} | {', '.join(row.media)} | {kinds} |"


def _line(row: Architecture) -> str:
    names = (f"`{a.name}`" for a in ARCHITECTURES.values() if a.alias_of == row.name)
    return f"| `{row.name}` | {row.models} | {', '.join(row.caches)} | {', '.join(names)} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
