"""How a sweep is spelt on the command line: its own flags among the words, and values of a field as text.

    --set algo.lr 1e-4,3e-4     --set net.hidden "64 64,256 256"     --set env_kwargs '[{"length": 10}, {}]'
    --search algo.lr log 1e-5 1e-2     --search algo.epochs range 1 20

Values are separated by commas, the items of a list by spaces, as `--net.hidden 64 64` has them. What begins with [ is
a JSON list of values. Everything that is not a flag of the sweep is a field of `rookery train`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rookery.cli.flags import FALSE, SHORT, TRUE, plain_value
from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import describe
from rookery.sweeps.plan import Range, hint_of, range_of

TAKES = {  # words after each flag
    "seeds": 1, "set": 2, "search": 4, "optuna": 1, "jobs": 1, "out": 1, "resume": 1, "retry": 0, "trust": 1,
}  # fmt: skip
LIKE = {"set": "--set algo.lr 1e-4,3e-4", "search": "--search algo.lr log 1e-5 1e-2", "seeds": "--seeds 5"}


@dataclass
class Words:
    """The words of a command, sorted."""

    rest: list[str] = field(default_factory=list)  # fields of the run
    one: dict[str, str] = field(default_factory=dict)  # flags that are given once
    set: dict[str, str] = field(default_factory=dict)  # field -> its values as text
    search: dict[str, list[str]] = field(default_factory=dict)
    trust: list[str] = field(default_factory=list)


def sorted_words(words: list[str]) -> Words:
    found, rest = Words(), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in TAKES:
            _refuse_misspelt(name if word.startswith("--") else "")
            found.rest.append(word)
            continue
        given, rest = ([value], rest) if equals else ([], rest)
        while len(given) < _wanted(name, given) and rest and not rest[0].startswith("--"):
            given.append(rest.pop(0))
        if len(given) < _wanted(name, given):
            like = LIKE.get(name, f"--{name} {name.upper()}")
            raise UsageError(f"--{name} is not complete; write for example {like}")
        _take(found, name, given)
    return found


def _refuse_misspelt(name: str) -> None:
    """Fields of the run are judged with its config, which knows nothing of these flags."""
    near = difflib.get_close_matches(name, TAKES, 1, 0.8)
    if near and name.replace("-", "_") not in RunConfig.__dataclass_fields__:
        raise UsageError(f"there is no flag --{name}; did you mean --{near[0]}?")


def _wanted(name: str, given: list[str]) -> int:
    """`--set algo.lr=1e-4,3e-4` has its two words in one."""
    return 1 if name == "set" and given and "=" in given[0] and not given[0].startswith("=") else TAKES[name]


def _take(found: Words, name: str, given: list[str]) -> None:
    if name == "trust":
        found.trust.append(given[0])
    elif name in ("set", "search"):
        path, *values = given[0].split("=", 1) if name == "set" and len(given) == 1 else given
        path = path.removeprefix("--").replace("-", "_")
        path = SHORT.get(path, path)
        if path in found.set or path in found.search:
            raise UsageError(f"--{name} {path}: this field has its values already; give them together: {LIKE['set']}")
        if name == "set":
            found.set[path] = values[0]
        else:
            found.search[path] = values
    elif name in found.one:
        raise UsageError(f"--{name} is given twice")
    else:
        found.one[name] = given[0] if given else ""


def whole(flag: str, word: str | None) -> int | None:
    if word is None:
        return None
    if not word.isdigit() or int(word) < 1:
        raise UsageError(f"--{flag}: {word!r} is not a positive whole number")
    return int(word)


def seeds(word: str | None) -> int | tuple[int, ...] | None:
    """`5` is 1 to 5; `3,7,9` are these, and `7,` is one."""
    if word is None:
        return None
    parts = [part for part in word.split(",") if part]
    if not parts or not all(part.isdigit() for part in parts):
        raise UsageError(f"--seeds: {word!r} is neither a number of seeds nor a list of them, such as 3,7,9")
    return tuple(map(int, parts)) if "," in word else int(word)


def values(base: RunConfig, path: str, words: str) -> list[Any]:
    """The values of a field, of its type."""
    hint = hint_of(base, path)
    if words.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            found = json.loads(words)
            return list(found) if found else [found]
        raise UsageError(f"--set {path}: {words} begins like a list in JSON, and is none")
    if typing.get_origin(hint) is dict:
        raise UsageError(f'--set {path}: give a list in JSON, such as \'[{{"length": 10}}, {{"length": 20}}]\'')
    return [_value(path, word.strip(), hint) for word in words.split(",")]


def _value(path: str, word: str, hint: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if word.lower() == "none" and type(None) in options:
        return None
    lists = next((each for each in options if typing.get_origin(each) is tuple), None)
    if lists is not None:
        return [_value(path, item, typing.get_args(lists)[0]) for item in word.split()]
    if bool in options and word.lower() in TRUE + FALSE:
        return word.lower() in TRUE
    try:
        return msgspec.convert(plain_value(word, bare(hint)), hint, strict=False)
    except msgspec.ValidationError:
        raise UsageError(f"--set {path}: {word!r} cannot be used; it must be {describe(hint)}") from None


def bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def ranges(search: dict[str, list[str]]) -> dict[str, Range]:
    found = {}
    for path, words in search.items():
        try:
            found[path] = range_of(path, words)
        except UsageError:
            given = " ".join(words)
            raise UsageError(f"--search {path} {given}: write range LOW HIGH or log LOW HIGH, with numbers") from None
    return found
