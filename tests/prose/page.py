"""Writes a page that is made of the code, or compares it."""

from pathlib import Path


def write_or_compare(words: list[str], made: str) -> int:
    """``FILE`` writes the page, ``--check FILE`` returns 1 if the page differs."""
    page = Path(words[-1])
    if "--check" not in words:
        page.write_text(made, "utf-8")
        return 0
    same = page.exists() and page.read_text("utf-8") == made
    if not same:
        print(f"{page} is out of date; run: make docs")
    return int(not same)
