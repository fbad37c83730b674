"""Generated pages are up to date, and links between pages lead to existing files and headings."""

import re
import runpy
from pathlib import Path

import pytest

from tests import ROOT

DOCS = ROOT / "docs"

PRINTED = {
    "protocol.md": "make_protocol.py",
    "reference.md": "make_reference.py",
    "architecture.md": "make_architecture.py",
    "ring.svg": "make_picture.py",
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PRINTED)
def test_a_printed_page_is_what_its_script_prints(page: str) -> None:
    """Goal: a changed message, signature or docstring is in its page; if not, the error names the command to run."""
    script = PRINTED[page]
    printed = runpy.run_path(str(DOCS / script))["render"]()

    assert (DOCS / page).read_text() == printed, f"run: python docs/{script} > docs/{page}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, made as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Goal: every link to a file of the repository names an existing file, and an existing heading if it has one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(file), f"{page.name} links to {target}, which has no such heading"


def test_the_glossary_has_every_noun_once_and_sorted() -> None:
    """Goal: a noun has one row, so it has one meaning, and the rows are in alphabetical order."""
    table = (DOCS / "glossary.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", table, re.MULTILINE)[1:]
    nouns = [noun.lower() for noun, _ in rows]

    assert len(nouns) > 100
    assert nouns == sorted(set(nouns))
    assert [noun for noun, meaning in rows if not meaning.endswith((".", ")"))] == []


def rows_of(section: str) -> list[list[str]]:
    """The cells of all table rows in a section of the benchmarks."""
    text = (DOCS / "benchmarks.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def prose_of(page: Path) -> str:
    """Return the text of a page as one line."""
    return " ".join(page.read_text().split())


def test_the_readme_quotes_what_was_measured() -> None:
    """Goal: the figure on the first screen is the one in the benchmark table, also after a new measurement."""
    measured = {row[0]: row[1] for row in rows_of("Over a wide-area link, next to Gloo")}
    ours, gloo = measured["100 ms, pool of 8"], measured["100 ms, gloo"]

    assert f"takes {ours} with 8 connections; Gloo takes {gloo} (" in prose_of(ROOT / "README.md")


def test_guides_quote_what_was_measured() -> None:
    """Goal: figures in prose are those of the generated tables, also after the next measurement."""
    kills = {row[0][0]: row[1].partition(" (")[0] for row in rows_of("After a kill") if "kills" in row[0]}
    three, four = kills["3"], kills["4"]
    gains = [row[3].partition(" (")[0] for row in rows_of("Quantization") if len(row) == 4 and "bits" in row[0]]
    speeds: dict[str, list[float]] = {}  # of two peers, by size: [through memory, through TCP]
    for row in rows_of("All-reduce next to Gloo"):
        if row[0].startswith("2 peers") and row[0].endswith(("64 MiB", "256 MiB", "1 GiB")):
            speeds.setdefault(row[0], []).append(float(row[2].replace(",", "")))
    ratios = [memory / tcp for memory, tcp in speeds.values()]

    assert f"the median is {three} with 3 peers and {four} with 4" in prose_of(DOCS / "reliability.md")
    assert f"was {gains[0]}, {gains[1]} and {gains[2]} times as fast" in prose_of(DOCS / "quantization.md")
    assert len(ratios) == 3
    assert f"is {min(ratios):.1f} to {max(ratios):.1f} times as fast" in prose_of(DOCS / "getting-started.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Goal: a file that was moved or renamed is found under its new name in every page."""
    folders = "pccl|cli|stress|tests|benchmarks|examples|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]*\w\.(?:py|pyx|pxd|h|cu|md|json|sh|sbatch|yaml))`", page.read_text())

    assert [path for path in named if not (ROOT / path).exists()] == []
