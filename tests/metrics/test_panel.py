"""The panel shows what it is given, at any width, and nothing it is given or not given can stop a run."""

import io
import math
import os
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rookery.metrics.draw import plain_line, render
from rookery.metrics.output import BestEffort, text
from rookery.metrics.panel import Painter, Panel, Terminal

SNAPSHOT = {
    "recipe": "ppo", "env": "CartPole-v1", "preset": "cartpole", "topology": "local", "seed": 1, "device": "cpu",
    "env_steps": 333_333, "env_steps_limit": 500_000, "updates": 1302, "wall_s": 50.0, "eta_s": 27.0,
    "steps_per_s": 8123.4, "return_mean": 468.61, "return_std": 88.1, "episodes": 1243, "length_mean": 468.61,
    "target_return": 475.0, "losses": {"policy": -0.01132, "value": 12.31, "clip_fraction": 0.12},
    "lag_mean": 0.5, "lag_max": 2, "queue_depth": 3, "restarts": 1, "advice": "the environment limits the run (42%)",
    "shares": {"env": 0.42, "inference": 0.2, "learn": 0.22, "transfer": 0.01, "wait": 0.13, "other": 0.02},
    "ledger": {"trained": 331_285, "evicted": 0, "dropped": {"actor_died": 12}, "in_flight": 2036, "balance": 0},
    "messages": ["actor 1 was replaced"], "history": [(steps, steps**0.5) for steps in range(0, 333_333, 1000)],
}  # fmt: skip


def drawn(snapshot: dict, columns: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(render(snapshot, columns), end="")
    return console.file.getvalue().splitlines()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None, _environ={})


def test_everything_is_on_it():
    text = "\n".join(drawn(SNAPSHOT))
    for words in (
        "rookery · ppo · CartPole-v1 · cartpole", "66%   333,333 of 500,000 steps   0:50, 0:27 left", "468.6 ± 88.1",
        "target 475", "8,123", "1,302", "policy -0.01132", "clip fraction 0.12", "lag 0.5 (max 2)", "queue 3",
        "restarts 1", "331,285 trained", "12 dropped (actor died)", "2,036 in flight", "balanced", "env 42%",
        "wait 13%", "→ the environment limits the run (42%)", "! actor 1 was replaced", "local · cpu · seed 1",
    ):  # fmt: skip
        assert words in text, words
    assert len(text.splitlines()) <= 20 and any(0x2800 < ord(letter) < 0x2900 for letter in text)


def test_several_ranks_say_which_is_the_slowest_and_what_it_costs():
    text = "\n".join(drawn(SNAPSHOT | {"ranks": {"size": 4, "slowest": 2, "lost": 0.31, "cut": 0.25}}))
    for words in ("slowest rank 2 of 4", "lost to it 31%", "rollouts cut 25%"):
        assert words in text, words


def test_a_queue_says_which_side_waits_and_how_old_replayed_data_is():
    table = {"late_share": 0.0, "ring": 16.0, "replayed_lag_mean": 4.5, "learner_idle": 0.013, "actors_idle": 0.84}
    text = "\n".join(drawn(SNAPSHOT | {"replay": table}))
    for words in ("queue 3", "ring 16", "replayed lag 4.5", "learner idle 1%", "actors idle 84%"):
        assert words in text, words
    assert "memory" not in text and "memory 20" in "\n".join(drawn(SNAPSHOT | {"replay": {"size": 20}}))


@pytest.mark.parametrize("columns", [20, 33, 60, 79, 80, 100, 300])
def test_it_is_a_box_at_any_width(columns):
    lines = drawn(SNAPSHOT, columns)
    assert {len(line) for line in lines} == {columns}
    assert (
        lines[0].startswith("╭") and lines[-1].endswith("╯") and all(line[0] == line[-1] == "│" for line in lines[1:-1])
    )


