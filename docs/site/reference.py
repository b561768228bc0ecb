"""The reference: pages made from docstrings, signatures, the comments behind fields, and the recipes.

mkdocstrings would write the pages of functions and classes, but not those of fields and presets: it does not read the
comment behind a field, which is where this package documents it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

import rookery
from rookery.algorithms.base import Algorithm
from rookery.cli.flags import comments_of
from rookery.core import types
from rookery.core.config import RunConfig
from rookery.core.ranges import describe
from rookery.recipes import RECIPES

FIELDS = """# Every field

The fields of a run. `algo.lr` is `--algo.lr 1e-4` on the command line and `algo={"lr": 1e-4}` in Python. The defaults
are those of the class: a recipe's [preset](presets.md) may set others, and `rookery train RECIPE --help` shows what a
run takes.
"""
CONTRACT = """# The contract of an algorithm

What a class must have to be an algorithm, and the types that it takes and returns. [Architecture](../architecture.md)
explains them, and [Adding to Rookery](../extending.md) writes an algorithm step by step.
"""
PYTHON = """# The package `rookery`

Everything that `import rookery` offers. [Rookery in Python](../python.md) shows how it is used.
"""
PRESETS = """# Presets

The numbers that each recipe takes for which environment. `rookery train RECIPE --preset NAME` takes a row by its name;
`rookery recipes RECIPE` shows the same table.
"""
# The types of the contract.
TYPES = (types.EnvSpec, types.Leaf, types.ActionSpec, types.DataPlan, types.Queue, types.Circular, types.Mix)
TYPES += (types.Replay, types.Explore, types.ActOutput, types.LossOutput)


def pages() -> dict[str, str]:
    package = [part for name in public() for part in entry(name, getattr(rookery, name))]
    return {
        "reference/python.md": PYTHON + "".join(package),
        "reference/fields.md": FIELDS + "".join(fields_of_a_run()),
        "reference/presets.md": PRESETS + "".join(map(presets, RECIPES.values())),
        "reference/algorithm.md": CONTRACT + "".join(contract()),
    }


def public() -> list[str]:
    """Functions first, classes after them."""
    return sorted(rookery.__all__, key=lambda name: (inspect.isclass(getattr(rookery, name)), name))


def entry(name: str, thing: Any, level: int = 2) -> Iterable[str]:
    """A function, or a class with what is public in it."""
    yield f"\n{'#' * level} {name}\n\n"
    if not inspect.isclass(thing):
        yield signature(name, thing) + doc(thing)
        return
    yield doc(thing)
    yield table(thing) if dataclasses.is_dataclass(thing) else attributes(thing)
    for key, value in members(thing):
        yield f"\n{'#' * (level + 1)} {name}.{key}\n\n"
        if isinstance(value, property):
            assert value.fget is not None
            yield f"```python\n{key}{returns(value.fget)}  # property\n```\n\n" + doc(value)
        else:
            function = getattr(value, "__func__", value)
            must = "Must be defined. " if getattr(function, "__isabstractmethod__", False) else ""
            yield signature(key, function, bound=not isinstance(value, staticmethod)) + must + doc(value)


def attributes(thing: type) -> str:
    """The annotated attributes of a class that is no dataclass."""
    comments, kinds = comments_of(thing), vars(thing).get("__annotations__", {})
    rows = [
        f"| `{name}` | `{cell(spelt(kind))}` | {f'`{vars(thing)[name]!r}`' if name in vars(thing) else ''} "
        f"| {cell(comments.get(name, ''))} |"
        for name, kind in kinds.items()
        if not name.startswith("_")
    ]
    return "\n".join(["| attribute | is | default | |", "|---|---|---|---|", *rows]) + "\n\n" if rows else ""


def members(thing: type) -> Iterable[tuple[str, Any]]:
    """Public methods and properties, those of a class's parents included; a field of a dataclass is in its table."""
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    known: dict[str, Any] = {}
    for each in reversed(thing.__mro__[:-1]):
        if each.__module__.partition(".")[0] == "rookery":
            known |= vars(each)
    for name, value in known.items():
        callable_ = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(value)
        if callable_ and name not in fields and not name.startswith("_"):
            yield name, value


def signature(name: str, function: Callable[..., Any], bound: bool = False) -> str:
    """As it is written in the source: one line if it fits, else one parameter a line."""
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    words, keyword_only = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        keyword_only |= each.kind is each.VAR_POSITIONAL
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {spelt(each.annotation)}"
        default = "" if each.default is each.empty else f"{' = ' if kind else '='}{value_of(each.default)}"
        words.append(star + each.name + kind + default)
        if each.kind is each.POSITIONAL_ONLY and each is [p for p in parameters if p.kind is each.POSITIONAL_ONLY][-1]:
            words.append("/")
    line = f"{name}({', '.join(words)}){returns(function)}"
    if len(line) > 80:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns(function)}"
    return f"```python\n{line}\n```\n\n"


