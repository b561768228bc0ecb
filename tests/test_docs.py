"""The pages tell the truth: their Python runs, their commands parse, their links lead somewhere, their tables agree.

A block of Python runs in a folder of its own. `<!-- no-run -->` above a block leaves it out; `<!-- continues -->` has
it run after the one before it, with the same names; `<!-- file: PATH -->` says that the block is that file, word for
word; `<!-- write: PATH -->` and `<!-- run by TEST -->` are for another test, that writes files and runs commands.
Commands are parsed by the program itself, up to the point where the work would begin: training, playing and plotting
are replaced by an exception.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rookery
from rookery.algorithms.base import Algorithm
from rookery.algorithms.dqn import DQN, DQNConfig
from rookery.algorithms.registry import encode_config
from rookery.cli.main import VERBS, main
from rookery.core import errors
from rookery.core.config import NetConfig, RayConfig, ReplayConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.recipes import RECIPES
from rookery.tables.builder import parcel_shapes
from rookery.tables.memory import ReplayMemory

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PAGE_OF = {name: ROOT / "docs" / f"recipes-{name.replace('_', '-')}.md" for name in RECIPES}
SPEC = EnvSpec("any", {"obs": Leaf((1,), "float32", "vector")}, ActionSpec("discrete", (2,), (0,)))
SECTIONS = ["The idea", "One update", "What it is here", "Numbers", "Try it", "What it learns", "Deviations"]
READING_ORDER = ("recipes/ppo", "topologies/serial", "topologies/loop", "crews/inline", "roles/actor", "tables/queue")
READING_ORDER += ("algorithms/ppo", "ops/returns", "ops/policy", "roles/learner")


class Block(NamedTuple):
    page: Path
    line: int
    mark: str  # the comment directly above, without its arrows
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
            mark = re.fullmatch(r"<!-- (.*) -->", above)
            line = text.count("\n", 0, match.start()) + 1
            if match[1] == language:
                found.append(Block(page, line, mark[1] if mark else "", match[2]))
    return found


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Lines of bash blocks that begin with `program`: (where, words)."""
    found = []
    for block in blocks("bash"):
        if block.mark.startswith("run by "):
            assert (ROOT / block.mark.removeprefix("run by ")).is_file(), block
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == program:
                found.append((str(block), words[1:]))
    return found


