"""Spelling of flags, nearest names, and tyro's errors in one line."""

import io
from dataclasses import dataclass, field

import pytest
import tyro

from rookery.cli.flags import comments_of, flags_of, last, nearest, one_line, parse, spell
from rookery.core.errors import UsageError


@dataclass(frozen=True)
class Inner:
    deep: bool = False  # how deep
    size: int = 3


@dataclass(frozen=True)
class Outer:
    steps: int = 5  # how many
    limit: float | None = None
    quick: bool = False
    name_of: str = "a"
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner = field(default_factory=Inner)


FLAGS = flags_of(Outer())


def read(*words: str) -> Outer:
    return parse(Outer, list(words), "prog", "about", Outer())


def test_flags_are_dotted_and_hyphenated():
    assert list(FLAGS) == ["steps", "limit", "quick", "name-of", "sizes", "inner.deep", "inner.size"]


def test_positional_fields_are_no_flags():
    @dataclass(frozen=True)
    class Args:
        run: tyro.conf.Positional[str]
        seed: int = 1

    assert list(flags_of(Args)) == ["seed"]


def test_comments_behind_fields_are_their_documentation():
    assert comments_of(Outer) == {"steps": "how many"}
    assert comments_of(Inner) == {"deep": "how deep"}


@pytest.mark.parametrize(
    "words, spelt",
    [
        ("--name_of x", "--name-of x"),
        ("--name_of=x_y", "--name-of=x_y"),
        ("--quick", "--quick"),
        ("--quick True", "--quick"),
        ("--quick false", "--no-quick"),
        ("--quick=0", "--no-quick"),
        ("--no-quick", "--no-quick"),
        ("--no-quick False", "--quick"),
        ("--no-inner.deep", "--inner.no-deep"),
        ("--inner.no-deep", "--inner.no-deep"),
        ("--inner.deep=yes --steps 3", "--inner.deep --steps 3"),
        ("--quick positional", "--quick positional"),
        ("--steps 1e6", "--steps 1000000"),
        ("--steps=100k", "--steps=100000"),
        ("--steps 2.5M", "--steps 2500000"),
        ("--steps 1.5", "--steps 1.5"),
        ("--name-of 1e6", "--name-of 1e6"),
        ("--limit none", "--limit None"),
        ("--limit -3.5", "--limit -3.5"),
        ("--name-of none", "--name-of none"),
        ("--help", "--help"),
    ],
)
def test_every_spelling_becomes_one(words, spelt):
    assert spell(words.split(), FLAGS) == spelt.split()


@pytest.mark.parametrize("words", ["--sizes 64,64", "--sizes=64,64", "--sizes (64,64)", "--sizes [64, 64]"])
def test_several_values_with_commas_are_refused_with_the_right_spelling(words):
    with pytest.raises(UsageError, match="--sizes takes its values with spaces between them: --sizes 64"):
        read(*words.split())


def test_short_forms_stand_for_long_ones():
    assert spell(["--core", "lstm"], {"net.core": str}) == ["--net.core", "lstm"]
    assert spell(["--ray_address", "auto"], {"ray.address": str}) == ["--ray.address", "auto"]
    assert spell(["--ray-address=auto"], {"ray.address": str}) == ["--ray.address=auto"]


def test_an_unknown_flag_gets_the_nearest_names():
    with pytest.raises(UsageError, match="no flag --step; did you mean --steps"):
        spell(["--step", "3"], FLAGS)
    with pytest.raises(UsageError, match=r"did you mean --inner\.size"):  # the last part is enough
        spell(["--size", "3"], FLAGS)


def test_a_switch_refuses_what_is_neither_on_nor_off():
    with pytest.raises(UsageError, match="--quick is on or off, not 'maybe'"):
        spell(["--quick=maybe"], FLAGS)


def test_the_last_value_counts():
    assert last(["--a", "1", "--a=2", "--b", "3"], "a") == "2"
    assert last(["--a", "1"], "b") is None


def test_nearest_lists_everything_when_nothing_is_near():
    assert nearest("xyz", ["train", "eval"]) == "known: eval, train"


def test_values_are_typed_by_the_dataclass():
    assert read("--steps", "7", "--limit", "0.5", "--sizes", "4", "5", "6", "--inner.deep", "--name-of", "b") == Outer(
        7, 0.5, False, "b", (4, 5, 6), Inner(True, 3)
    )
    assert read("--sizes") == Outer(sizes=())
    assert read() == Outer()


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(
    "words, message",
    [
        ("--steps abc", "--steps: 'abc' is not a whole number"),
        ("--steps 1.5", "--steps: '1.5' is not a whole number"),
        ("--steps", "--steps needs a value"),
        ("--sizes x", "--sizes: 'x' cannot be read"),
        ("stray", "not understood: stray"),
    ],
)
def test_an_error_of_tyro_is_one_line(words, message, unicode, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8" if unicode else "ascii"))
    with pytest.raises(UsageError) as caught:
        read(*words.split())
    assert str(caught.value) == f"{message} (prog --help)"


def test_a_box_of_unknown_form_still_becomes_one_line():
    assert one_line("something\nwent wrong\n") == "something went wrong"
    assert one_line("") == "the command line cannot be understood"
