"""Numbers that make sense: a field of a config says by its type what it may be, and a value beyond it is refused.

    unroll: Count = 128  # steps per environment and update

msgspec looks after types, choices and ranges, of a file as of an object made in Python; here is how a refusal reads.
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

from rookery.errors import UsageError

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Part = Annotated[float, Meta(gt=0, le=1)]  # a share that is not nothing
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

T = TypeVar("T")


def within(record: T, prefix: str = "", kind: Any = None) -> T:
    """A copy of a dataclass with every value of its field's type, or UsageError that names the field.

    Numbers of numpy, paths and lists become what the fields hold. `kind` is the dataclass with its parameters, if any.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(record, enc_hook=_plain), kind or type(record))
    except msgspec.ValidationError as error:
        raise UsageError(_refusal(record, prefix, str(error))) from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise UsageError(f"{value!r} has no place in a config, which holds numbers, text, and lists and names of them")


def _refusal(record: Any, prefix: str, error: str) -> str:
    found = re.search(r"at `\$\.([\w.]+)", error)
    if not found:
        return f"{prefix.rstrip('.') or 'the config'} cannot be used: {error}"
    path, value, hint = found[1], record, None
    for name in path.split("."):
        if not dataclasses.is_dataclass(value):  # inside a mapping: the field is named, not its inside
            break
        hint, value = typing.get_type_hints(type(value), include_extras=True)[name], getattr(value, name)
    return f"{prefix}{path} is {value!r}; it must be {describe(hint)}"


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
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "none"}
    return names.get(hint, "a record of settings" if dataclasses.is_dataclass(hint) else str(hint))