def test_a_narrow_terminal_loses_the_curve_and_no_number():
    text = "\n".join(drawn(SNAPSHOT, 60))
    assert not any(0x2800 < ord(letter) < 0x2900 for letter in text)
    for words in ("333k/500k", "468.6", "0.12", "2,036", "other  2%"):
        assert words in text


def test_a_wide_terminal_has_a_wide_and_high_curve_and_the_whole_message():
    """A message may have two lines; a third one is cut."""
    said = "topology auto: " + "because of the time that a step takes " * 4
    narrow, wide = (drawn(SNAPSHOT | {"messages": [said]}, columns) for columns in (80, 200))
    curves = [[sum(0x2800 < ord(letter) < 0x2900 for letter in line) for line in text] for text in (narrow, wide)]
    assert sum(curves[1]) > 4 * sum(curves[0]) and sum(map(bool, curves[1])) == sum(map(bool, curves[0])) + 3
    assert said.strip() in "\n".join(wide) and "! topology auto" in "\n".join(narrow)
    assert sum("because" in line or "takes" in line for line in narrow) == 2 and "…" in "\n".join(narrow)


@pytest.mark.parametrize("columns", [20, 47, 80, 92, 200])
def test_the_time_bar_is_always_full(columns):
    for shares in (
        SNAPSHOT["shares"],
        {"env": 1.0},
        {"env": 0.2, "wait": 0.3},
        dict.fromkeys(SNAPSHOT["shares"], 1 / 6),
    ):
        bars = [line for line in drawn({"shares": shares}, columns) if "█" in line]
        assert [line.count("█") for line in bars] == [columns - 4]


def test_an_imbalance_and_a_non_finite_loss_are_named():
    text = "\n".join(
        drawn({"ledger": {"trained": 5, "balance": -3}, "losses": {"value": math.nan, "policy": math.inf}})
    )
    assert "-3 unaccounted" in text and "value nan" in text and "policy nan" in text


numbers = st.none() | st.floats() | st.integers(-(10**20), 10**20)
TEXT = {"recipe", "env", "preset", "topology", "device", "advice"}
MAPS = {"losses", "shares", "ledger"}


def hostile(key: str):
    if key in TEXT:
        return st.none() | st.text(max_size=200)
    if key in MAPS:
        return st.none() | st.dictionaries(st.sampled_from([*SNAPSHOT[key], "x"]), numbers | st.just("?"), max_size=5)
    if key == "messages":
        return st.none() | st.lists(st.text(), max_size=5)
    if key == "history":
        return st.none() | st.lists(st.tuples(numbers, numbers), max_size=30)
    return numbers


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional={key: hostile(key) for key in SNAPSHOT}), st.integers(1, 120))
def test_any_snapshot_can_be_drawn(snapshot, columns):
    render(snapshot, columns)
    assert "\n" not in plain_line({**snapshot, "messages": None})


def test_an_empty_snapshot_can_be_drawn():
    assert len(drawn({})) > 3 and plain_line({})


# The painter, on the thread that calls it


def test_without_a_terminal_it_prints_a_line_now_and_then():
    clock, out = Clock(), io.StringIO()
    painter = Painter(Console(file=out), clock=clock)
    for _ in range(100):
        painter.update(SNAPSHOT)
        clock.now += 0.5  # 50 seconds in all
    painter.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 11 and len(set(lines)) == 1 and lines[0].isascii()
    for words in (
        "0:50 | 333,333/500,000 steps | 8,123/s | return 468.6 (std 88.1, 1,243 episodes)",
        "env 42%",
        "restarts 1",
    ):
        assert words in lines[0]


