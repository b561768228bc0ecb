"""Text from an untrusted file, made safe to print: no escape sequence, no carriage return, no reversed direction.

A terminal interprets control characters: ESC and the C1 controls move the cursor, set the title or answer as if typed,
CR overwrites a line, bidirectional overrides show a text in another order than it has. Such characters are shown as
escapes. Not here: markup of Rich (`cli/show.py`).
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

KEPT = "\n\t\u200c\u200d"  # messages have several lines; joiners belong to the spelling of some languages, and to emoji
# Controls, formats (bidirectional marks, zero width, tags), surrogates, private use, line and paragraph separators.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def printable(text: str) -> str:
    """The text with every character that a terminal would act on, or not show, as its escape."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_escaped(each) if _hidden(each) else each for each in text)


def shown(value: Any, limit: int = 300) -> str:
    """A value of a JSON file on one line, as JSON, cut to a length that fits a message."""
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except RecursionError:
        return "a value that is nested too deeply to be shown"
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _hidden(character: str) -> bool:
    return character not in KEPT and unicodedata.category(character) in HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
