"""Text that a terminal shows and does not obey."""

import unicodedata

import pytest

from rookery.cli.main import main
from rookery.cli.show import console, escape, facts
from rookery.core.printable import printable, shown


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("done\rerror", r"done\rerror"),
        ("\x9b31m and \x85 and \x7f", r"\x9b31m and \x85 and \x7f"),
        ("abc\u202efdp.exe", r"abc\u202efdp.exe"),
        ("\u2066\u2069\u200f\u061c", r"\u2066\u2069\u200f\u061c"),
        ("a\u2028b\u200bc\ufeff", r"a\u2028b\u200bc\ufeff"),
        ("tag \U000e0041", r"tag \U000e0041"),
        ("half \ud83d", r"half \ud83d"),
        ("\0", r"\x00"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_its_escape(text, safe):
    assert printable(text) == safe
    assert printable(safe) == safe
    printable(text).encode()


@pytest.mark.parametrize(
    "text", ["", "two\nlines\tand a tab", "runs/ä b", "日本語 ❤ ½", "C:\\x1b", "👩\u200d🔬", "[red]x[/]"]
)
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text


def test_no_control_of_unicode_is_left():
    every = "".join(map(chr, range(0x110000)))
    left = {unicodedata.category(each) for each in set(printable(every)) - set("\n\t\u200c\u200d")}
    assert not left & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def test_a_value_is_shown_as_json_on_one_line():
    assert shown({"command": "touch x\n\x1b[2J"}) == r'{"command": "touch x\n\u001b[2J"}'
    assert shown("a\u202eb") == r'"a\u202eb"'
    assert shown("x" * 1000, limit=10) == '"xxxxxxxxx… (1,002 characters)'
    assert shown({"set"}) == "\"{'set'}\""


def test_a_deep_value_is_not_shown():
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert "deeply" in shown(value)


def test_results_show_names_as_they_are(capsys):
    """Neither as markup of Rich nor as what a terminal obeys."""
    console().print(facts({"env": escape("[red]x[/] [link=file:///]y[/link] \x1b[2J"), "next": "[bold]z[/]"}))
    said = capsys.readouterr().out
    assert r"[red]x[/] [link=file:///]y[/link] \x1b[2J" in said
    assert "bold" not in said


def test_an_error_is_shown_without_what_a_terminal_obeys(capsys):
    assert main(["eval", "nowhere/\x1b[2J\u202e"]) == 6
    assert r"nowhere/\x1b[2J\u202e" in capsys.readouterr().err