def test_it_draws_at_most_four_times_a_second_and_the_last_snapshot_on_closing():
    clock, console = Clock(), terminal()
    painter = Painter(console, clock=clock)
    for steps in range(10):
        painter.update(SNAPSHOT | {"env_steps": steps})
        clock.now += 0.02
    assert console.file.getvalue().count("╭─") == 1
    painter.close()
    text = console.file.getvalue()
    assert " 9 of 500,000" in text.rpartition("╭─")[2] and " 8 of 500,000" not in text
    painter.close()
    assert console.file.getvalue() == text


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stream_that_fails_switches_the_panel_off(is_terminal):
    painter = Painter(Terminal(file=Broken(), force_terminal=is_terminal, _environ={}), clock=Clock())
    with pytest.warns(UserWarning, match="the panel is off, training continues: BrokenPipeError"):
        painter.update(SNAPSHOT)
    painter.update(SNAPSHOT)
    painter.close()


# The panel, with its thread


def test_quiet_prints_nothing_and_starts_no_thread():
    console, before = terminal(), threading.active_count()
    panel = Panel(quiet=True, console=console)
    panel.update(SNAPSHOT)
    assert threading.active_count() == before
    panel.close()
    assert console.file.getvalue() == ""


def test_it_uses_no_alternate_screen_and_gives_the_cursor_and_the_streams_back():
    console, before = terminal(), (sys.stdout, sys.stderr)
    panel = Panel(console=console, clock=Clock())
    panel.update(SNAPSHOT)
    panel.close()
    text = console.file.getvalue()
    assert "\x1b[?1049h" not in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert (sys.stdout, sys.stderr) == before


def test_the_last_snapshot_is_the_one_that_is_left_on_the_screen():
    for _ in range(20):
        console = terminal()
        panel = Panel(console=console, clock=Clock())
        for steps in range(50):
            panel.update(SNAPSHOT | {"env_steps": steps})
        panel.close(timeout=60)
        assert " 49 of 500,000" in console.file.getvalue().rpartition("╭─")[2]
        panel.update(SNAPSHOT | {"env_steps": 50})  # too late: nothing happens
        panel.close()


@pytest.mark.filterwarnings("error")
def test_its_failure_ends_neither_its_thread_nor_the_run():
    panel = Panel(console=Terminal(file=Broken(), force_terminal=True, _environ={}))
    for _ in range(3):
        panel.update(SNAPSHOT)
    panel.close(timeout=60)


class Stuck(io.StringIO):
    """A stream that blocks, as a notebook's may, and that is no descriptor."""

    def __init__(self):
        super().__init__()
        self.go, self.entered = threading.Event(), threading.Event()

    def write(self, text):
        self.entered.set()
        self.go.wait()
        return len(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stream_that_blocks_stops_neither_the_run_nor_its_end(is_terminal, capsys):
    stuck = Stuck()
    panel = Panel(console=Terminal(file=stuck, force_terminal=is_terminal, _environ={}))
    for _ in range(100):
        panel.update(SNAPSHOT)
    assert stuck.entered.wait(60)
    panel.close(timeout=0.1)
    print("prints do not wait for the panel")
    assert capsys.readouterr().out == "prints do not wait for the panel\n"
    stuck.go.set()


def test_of_a_pipe_that_nobody_reads_only_one_line_waits_and_the_next_is_the_newest():
    read, write = os.pipe()
    os.set_blocking(write, False)
    filled = 0
    while True:
        try:
            filled += os.write(write, b"x" * 1024)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    clock, writer = Clock(), BestEffort(write)
    painter = Painter(Terminal(file=text(writer, sys.__stdout__)), writer, clock)
    for steps in range(100):
        painter.update(SNAPSHOT | {"env_steps": steps})
        clock.now += 100.0
    assert 0 < writer.waiting < 1000
    os.read(read, filled)
    assert writer.drain(60)
    painter.update(SNAPSHOT | {"env_steps": 100})
    painter.close(timeout=60)
    lines = os.read(read, 65536).decode().lstrip("x").splitlines()
    assert [line.split()[2] for line in lines] == ["0/500,000", "100/500,000"]
    os.close(read)
    os.close(write)
