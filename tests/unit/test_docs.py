"""Pages that are printed from the code say what the code says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_protocol_page_is_what_the_tables_say() -> None:
    """A new message or transition without its line in the page fails here, with the command that mends it."""
    printed = runpy.run_path(str(DOCS / "make_protocol.py"))["render"]()

    assert (DOCS / "protocol.md").read_text() == printed, "run: python docs/make_protocol.py > docs/protocol.md"
