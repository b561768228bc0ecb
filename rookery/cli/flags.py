"""Flags drawn from dataclasses: how they may be spelt, which name was meant, and errors of one line.

Tyro does the typed parsing and writes the help. What stands here comes before it (spelling: `--env_steps`, `--quiet
True`, `--core`) and after it (its errors on one line).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rookery.core.errors import UsageError
from rookery.core.hints import nearest

T = TypeVar("T")

# Short forms of flags that are often needed.
SHORT = {"core": "net.core", "precision": "net.precision", "lag": "algo.queue.lag", "ray-address": "ray.address"}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
HELP = ("-h", "--help")


def flags_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flag -> type of every field of a dataclass (or an instance, then with the fields inside): "net.core-size"."""
    import tyro

    cls = config if isinstance(config, type) else type(config)
    hints, marked = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if tyro.conf.Positional in getattr(marked[field.name], "__metadata__", ()):
            continue
        name = prefix + field.name.replace("_", "-")
        inner = None if isinstance(config, type) else getattr(config, field.name)
        if dataclasses.is_dataclass(inner):
            found |= flags_of(inner, name + ".")
        else:
            found[name] = hints[field.name]
    return found


def comments_of(config: type) -> dict[str, str]:
    """The comment behind each field in a dataclass's source: its line of documentation."""
    found = re.finditer(r"^    (\w+): [^\n]*?  # (.*)$", inspect.getsource(config), re.MULTILINE)
    return {match[1]: match[2] for match in found}


def spell(words: Iterable[str], flags: Mapping[str, Any], short: Mapping[str, str] = SHORT) -> list[str]:
    """The words with every flag in its one spelling; UsageError with the nearest names for an unknown flag."""
    negations = {}
    for name, kind in flags.items():
        if kind is bool:
            head, dot, tail = name.rpartition(".")
            negations[f"no-{name}"] = negations[f"{head}{dot}no-{tail}"] = name
    rest, spelt, kind, flag = list(words), [], None, ""
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            _refuse_list(flag, word, kind)
            spelt.append(word if word in HELP else plain_value(word, kind))
            continue
        if word in HELP:
            spelt.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        name = short.get(name, name) if name not in flags else name
        if (positive := negations.get(name, name)) not in flags:
            near = nearest(name, flags, lambda flag: f"--{flag}", "--help lists them" if len(flags) > 20 else "")
            raise UsageError(f"there is no flag --{name}; {near}")
        kind, flag = flags[positive], positive
        if kind is bool:
            if not equals and rest and rest[0].lower() in TRUE[:1] + FALSE[:1]:
                value = rest.pop(0)
            spelt.append(_switch(positive, _truth(positive, value or "true") == (name == positive)))
        else:
            _refuse_list(flag, value, kind)
            spelt.append(f"--{name}={plain_value(value, kind)}" if equals else f"--{name}")
    return spelt


def _refuse_list(flag: str, word: str, kind: Any) -> None:
    """Several values are several words: `64 64`, and neither `64,64` nor `(64, 64)`."""
    if "," not in word or not any(typing.get_origin(each) is tuple for each in _options(kind)):
        return
    values = " ".join(word.strip("()[]").replace(",", " ").split())
    raise UsageError(f"--{flag} takes its values with spaces between them: --{flag} {values}")


def _options(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _switch(name: str, on: bool) -> str:
    head, dot, tail = name.rpartition(".")
    return f"--{head}{dot}{'' if on else 'no-'}{tail}"


def _truth(name: str, value: str) -> bool:
    if value.lower() not in TRUE + FALSE:
        raise UsageError(f"--{name} is on or off, not {value!r}: --{name}, --no-{name}, --{name}=True")
    return value.lower() in TRUE


def plain_value(word: str, kind: Any) -> str:
    """`1e6`, `100k` and `2M` for whole numbers, `none` for None."""
    options = _options(kind)
    if word.lower() == "none" and type(None) in options:
        return "None"
    number = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([kM]?)", word)
    if int in options and number and not word.isdigit():
        amount = float(number[1]) * {"": 1, "k": 1e3, "M": 1e6}[number[2]]
        return str(int(amount)) if amount == int(amount) else word
    return word


def last(words: list[str], name: str) -> str | None:
    """The value of `--name` in words that `spell` has returned; the last one counts."""
    value = None
    for index, word in enumerate(words):
        if word == f"--{name}":
            value = words[index + 1] if index + 1 < len(words) else ""
        elif word.startswith(f"--{name}="):
            value = word.partition("=")[2]
    return value


def parse(kind: type[T], words: list[str], prog: str, about: str, default: T | None = None) -> T:
    """An instance of a dataclass from words; help is printed, an error is a UsageError of one line."""
    import tyro

    words = spell(words, flags_of(kind if default is None else default))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given: dict[str, Any] = {} if default is None else {"default": default}
            names = (tyro.conf.PositionalMetavarFromFieldName,)
            return tyro.cli(kind, prog=prog, description=about, args=words, config=names, **given)
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(f"{one_line(said.getvalue())} ({prog} --help)") from None


def one_line(box: str) -> str:
    """What tyro says in a box, as one line: the part between the title and the next rule."""
    rows = [row.strip("│ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    parts: list[list[str]] = [[]]
    for row in rows:
        if re.fullmatch("[─-]{5,}", row):
            parts.append([])
        elif row and row[0] not in "╭╰":  # in a box the title stands in the border
            parts[-1].append(row)
    titled = "╭" not in box and len(parts) > 1  # without Unicode it is a part of its own
    text = " ".join(parts[1 if titled else 0])
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", text)
    text = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", text)
    text = re.sub(r"invalid choice ('.*?') for argument '(.*?)'\. Expected one of \((.*)\)\.", _choices, text)
    text = re.sub(r"Could not find valid parse for arguments: \[(.*)\]", r"\1 cannot be read", text)
    text = re.sub(r"Missing value for argument '(.*?)'\. Expected .*", r"\1 needs a value", text)
    text = re.sub(r"Missing from .*?: ([A-Z]+) .*", r"\1 is missing", text)
    text = text.removeprefix("Error parsing ").replace("Unrecognized options:", "not understood:")
    return text or "the command line cannot be understood"


def _choices(match: re.Match[str]) -> str:
    return f"{match[2]}: {match[1]} is not one of {match[3].replace(chr(39), '').rstrip(',')}"
