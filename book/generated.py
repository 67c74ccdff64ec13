"""Shared by the generators of reference pages: writes a page, or checks that the committed page is up to date. Python 3.9, no packages."""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
from pathlib import Path

BOOK = Path(__file__).resolve().parent
SHOWN_LINES = 60
"""Lines of a diff that a failed check prints."""


def finish(page: str, text: str, check: bool) -> int:
    """Writes the English page `page` and the hash in the first line of its Chinese counterpart, or compares; returns the exit status.

    The Chinese counterpart of a generated page describes its structure and links to it, so a change of the English page needs no translation.
    """
    path = BOOK / "en" / "src" / page
    if check:
        return _compare(path, text)
    path.write_text(text, encoding="utf-8")
    stamp(page)
    print(f"written: {path.relative_to(BOOK.parent)}")
    return 0


def stamp(page: str) -> None:
    """Puts the hash of an English page into the first line of its Chinese counterpart, if there is one."""
    chinese = BOOK / "zh" / "src" / page
    if chinese.is_file():
        digest = hashlib.sha256((BOOK / "en" / "src" / page).read_bytes()).hexdigest()[:12]
        text = chinese.read_text(encoding="utf-8")
        chinese.write_text(re.sub(r"\A<!-- of: \S+ \S+ -->", f"<!-- of: {page} {digest} -->", text), encoding="utf-8")


def _compare(path: Path, text: str) -> int:
    place = path.relative_to(BOOK.parent)
    committed = path.read_text(encoding="utf-8") if path.is_file() else ""
    if committed == text:
        print(f"up to date: {place}")
        return 0
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "generated", lineterm="", n=1)
    print("\n".join(list(lines)[:SHOWN_LINES]))
    print(f"{place}: not up to date; run book/{Path(sys.argv[0]).name} without --check and commit the result")
    return 1


def cell(text: str) -> str:
    """Text as the cell of a Markdown table: one line; bars, angle brackets and asterisks are literal, flags are code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(part.replace("|", "\\|") if part.startswith("`") else _literal(part) for part in parts)


def _literal(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*(?: json)?)", r"`\1`", text)
