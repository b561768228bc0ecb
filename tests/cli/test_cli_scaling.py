"""`rookery bench ddppo-scaling`, from stored measurements: tables, figure, and what it refuses."""

import json

import pytest

from rookery.cli.main import main
from rookery.core.errors import UsageError


@pytest.fixture
def stored(tmp_path):
    """Inputs as an earlier call has written them: two ranks share the machine and so learn more slowly."""
    same = {"rows": 16, "envs": 2, "delay": 0.01, "spread": 0.3}
    runs = [
        {"ranks": 1, "preempt": 1.0, "rollout_s": [[0.4, 0.5] * 5], "wait_s": [[0.0] * 10], "learn_s": [[0.1] * 10]},
        {
            "ranks": 2, "preempt": 1.0, "rollout_s": [[0.4] * 9, [0.6] * 9], "wait_s": [[0.2] * 9, [0.0] * 9],
            "learn_s": [[0.2] * 9] * 2,
        },
        {
            "ranks": 2, "preempt": 0.5, "rollout_s": [[0.4] * 9, [0.4] * 9], "wait_s": [[0.0] * 9] * 2,
            "learn_s": [[0.2] * 9] * 2,
        },
    ]  # fmt: skip
    inputs = {"minibatches": 4, "floats": 50_000, "sizes": [1000, 1_000_000], "seconds": [1e-4, 4e-3]}
    inputs["runs"] = [run | same | {"steps_per_s": 60.0 * run["ranks"]} for run in runs]
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"inputs": inputs}))
    return path


def test_stored_measurements_are_simulated_again(stored, tmp_path, capsys):
    assert main(["bench", "ddppo-scaling", "--measured", str(stored), "--quick", "--out", str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "(fitted)" not in text.partition("Assumptions")[0]  # up to 16 ranks there is no number of the paper's
    assert "Assumptions:" in text and "fitted:" in text and "predicted:" in text
    report = json.loads((tmp_path / "b" / "ddppo-scaling.json").read_text())
    assert report["inputs"] == json.loads(stored.read_text())["inputs"]
    assert (tmp_path / "b" / "ddppo-scaling.png").stat().st_size > 1000
    one, two, _ = report["check"]
    assert one["simulated_round_s"] == pytest.approx(one["measured_round_s"], rel=0.05)
    assert two["barrier_round_s"] == pytest.approx(two["measured_round_s"])  # the slowest rank, then learning
    for curve in report["curves"].values():
        assert [row["ranks"] for row in curve] == [1, 2, 4, 8, 16]
        assert curve[0]["waiting"]["efficiency"] == 1 and curve[-1]["preempted"]["cut"] > 0
        assert curve[-1]["waiting"]["efficiency"] < curve[-1]["preempted"]["efficiency"] < 1.1
    paper = {row["ranks"]: row for row in report["habitat"]["rows"]}[128]
    assert paper["preempted"] == pytest.approx(paper["paper"], abs=0.01)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rounds 1", "whole number of at least 2"),
        ("--max-ranks", "needs a value"),
        ("--ranks 4", "is set by bench ddppo-scaling"),
        ("--measured missing.json", "missing.json is not a ddppo-scaling.json"),
        ("--measured missing.json --seed 3", "there is no use for --seed"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert main(["bench", "ddppo-scaling", *words.split()]) == UsageError.exit_code
    assert message in capsys.readouterr().err
