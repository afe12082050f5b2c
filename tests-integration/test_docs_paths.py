"""Files, modules and names that a page of the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {path.name: next(path.glob("src/*")) for path in (ROOT / "packages").iterdir()}
FOLDERS = (
    "packages",
    "tests-integration",
    "tests-clients",
    "benchmarks",
    "tools",
    "examples",
    "docs",
)
RECORDS = ROOT / "docs" / "adr"
"""Decisions tell what was there at their time: they are not checked."""
PAGES = sorted(
    page
    for folder in ("docs", "packages", "benchmarks", "tests-integration")
    for page in (ROOT / folder).rglob("*.md")
    if RECORDS not in page.parents and "changelog" not in str(page).lower()
)
PAGES += sorted(ROOT.glob("*.md"))
ROOMS = {*FOLDERS, *PACKAGES} | {
    folder.name for source in PACKAGES.values() for folder in source.iterdir() if folder.is_dir()
}
"""What a path begins with, if it is one of ours."""
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"[\w.-]+(?:/[\w.*<>-]+)+/?")
_DOTTED = re.compile(r"(headrace(?:_\w+)?)((?:\.\w+)+)(?:\(.*\))?")


def words(page: Path) -> set[str]:
    """What stands between backticks in running text."""
    text = re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return set(_CODE.findall(text))


def is_file(word: str) -> bool:
    """If a path, relative to the root or to a package, leads to something."""
    if "*" in word or "<" in word:
        return True
    first, _, rest = word.strip("/").partition("/")
    places = [ROOT / word] if first in FOLDERS else []
    if first in PACKAGES:
        places += [PACKAGES[first] / rest, PACKAGES[first].parents[1] / rest]
        if "." in rest.rpartition("/")[2]:  # module.name
            return is_name(f"{PACKAGES[first].name}.{rest.replace('/', '.')}")
    else:  # a folder of one package, which the text names before
        places += [source / word for source in PACKAGES.values()]
    return any(place.exists() or place.with_name(place.name + ".py").exists() for place in places)


def is_name(word: str) -> bool:
    """If a dotted name is a module, or a name that its module has."""
    package, *parts = word.split(".")
    place = ROOT / "packages" / (package.removeprefix("headrace_")) / "src" / package
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    if not parts:
        return place.exists()
    source = place if place.is_file() else place / "__init__.py"
    return source.is_file() and bool(
        re.search(rf"\b{parts[0]}\b", source.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    missing = []
    for word in words(page):
        if _PATH.fullmatch(word) and word.partition("/")[0] in ROOMS:
            found = is_file(word)
        elif named := _DOTTED.fullmatch(word):
            found = is_name(named[1] + named[2]) or named[1] + named[2] in ENTRY_POINTS
        else:
            continue
        if not found:
            missing.append(word)
    assert not missing, f"{page.relative_to(ROOT)} names what is not there: {sorted(missing)}"


def _entry_points() -> set[str]:
    from headrace_core.plugins import GROUPS

    return set(GROUPS)


ENTRY_POINTS = _entry_points()
