"""Numbers that make sense: a field of a config says by its type what it may be, and a value beyond it is refused.

    unroll: Count = 128  # steps per environment and update

msgspec checks types, choices and ranges, of files and of objects made in Python; this file words the error messages.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec
import numpy as np
from msgspec import Meta

from rookery.core.errors import UsageError

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Part = Annotated[float, Meta(gt=0, le=1)]  # a share above 0
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

T = TypeVar("T")


def within(record: T, prefix: str = "", kind: Any = None) -> T:
    """A copy of a dataclass with every value of its field's type, or UsageError that names the field.

    Numbers of numpy, paths and lists become what the fields hold. `kind` is the dataclass with its parameters, if any.
    """
    return converted(msgspec.to_builtins(record, enc_hook=_plain), kind or type(record), prefix)


def converted(values: Any, kind: Any, prefix: str = "") -> Any:
    """A dataclass made of plain values, as a file has them; UsageError as above."""
    while True:
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            if not _made_whole(values, str(error)):
                raise UsageError(_refusal(values, kind, prefix, str(error))) from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise UsageError(f"{value!r} cannot be stored in a config, which holds numbers, text, and lists and names of them")


def _made_whole(values: Any, error: str) -> bool:
    """Accept a float such as 1e6 where a whole number is expected."""
    found = re.fullmatch(r"Expected `int`, got `float` - at `\$\.([\w.]+)`", error)
    if not found:
        return False
    *path, name = found[1].split(".")
    for part in path:
        values = values[part]
    if whole := values[name].is_integer():
        values[name] = int(values[name])
    return whole


def _refusal(values: Any, kind: Any, prefix: str, error: str) -> str:
    found = re.search(r"at `\$\.([\w.]+)", error)
    if not found:
        return f"{prefix.rstrip('.: ') or 'the config'} cannot be used: {error}"
    path = []
    for name in found[1].split("."):
        record, parameters = typing.get_origin(kind) or kind, typing.get_args(kind)
        if not dataclasses.is_dataclass(record):
            break  # inside a mapping: the field is named, not its inside
        kind = typing.get_type_hints(record, include_extras=True)[name]
        kind = parameters[0] if isinstance(kind, TypeVar) else kind
        path.append(name)
        values = values.get(name)
    if dataclasses.is_dataclass(kind):
        return f"{prefix}{'.'.join(path)} cannot be used: {error}"
    return f"{prefix}{'.'.join(path)} is {values!r}; it must be {describe(kind)}"


def describe(hint: Any) -> str:
    """A type as what a value must be: "0 or more", "adam or rmsprop"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        meta = next((m for m in args[1:] if isinstance(m, Meta)), Meta())
        number = "a whole number, " if args[0] is int else ""
        if meta.ge is not None:
            return f"{number}{meta.ge} or more" if meta.le is None else f"{number}from {meta.ge} to {meta.le}"
        if meta.gt is not None:
            return f"{number}above {meta.gt}" + ("" if meta.le is None else f", at most {meta.le}")
        return describe(args[0])
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        return f"a list of values, each {describe(args[0])}"
    if origin is dict:
        return "a dictionary"
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "none"}
    return names.get(hint, "a record of settings" if dataclasses.is_dataclass(hint) else str(hint))
