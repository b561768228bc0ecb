"""Figures: seeds are averaged, experiments are told apart, and what is drawn is what was recorded."""

import builtins
import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rookery.core.errors import CheckpointError, StorageError, UsageError
from rookery.metrics import plot
from rookery.metrics.plot import grouped, plot_runs, plot_scaling, read_curve, time_at


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, to look into."""
    saved: list[Figure] = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (saved.append(self), real(self, *args, **kw))[1])
    return saved


def make_run(folder, offset=0.0, points=20, wall=1.0, **config):
    folder.mkdir(parents=True)
    config = {"recipe": "ppo", "env": "CartPole-v1", "seed": 1, "target_return": None, "algo": {"clip": 0.2}} | config
    (folder / "config.json").write_text(json.dumps(config))
    records = [
        {
            "kind": "train",
            "env_steps": 100 * i,
            "wall_s": wall * i,
            "return_mean": i + offset if i > 1 else None,
            "steps_per_s": 1,
        }
        for i in range(points)
    ]
    lines = [
        *map(json.dumps, records),
        '{"kind": "log", "env_steps": 5, "return_mean": 99, "wall_s": 1}',
        '{"kind": "tr',
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_evaluations_before_the_first_record_are_at_their_own_times():
    found = time_at(np.array([50.0, 100.0, 150.0]), np.array([100.0, 200.0]), np.array([4.0, 6.0]))
    assert found.tolist() == [2.0, 4.0, 5.0]


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_file_is_an_image_of_the_right_kind(tmp_path):
    run = make_run(tmp_path / "run")
    for name, kind in (("a.png", "PNG"), ("deep/b.png", "PNG"), ("c.jpg", "JPEG")):
        out = plot_runs([run], tmp_path / name)
        with Image.open(out) as image:
            assert image.format == kind and image.width > 1000
    with pytest.raises(UsageError, match=r"c\.xyz"):
        plot_runs([run], tmp_path / "c.xyz")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        plot_runs([run], tmp_path / "file" / "a.png")


def test_a_run_is_read_without_other_kinds_torn_lines_and_missing_returns(tmp_path):
    curve = read_curve(make_run(tmp_path / "run", offset=5, wall=2.0))
    np.testing.assert_array_equal(curve.env_steps, np.arange(200, 2000, 100))
    np.testing.assert_array_equal(curve.wall_s, np.arange(4, 40, 2))
    np.testing.assert_array_equal(curve.return_mean, np.arange(7, 25))
    assert curve.config["algo/clip"] == 0.2


def test_steps_that_a_resumed_run_did_again_count_once(tmp_path):
    run = make_run(tmp_path / "run")
    rows = [(100, 1, 1.0), (200, 2, 2.0), (300, 3, 3.0), (200, 0.5, 7.0), (300, 1.5, 8.0)]  # back to 100, clock at 0
    keys = ("env_steps", "wall_s", "return_mean")
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train"} | dict(zip(keys, row))) + "\n" for row in rows)
    )
    curve = read_curve(run)
    assert curve.env_steps.tolist() == [100, 200, 300] and curve.return_mean.tolist() == [1.0, 7.0, 8.0]
    assert curve.wall_s.tolist() == [1.0, 1.0, 2.0]


def test_seeds_are_one_line_with_a_band(tmp_path, figures):
    runs = [make_run(tmp_path / f"s{seed}", offset=seed, seed=seed, out=f"s{seed}") for seed in (1, 2, 6)]
    plot_runs(runs, tmp_path / "a.png")
    axes = figures[0].axes[0]
    (mean,) = [line for line in axes.lines if line.get_label() == "ppo (3 seeds)"]
    x, y = mean.get_data()
    np.testing.assert_allclose(y, x / 100 + 3)  # the mean of offsets 1, 2 and 6
    assert len(axes.lines) == 4 and len(axes.collections) == 1
    edge = axes.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(sorted({round(v - u / 100, 6) for u, v in edge}), [1, 6])
    assert "lowest to highest seed" in figures[0].legends[0].get_title().get_text()


def test_the_mean_stops_where_a_seed_ends(tmp_path, figures):
    plot_runs([make_run(tmp_path / "a", points=10), make_run(tmp_path / "b", points=20, seed=2)], tmp_path / "a.png")
    (mean,) = [line for line in figures[0].axes[0].lines if "seeds" in line.get_label()]
    assert mean.get_xdata().max() == 900 and mean.get_xdata().min() == 200


def test_seeds_without_common_steps_are_drawn_one_by_one(tmp_path, figures):
    early, late = make_run(tmp_path / "a", points=3), make_run(tmp_path / "b", points=20, seed=2)
    lines = late.joinpath("metrics.jsonl").read_text().splitlines()[10:]
    late.joinpath("metrics.jsonl").write_text("\n".join(lines))
    plot_runs([early, late], tmp_path / "a.png")
    assert labels(figures[0]) == ["ppo"] and len(figures[0].axes[0].lines) == 2


def test_experiments_are_named_by_what_differs(tmp_path, figures):
    runs = [
        make_run(tmp_path / "1"),
        make_run(tmp_path / "2", recipe="a2c", algo={"rate": 1}),
        make_run(tmp_path / "3", algo={"clip": 0.1}),
        make_run(tmp_path / "4", algo={"clip": 0.1}, seed=2),
    ]
    plot_runs(runs, tmp_path / "a.png")
    assert labels(figures[0]) == ["ppo, clip=0.2", "a2c", "ppo, clip=0.1 (2 seeds)"]
    assert len({line.get_color() for line in figures[0].axes[0].lines}) == 3
    names = [
        label for label, _ in grouped([read_curve(run) for run in (runs[1], make_run(tmp_path / "5", env="Pong"))])
    ]
    assert names == ["a2c, CartPole-v1", "ppo, Pong"]


def test_a_whole_number_is_the_same_setting_with_and_without_a_point(tmp_path, figures):
    runs = [make_run(tmp_path / str(seed), seed=seed, algo={"ratio": ratio}) for seed, ratio in ((1, 64), (2, 64.0))]
    plot_runs(runs, tmp_path / "a.png")
    assert labels(figures[0]) == ["ppo (2 seeds)"]


def test_a_target_is_a_line_and_is_named(tmp_path, figures):
    plot_runs([make_run(tmp_path / "1", target_return=475.0)], tmp_path / "a.png")
    assert any(text.get_text() == "target 475" for text in figures[0].axes[0].texts)
    assert all(any(np.all(np.array(line.get_ydata()) == 475) for line in axes.lines) for axes in figures[0].axes)


def test_many_experiments_stay_distinguishable(tmp_path, figures):
    plot_runs([make_run(tmp_path / f"{i}", recipe=f"r{i}") for i in range(12)], tmp_path / "a.png")
    assert len({(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].lines}) == 12


def test_a_folder_without_config_stands_for_itself(tmp_path, figures):
    run = make_run(tmp_path / "borrowed")
    (run / "config.json").unlink()
    plot_runs([run], tmp_path / "a.png")
    assert labels(figures[0]) == ["borrowed"]


def test_what_cannot_be_plotted_is_said(tmp_path):
    with pytest.raises(UsageError, match="not a run folder"):
        plot_runs([tmp_path], tmp_path / "a.png")
    young = make_run(tmp_path / "young", points=1)
    with pytest.raises(UsageError, match="nothing to plot"):
        plot_runs([young], tmp_path / "a.png")
    (young / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        plot_runs([young], tmp_path / "a.png")
    with pytest.raises(UsageError, match="no measurements"):
        plot_scaling([], tmp_path / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"rookery\[plots\]"):
        plot_runs([make_run(tmp_path / "run")], tmp_path / "a.png")


def test_scaling_shows_the_measurements_beside_the_ideal(tmp_path, figures):
    rows = [
        {"actors": 4, "steps_per_s": 300, "acting_steps_per_s": None, "wait_share": 0.25},
        {"actors": 1, "steps_per_s": 100, "acting_steps_per_s": 150, "wait_share": None},
        {"actors": 2, "steps_per_s": 180, "acting_steps_per_s": 290},
    ]
    plot_scaling(rows, tmp_path / "a.png")
    left, right = figures[0].axes
    lines = {line.get_label(): line for line in left.lines}
    np.testing.assert_array_equal(lines["acting and learning"].get_data(), [[1, 2, 4], [100, 180, 300]])
    ideals = [line.get_ydata()[-1] for line in left.lines if len(line.get_xdata()) == 2]
    assert ideals == [600, 400]
    assert [bar.get_height() for bar in right.patches] == [0, 0, 25]
    assert [text.get_text() for text in right.texts] == ["n/a", "n/a", "25%"]
    assert plot.PALETTE[0] == lines["acting and learning"].get_color()


HOSTILE = {
    "a formula that is none": {"recipe": r"$\frac{$"},
    "a long name": {"recipe": "x" * 500_000},
    "control characters": {"env": "\x1b[2J\x07\n"},
    "no text": {"recipe": {"a": [1]}, "env": None},
    "huge numbers": {"target_return": 1e308},
    "a target that is none": {"target_return": [1, 2]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_strangers_config_says_is_drawn_as_plain_text(tmp_path, figures, name):
    plot_runs([make_run(tmp_path / "run", **HOSTILE[name])], tmp_path / "a.png")
    (text,) = labels(figures[-1])
    assert len(text) < 200 and text.isprintable()


def test_numbers_that_no_axis_can_show_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    records = [
        (10**400, 1, 1),
        (5, 10**400, 1),
        (5, 1, -(10**400)),
        (1e308, 1e308, 1e308),
        (-1e99, 5e99, -1e99),
        (7, 8, 9),
    ]
    names = ("env_steps", "wall_s", "return_mean")
    lines = (json.dumps({"kind": "train"} | dict(zip(names, each))) + "\n" for each in records)
    (run / "metrics.jsonl").write_text("".join(lines))
    assert read_curve(run).env_steps.tolist() == [-1e99, 7]
    plot_runs([run], tmp_path / "a.png")


def test_a_picture_for_a_run_folder_is_not_drawn_through_a_link(tmp_path):
    run, secret = make_run(tmp_path / "run"), tmp_path / "secret.png"
    secret.write_text("mine")
    (run / "report").mkdir()
    (run / "report" / "curve.png").symlink_to(secret)
    with pytest.raises(StorageError, match=r"curve\.png cannot be written: it is a symbolic link"):
        plot_runs([run], "report/curve.png", within=run)
    (run / "report" / "curve.png").unlink()
    assert plot_runs([run], "report/curve.png", within=run) == run / "report" / "curve.png"
    assert secret.read_text() == "mine"


# Resumes


def resume(steps, wall, **changed):
    return json.dumps({"kind": "resume", "env_steps": steps, "wall_s": wall, "changed": changed}) + "\n"


def resumed_run(folder, *marks, **config):
    run = make_run(folder, **config)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]
    (run / "metrics.jsonl").write_text("".join([*lines, *marks]))
    return run


def test_a_resume_is_a_vertical_line_with_the_fields_that_changed(tmp_path, figures):
    marks = [resume(500, 5.0, **{"algo.lr": [0.001, 0.0001]}), resume(900, 9.0), resume(905, 9.1, env=["$", "$"])]
    plot_runs([resumed_run(tmp_path / "run", *marks)], tmp_path / "a.png")
    for axes, places in zip(figures[0].axes, ([500, 900, 905], [5.0, 9.0, 9.1])):
        drawn = [
            line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == ":"
        ]
        assert drawn == places
        texts = [text.get_text() for text in axes.texts]
        assert texts == ["algo.lr 0.001 → 0.0001", r"env \$ → \$"], "no formula, and nothing where nothing changed"


def test_of_resumes_to_the_same_steps_the_last_counts_and_damaged_ones_do_not(tmp_path):
    marks = [resume(500, 5.0), resume(900, 9.0), resume(500, 6.0), resume("x", 1.0), '{"kind": "resume"}\n']
    marks += [json.dumps({"kind": "resume", "env_steps": 600, "wall_s": 7, "changed": ["a", {"b": 1}]}) + "\n"]
    found = read_curve(resumed_run(tmp_path / "run", *marks)).resumes
    assert [(mark.env_steps, mark.text) for mark in found] == [(500, ""), (500, ""), (600, "")]


def test_many_changes_and_long_values_are_cut(tmp_path):
    run = resumed_run(tmp_path / "run", resume(500, 5.0, **{f"f{i}": ["o" * 99, i] for i in range(9)}))
    (mark,) = read_curve(run).resumes
    assert mark.text.startswith("f0 " + "o" * 24 + "… → 0, f1 ") and mark.text.endswith(" and 6 more")


def test_runs_that_began_with_other_networks_are_told_apart_by_these(tmp_path, figures):
    begun = {"run": "/home/me/runs/a", "checkpoint": "checkpoints/step-000000000064", "env_steps": 64, "digest": "0"}
    runs = [make_run(tmp_path / "scratch"), make_run(tmp_path / "tuned", init_from=begun, history=[{"env_steps": 1}])]
    plot_runs([*runs, make_run(tmp_path / "third", init_from=None)], tmp_path / "a.png")
    assert labels(figures[0]) == ["ppo, init_from=None (2 seeds)", "ppo, init_from=a/step-000000000064"]
