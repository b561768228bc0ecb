"""`rookery recipes`: what can be trained, and the visible table of presets behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from rookery.cli.flags import parse
from rookery.cli.show import console, escape, facts


@dataclass(frozen=True)
class Recipes:
    name: str = ""  # one recipe only
    json: bool = False  # as JSON


def recipes(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        words = ["--name", *words]
    args = parse(Recipes, words, "rookery recipes", "The recipes and their presets.")
    from rookery.recipes import RECIPES, recipe

    shown = [recipe(args.name)] if args.name else list(RECIPES.values())
    if args.json:
        print(_json(shown))
        return 0
    out = console(piped=110)
    if not args.name:
        out.print(facts({each.name: escape(each.about) for each in shown}))
        out.print(" [dim]presets and numbers of one:[/] rookery recipes NAME")
        return 0
    for each in shown:
        table = Table(box=box.ROUNDED, show_lines=True, header_style="dim", title_justify="left", title_style="")
        table.title = f"[bold]{each.name}[/]: {escape(each.about)}"
        table.add_column("preset", no_wrap=True)
        table.add_column("sets", overflow="fold")
        for preset in each.presets:
            kinds = [f"other environments: {kind}" for kind, name in each.generic.items() if name == preset.name]
            taken = "\n".join(
                [f"[bold]{preset.name}[/]", *(f"[dim]{escape(name)}[/]" for name in (*preset.envs, *kinds))]
            )
            sets = "  ".join(f"{path}=[cyan]{escape(_text(value))}[/]" for path, value in preset.fields.items())
            table.add_row(taken, f"{sets}\n[dim]{escape(preset.source)}[/]")
        out.print(table)
    out.print("[dim]Everything else has the defaults of[/] rookery train RECIPE --help")
    return 0


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value)
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 10_000 else str(value)


def _json(shown: list[Any]) -> str:
    import json

    fields = ("name", "envs", "fields", "source")
    return json.dumps(
        [
            {"name": each.name, "about": each.about, "algorithm": each.algorithm, "generic": each.generic,
             "presets": [{field: getattr(preset, field) for field in fields} for preset in each.presets]}
            for each in shown
        ],
        indent=2,
    )  # fmt: skip