def returns(function: Callable[..., Any]) -> str:
    kind = inspect.signature(function).return_annotation
    return "" if kind is inspect.Signature.empty else f" -> {spelt(kind)}"


def spelt(kind: Any) -> str:
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def value_of(default: Any) -> str:
    """A function as a default, such as the one that warns, has no name that a reader knows."""
    return "..." if inspect.isroutine(default) else repr(default)


def doc(thing: Any) -> str:
    """A docstring as Markdown: a session of the interpreter (`>>>`) becomes a block of code."""
    text = inspect.cleandoc(thing.__doc__ or "") if inspect.isclass(thing) else inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return ""  # made by `dataclass`
    return re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE) + "\n\n"


def fields_of_a_run() -> Iterable[str]:
    """The run, its groups, then the config of each algorithm with the groups in it."""
    seen: set[type] = set()
    yield from group("The run", RunConfig, "", seen)
    for config in dict.fromkeys(type(recipe.config()) for recipe in RECIPES.values()):
        names = [f"`{name}`" for name, recipe in RECIPES.items() if type(recipe.config()) is config]
        yield from group(config.__name__, config, "algo.", seen, f"Recipes: {', '.join(names)}.\n\n")


def group(title: str, kind: type, prefix: str, seen: set[type], about: str = "") -> Iterable[str]:
    """A dataclass, then those that are fields of it; each one once."""
    if kind in seen:
        return
    seen.add(kind)
    yield f"\n## {title}\n\n{about}{doc(kind)}{table(kind, prefix, groups_follow=True)}"
    for field, hint in hints_of(kind):
        if dataclasses.is_dataclass(hint):
            yield from group(heading(hint, prefix + field.name), hint, f"{prefix}{field.name}.", seen)  # type: ignore[arg-type]


def heading(kind: Any, path: str) -> str:
    return f"{kind.__name__}: `{path}.`"


def hints_of(kind: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # what is imported for the type checker alone
        hints = {}
    return [(field, hints.get(field.name, field.type)) for field in dataclasses.fields(kind)]


def table(kind: type, prefix: str = "", groups_follow: bool = False) -> str:
    comments: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            comments |= comments_of(each)
    rows = ["| field | is | default | |", "|---|---|---|---|"]
    for field, hint in hints_of(kind):
        if dataclasses.is_dataclass(hint) or isinstance(hint, typing.TypeVar):
            what, default = "a group of fields", ""
            if groups_follow and not isinstance(hint, typing.TypeVar):
                what = f"[a group of fields](#{hint.__name__.lower()}-{prefix.replace('.', '')}{field.name})"
        else:
            what, default = f"`{hint}`" if isinstance(hint, str) else describe(hint), default_of(field)
        rows.append(f"| `{prefix}{field.name}` | {cell(what)} | {default} | {cell(comments.get(field.name, ''))} |")
    return "\n".join(rows) + "\n\n"


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "must be given"
    return "empty" if field.default == "" else f"`{field.default!r}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def presets(recipe: Any) -> str:
    algorithm = recipe.algorithm.partition(":")[2]
    rows = [f"\n## {recipe.name}\n\n{recipe.about[:1].upper()}{recipe.about[1:]}. Algorithm `{algorithm}`, fields of"]
    config = type(recipe.config()).__name__
    rows[0] += f" [`{config}`](fields.md#{config.lower()}), [page](../recipes-{recipe.name.replace('_', '-')}.md).\n"
    rows += ["| preset | taken for | sets |", "|---|---|---|"]
    for preset in recipe.presets:
        kinds = [f"other environments: {kind}" for kind, name in recipe.generic.items() if name == preset.name]
        sets = " ".join(f"`{path}={value!r}`" for path, value in preset.fields.items())
        source = f"<br>*{cell(preset.source)}*" if preset.source else ""
        taken = "<br>".join([*(f"`{env}`" for env in preset.envs), *kinds])
        rows.append(f"| `{preset.name}` | {taken} | {sets}{source} |")
    return "\n".join(rows) + "\n"


def below(uri: str) -> str:
    """What the site adds to the page of a recipe: where its numbers are."""
    for name, recipe in RECIPES.items():
        if uri == f"recipes-{name.replace('_', '-')}.md":
            config = type(recipe.config()).__name__
            fields = f"[every field](reference/fields.md#{config.lower()})"
            return f"\n\nReference: [the presets of `{name}`](reference/presets.md#{name}), {fields}.\n"
    return ""


def contract() -> Iterable[str]:
    yield "\n" + (inspect.getdoc(inspect.getmodule(Algorithm)) or "").partition("\n\n")[2] + "\n"
    yield from entry("Algorithm", Algorithm)
    for kind in TYPES:
        yield from entry(kind.__name__, kind)