def test_nobody_is_promised_more_of_a_cluster_than_was_tested():
    """Until the tests have run on several machines."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "to cluster" not in about and "simulated nodes" in about
    assert readme.count("not yet on several machines") == 2, "at the beginning, and where the topologies are"


def without_code(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def runnable() -> list[list[Block]]:
    """Blocks of Python that run, those that continue one another together."""
    found: list[list[Block]] = []
    for block in blocks("python"):
        if block.mark == "continues":
            assert found[-1][0].page == block.page, block
            found[-1].append(block)
        elif not block.mark.startswith(("no-run", "write: ")):
            found.append([block])
    return found


@pytest.mark.parametrize("several", runnable(), ids=lambda several: str(several[0]))
def test_python_runs(several, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    names = {"__name__": "page"}
    for block in several:
        exec(compile(block.text, f"{block}", "exec"), names)


@pytest.mark.parametrize("block", [b for b in blocks("python") if b.mark.startswith("file: ")], ids=str)
def test_a_quoted_file_is_quoted_word_for_word(block):
    assert block.text == (ROOT / block.mark.removeprefix("file: ")).read_text()


class Reached(BaseException):
    """The words were understood, and the work would begin."""


@pytest.fixture
def no_work(monkeypatch, tmp_path):
    def begin(*_, **__):
        raise Reached

    import rookery.cli.check_env
    import rookery.metrics.compare
    import rookery.metrics.plot
    import rookery.metrics.report
    import rookery.play.policy
    import rookery.run.cluster_work
    import rookery.run.init_from
    import rookery.run.run
    import rookery.sweeps.sweep

    for module, name in (
        (rookery.run.run, "start"),
        (rookery.run.run, "go_on"),
        (rookery.sweeps.sweep, "start"),
        (rookery.sweeps.sweep, "go_on"),
        (rookery.play.policy, "load"),
        (rookery.run.init_from, "load"),
        (rookery.metrics.plot, "plot_runs"),
        (rookery.metrics.report, "write_report"),
        (rookery.metrics.compare, "compare"),
        (rookery.cli.check_env, "ask"),
        (rookery.run.cluster_work, "spec_of"),
    ):
        monkeypatch.setattr(module, name, begin)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("where", "words"), commands("rookery"), ids=lambda x: x if isinstance(x, str) else x[0])
def test_a_command_is_understood(where, words, no_work, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rookery"])
    for word in words:
        if word.startswith("runs/") and "--out" not in words[: words.index(word)]:
            stored_run(Path(word))
    code = 0
    try:
        code = main(words)
    except Reached:
        return
    assert words[0] in ("recipes", "doctor") and code == 0, capsys.readouterr().err  # these only look around


def stored_run(folder: Path) -> None:
    """What the verbs look at before they begin; `runs/dqn-single` is of the recipe dqn."""
    recipe = folder.name.partition("-")[0]
    config = rookery.configure(recipe, "CartPole-v1") if recipe in RECIPES else rookery.configure("ppo", "CartPole-v1")
    (folder / "checkpoints" / "step-000000001000").mkdir(parents=True)
    (folder / "config.json").write_bytes(encode_config(config))


def test_the_command_check_can_fail(no_work, capsys):
    assert main(["train", "ppo", "--env", "CartPole-v1", "--algo.epoch", "3"]) == errors.UsageError.exit_code
    assert "--algo.epochs" in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_fields_in_the_text_exist(page):
    from rookery.cli import check_env, cluster_plan, compare, doctor, export, play, plot, recipes, report
    from rookery.cli.configure import EXTRA
    from rookery.cli.flags import SHORT, flags_of
    from rookery.cli.sweep_words import TAKES

    # The page of a recipe speaks of that recipe's fields only.
    meant = [recipe for name, recipe in RECIPES.items() if PAGE_OF[name] == page] or RECIPES.values()
    fields = {flag for recipe in meant for flag in flags_of(recipe.build("any", spec=None, preset="pixels"))}
    groups = {field[:at] for field in fields for at in range(len(field)) if field[at] == "."}
    shown = (
        play.Eval,
        play.Record,
        export.Export,
        plot.Plot,
        report.Report,
        compare.Compare,
        recipes.Recipes,
        check_env.CheckEnv,
        doctor.Doctor,
        cluster_plan.Options,
    )
    known = fields.union(groups, EXTRA, SHORT, ("help", "envs"), TAKES, *(flags_of(verb) for verb in shown))
    named = re.findall(r"(?<![\w/.-])--((?:no-)?)([a-z][\w.-]*)", without_code(page))
    assert [name for _, name in named if name.rstrip(".") not in known] == []
    dotted = re.findall(rf"`((?:{'|'.join(groups)})(?:\.\w+)+)", without_code(page))
    assert [name for name in dotted if name.replace("_", "-") not in fields | groups] == []


def test_the_pages_show_every_verb_and_every_target_they_name_exists():
    assert {words[0] for _, words in commands("rookery")} == set(VERBS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for _, words in commands("make")}
    assert named == {"demo", "test"} and named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(without_code(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_can_be_reached_from_the_readme():
    """By links from page to page."""
    reached, open_ends = set(), [ROOT / "README.md"]
    while open_ends:
        page = open_ends.pop()
        if page in PAGES and page not in reached:
            reached.add(page)
            targets = (target.partition("#")[0] for target in LINK.findall(without_code(page)))
            open_ends += [(page.parent / target).resolve() for target in targets]
    assert set(PAGES) - reached == set()


def test_every_page_has_one_place_in_the_navigation_of_the_site():
    """In `nav` of mkdocs.yml. tests/test_site.py builds the site."""
    named = re.findall(r"^ +- (?:.*: )?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]  # a notebook becomes a page
    pages = [path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in files]
    made = [name for name in named if name not in pages]  # from the files of the root, and the reference
    assert sorted(name for name in named if name in pages) == sorted(pages), "add the page to mkdocs.yml"
    assert made.count("index.md") == 1 and len(made) == len(set(made)) < 12


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/img").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_whole_and_used(picture):
    root = ET.parse(picture).getroot()
    assert root.get("viewBox") and root.find("{http://www.w3.org/2000/svg}title") is not None
    assert any(f"img/{picture.name})" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page):
    assert page.read_text().count("\n") <= 150


def test_the_reading_order_is_what_it_promises():
    files = [ROOT / "rookery" / f"{name}.py" for name in READING_ORDER]
    for page in (ROOT / "README.md", ROOT / "docs/architecture.md"):
        places = [page.read_text().rindex(f"rookery/{name}.py)") for name in READING_ORDER]
        assert places == sorted(places)
    told = re.search(r"about ([\d,]+) lines", (ROOT / "README.md").read_text())
    assert told is not None
    assert abs(sum(file.read_text().count("\n") for file in files) - int(told[1].replace(",", ""))) < 100


def test_the_architecture_names_every_room_and_the_whole_contract():
    page = ROOT / "docs/architecture.md"
    rooms = {path.parent.name for path in (ROOT / "rookery").glob("*/__init__.py")}
    parts = {name for row in rows_of(page, "layer")[1:] for name in re.findall(r"`(\w+)`", row[1])}
    assert rooms <= parts
    contract = {name for name in vars(Algorithm) if not name.startswith("_")} - {"stop_above", "max_grad_norm"}
    told = {name for row in rows_of(page, "method")[1:] for name in re.findall(r"`(\w+)", row[0])}
    assert contract == told


def test_the_table_of_exit_codes_is_complete():
    table = (ROOT / "docs/cli.md").read_text().partition("## Exit codes")[2]
    listed = {int(code): words for code, words in re.findall(r"^\| (\d+) \| (.*)", table, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RookeryError)]
    names = {kind.exit_code: kind.__name__.lower().removesuffix("error") for kind in kinds}
    assert set(listed) == {0, *names, errors.REQUEUE, errors.INTERRUPT}
    del names[errors.RookeryError.exit_code]
    for code, name in names.items():
        assert listed[code].startswith(name), (code, name)


def test_the_table_of_presets_is_the_recipe():
    page, recipe = (ROOT / "docs/recipes-ppo.md").read_text(), RECIPES["ppo"]
    rows = []
    for preset in recipe.presets:
        config = recipe.build("any", spec=None, preset=preset.name)
        algo = config.algo
        kinds = [f"other environments: {kind}" for kind, name in recipe.generic.items() if name == preset.name]
        rows.append(
            f"| `{preset.name}` | {', '.join([f'`{env}`' for env in preset.envs] + kinds)} | "
            f"{config.lanes} × {algo.unroll} | {algo.epochs} × {algo.minibatches} | "
            f"{algo.lr:g} | {algo.gamma:g} | {algo.lam:g} | {algo.entropy:g} |"
        )
    assert [row for row in rows if row not in page] == []
    assert len(re.findall(r"^\| `\w+` \| .*×", page, re.MULTILINE)) == len(rows)


# The pages of the recipes


def rows_of(page: Path, first: str) -> list[list[str]]:
    """Cells of the tables whose first column has that title, title row included, rules left out."""
    rows, inside = [], False
    for line in without_code(page).splitlines():
        cells = [cell.strip() for cell in line[1:].removesuffix("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and set(line) - set("|- "):
            rows.append(cells)
    return rows


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "none")


def with_values(words: str, config: Any) -> str:
    """A cell that names fields, such as `algo.v_min` … `algo.v_max`, with their values instead."""
    return re.sub(r"`([\w.]+)`", lambda match: shown(attrgetter(match[1])(config)), words)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_page_and_a_row_in_the_readme(name):
    page = PAGE_OF[name]
    assert page in PAGES
    cell = f"[`{name}`](docs/{page.name})"
    assert [row[0] for row in rows_of(ROOT / "README.md", "recipe")].count(cell) == 1
    assert f"(../rookery/recipes/{name}.py)" in page.read_text()


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "ppo"])
def test_the_page_of_a_recipe_is_whole_and_its_numbers_are_the_recipe(name):
    """Columns titled by a preset hold its values. What a row should be is printed, so that it can be pasted."""
    page, recipe = PAGE_OF[name], RECIPES[name]
    assert re.findall(r"^## (.*)$", without_code(page), re.MULTILINE) == SECTIONS
    learns = page.read_text().partition("## What it learns")[2].partition("\n## ")[0]
    assert f"](img/{name}.png)" in learns
    tried = page.read_text().partition("## Try it")[2].partition("\n## ")[0]
    assert f"\nrookery train {name} --env " in tried
    title, *rows = rows_of(page, "field")
    configs = [recipe.build("any", spec=None, preset=cell.strip("`")) for cell in title if cell.startswith("`")]
    assert configs and len(rows) > 5
    right = [[row[0], *(with_values(row[0], config) for config in configs), *row[1 + len(configs) :]] for row in rows]
    assert [f"| {' | '.join(row)} |" for row in right if row not in rows] == []


def test_the_table_check_can_fail():
    config = RECIPES["rainbow"].build("any", spec=None, preset="atari")
    assert with_values("`algo.v_min` … `algo.v_max`, `algo.noisy`", config) == "-10 … 10, yes"
    assert with_values("`algo.lr_end` `algo.replay.capacity`", config) == "none 1,000,000"


def test_the_table_of_extras_is_that_of_the_package():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert {row[0].strip("`") for row in rows_of(ROOT / "docs/install.md", "extra")[1:]} == extras - {"dev"}
    from rookery.cli.doctor import EXTRAS

    assert set(EXTRAS) == extras - {"dev", "all"}


def test_every_field_of_the_replay_memory_is_on_its_page_or_the_command_line():
    text = (ROOT / "docs/replay.md").read_text() + (ROOT / "docs/cli.md").read_text()
    missing = [field.name for field in fields(ReplayConfig) if not re.search(rf"[`.]{field.name}\b", text)]
    assert missing == []


def test_every_field_of_ray_is_on_the_page_of_clusters_with_its_default():
    rows = rows_of(ROOT / "docs/cluster-running.md", "field")[1:]
    told = {row[0].strip("`"): row[1] for row in rows}
    assert told == {
        f"ray.{field.name}": shown(field.default) if field.default != "" else "empty" for field in fields(RayConfig)
    }


def test_every_error_on_the_page_of_clusters_is_in_the_code():
    rooms = ("crews", "pipes", "tables", "topologies")
    code = [path for name in rooms for path in (ROOT / "rookery" / name).glob("*.py")]
    texts = [text for path in code for text in texts_in(ast.parse(path.read_text()))]
    messages = [row[0] for row in rows_of(ROOT / "docs/cluster-running.md", "message")[1:]]
    told = [told for message in messages for told in re.findall(r"`([^`]+)`", message)]
    assert len(told) > 12 and [each for each in told if not any(each in text for text in texts)] == []


def texts_in(code: ast.AST) -> list[str]:
    """Every text of a program; what is filled in is left out."""
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_every_number_of_the_replay_memory_is_explained():
    table = rows_of(ROOT / "docs/replay.md", "`replay.` in `metrics.jsonl` and `summary.json`")
    told = {name for row in table[1:] for name in re.findall(r"`(\w+)`", row[0])}
    plan = DQN(DQNConfig(), NetConfig(), SPEC, lanes=1).plan()
    memory = ReplayMemory(plan.table, parcel_shapes(SPEC, plan, 1, {}), SPEC, actors=1, seed=1)
    assert told == {*memory.stats(), "learner_idle"}
