"""The report page: whole, self-contained, and nothing in a run folder can put script into it."""

import json
import math
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from rookery.core.errors import CheckpointError, StorageError, UsageError
from rookery.metrics import chart, page, recorded, report
from rookery.metrics.recorded import read_run
from rookery.metrics.report import write_beside, write_report

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m'
KNOWN = {
    "html", "head", "meta", "title", "style", "body", "input", "main", "header", "h1", "div", "label", "section", "h2",
    "b", "p", "dl", "dt", "dd", "figure", "figcaption", "svg", "path", "polyline", "rect", "span", "ul", "li", "i",
    "script", "details", "summary", "video", "a",
}  # fmt: skip
VOID = {"meta", "input", "img", "br"}
CLOSED = {"path", "polyline", "rect"}  # of SVG, closed in place


class Page(HTMLParser):
    """Elements of a page with their attributes; fails where one is not closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.text, self.scripts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in CLOSED, tag
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] in (["script"], ["style"]) else self.text).append(data)

    def all(self, tag):
        return [attrs for found, attrs in self.found if found == tag]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def train(i, **more):
    return {"kind": "train", "env_steps": 100 * i, "wall_s": float(i), "return_mean": 2.0 * i, "updates": i} | more


def make_run(folder, records=None, messages=(), **config):
    folder.mkdir(parents=True)
    config = {"recipe": "ppo", "env": "CartPole-v1", "seed": 1, "algo": {"lr": 1e-3, "clip": 0.2}} | config
    (folder / "config.json").write_text(json.dumps(config))
    ledger = {"collected": 1900, "trained": 1800, "evicted": 0, "dropped": {"actor_died": 60}, "in_flight": 40}
    usual = {"losses": {"kl": 0.1}, "lag_max": 2, "replay": {"size": 9}, "shares": {"learn": 0.75, "env": 0.25}}
    records = [train(i, **usual, ledger=ledger) for i in range(20)] if records is None else records
    lines = [json.dumps(record) for record in [*records, *messages]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read(path):
    return Page(path.read_text())


def test_the_page_is_whole_and_shows_what_was_recorded(tmp_path):
    said = {"kind": "message", "env_steps": 500, "wall_s": 5.0, "text": "actor 1 was killed"}
    run = make_run(tmp_path / "run", messages=[said])
    (run / "eval").mkdir()
    (run / "eval" / "a.json").write_text(json.dumps({"env_steps": 1900, "return_mean": 77.5, "episodes": 9}))
    (run / "summary.json").write_text(json.dumps({"exit_reason": "target_return", "restarts": 3}))
    assert write_report([run]) == run / "report/index.html"
    shown = read(run / "report/index.html")
    for words in ("ppo on CartPole-v1", "actor 1 was killed", "77.5", "target return reached", "learn 75.0%", "kl"):
        assert words in shown.words
    assert "dropped: actor_died" in shown.words and "it balances" in shown.words
    assert any("5 s, 500 steps" in text for text in shown.text)


def test_the_page_loads_nothing_and_allows_only_its_own_script(tmp_path):
    write_report([make_run(tmp_path / "run")])
    text = (tmp_path / "run/report/index.html").read_text()
    shown = Page(text)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in shown.found}
    assert shown.all("script") == [{}] and text.count(page.SCRIPT) == 1
    (policy,) = [each["content"] for each in shown.all("meta") if "http-equiv" in each]
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/]{43}='", policy)
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_nothing_in_a_strangers_folder_becomes_markup(tmp_path):
    records = [
        train(i, losses={EVIL: i / 7, "ok": i}, info={EVIL: i}, replay={EVIL: {EVIL: i}}, advice=EVIL,
              ledger={"collected": 5, "trained": EVIL, "dropped": {EVIL: 5}}, shares={EVIL: 1, "env": EVIL})
        for i in range(3)
    ]  # fmt: skip
    messages = [{"kind": "message", "env_steps": EVIL, "wall_s": EVIL, "text": EVIL}, {"kind": EVIL, "text": EVIL}]
    run = make_run(tmp_path / "<script>alert(0)<", records, messages, recipe=EVIL, env=EVIL, **{EVIL: {EVIL: EVIL}})
    other = make_run(tmp_path / "other", topology=EVIL, actors=[EVIL], seed={"a": EVIL})
    for inner in ("eval", "report"):
        (run / inner).mkdir()
    (run / "eval" / "a.json").write_text(json.dumps({"return_mean": 1, "episodes": EVIL, "env_steps": 5, "x": EVIL}))
    (run / "report" / "x\"onerror=alert(3) '.mp4").write_bytes(b"0" * 9)
    (run / "report" / 'y"onerror=alert(3) javascript:1.mp4').write_bytes(b"0" * (report.SMALL_FILM + 1))
    (run / "summary.json").write_text(json.dumps({"exit_reason": EVIL, "restarts": EVIL, "ledger": EVIL}))
    shown = read(write_report([run, other], tmp_path / "all.html"))
    assert {tag for tag, _ in shown.found} <= KNOWN
    assert len(shown.all("script")) == 1 and shown.scripts == [page.STYLE, page.SCRIPT]
    assert not [name for _, attrs in shown.found for name in attrs if name.startswith("on")]
    assert {each["src"][:5] for each in shown.all("video")} == {"data:", "./%3C"}
    assert all(each["href"].startswith("./") and ":" not in each["href"] for each in shown.all("a"))
    assert "<script>alert(1)</script>" in shown.words  # as text
    assert not set("\x1b\u202e") & set("".join(shown.text))


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n{"kind": "train", "env_st\n[1]\n' + b"x" * (recorded.MAX_LINE + 5) + b"\n")
        file.write(json.dumps(train(30)).encode() + b'\n{"kind": "tr')
    found = read_run(run)
    assert found.env_steps[-1] == 3000 and found.damaged >= 4
    write_report([run])
    assert "damaged lines" in read(run / "report/index.html").words


@pytest.mark.parametrize("records", [[], [{"kind": "train"}], [train(0, return_mean=None)], [train(1e300), train(2)]])
def test_a_run_without_much_to_show_has_a_page(tmp_path, records):
    shown = read(write_report([make_run(tmp_path / "run", records)]))
    assert "no episode has ended" in shown.words or records[-1:] == [train(2)]


def test_numbers_that_no_axis_can_show_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", [train(i) for i in range(9)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind":"train","env_steps":1e308,"wall_s":1,"return_mean":1}\n')
        file.write('{"kind":"train","env_steps":900,"wall_s":9,"return_mean":-1e300,"losses":{"a":true,"b":1e200}}\n')
    found = read_run(run)
    assert len(found.env_steps) == 10 and math.isnan(found.series["return_mean"][-1])
    assert "losses/a" not in found.series
    write_report([run])


def test_steps_that_a_resumed_run_took_again_count_once(tmp_path):
    records = [train(1), train(2), train(3, return_mean=99.0), train(2.5, wall_s=0.5), train(4, wall_s=2.0)]
    found = read_run(make_run(tmp_path / "run", records))
    assert found.env_steps.tolist() == [100, 200, 250, 400] and (np.diff(found.wall_s) >= 0).all()


def test_a_large_file_is_thinned_and_keeps_its_messages_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "SMALL", 1000)
    monkeypatch.setattr(recorded, "RECORDS", 50)
    run = make_run(tmp_path / "run", [])
    with open(run / "metrics.jsonl", "w") as file:
        for i in range(5000):
            file.write(json.dumps(train(i), separators=(",", ":")) + "\n")
            if i % 1000 == 7:
                file.write(json.dumps({"kind": "message", "env_steps": 1, "wall_s": 1, "text": f"no {i}"}) + "\n")
    found = read_run(run)
    assert 40 <= len(found.env_steps) <= 60 and found.env_steps[-1] == 499_900
    assert [each.text for each in found.messages] == [f"no {i}" for i in range(7, 5000, 1000)]


def test_many_messages_are_cut_in_the_middle(tmp_path):
    said = [{"kind": "message", "env_steps": i, "wall_s": i, "text": f"no {i}"} for i in range(recorded.MESSAGES + 9)]
    found = read_run(make_run(tmp_path / "run", messages=said))
    assert len(found.messages) == recorded.MESSAGES and found.unsaid == 9
    assert found.messages[0].text == "no 0" and found.messages[-1].text == said[-1]["text"]


def test_a_run_has_one_colour_and_letter_everywhere_and_differences_are_marked(tmp_path):
    runs = [make_run(tmp_path / str(i), seed=i, algo={"lr": 1e-3, "clip": 0.1 * i}) for i in range(9)]
    shown = read(write_report(runs, tmp_path / "all.html"))
    for line in shown.all("polyline"):
        index = ord(line["data-run"]) - ord("A")
        assert line["class"] == f"line r{index % chart.COLOURS} d{index // chart.COLOURS}"
    assert "2 fields differ" in shown.words and "algo.clip" in shown.words and "I 0.8" in shown.words
    assert "3 fields are the same" in shown.words


def test_small_films_are_inside_and_large_ones_are_linked(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "report").mkdir()
    (run / "report/small.mp4").write_bytes(b"abc")
    (run / "report/large.webm").write_bytes(b"0" * (report.SMALL_FILM + 1))
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (run / "report/link.mp4").symlink_to(tmp_path / "secret.mp4")
    films = [each["src"] for each in read(write_report([run])).all("video")]
    assert films == ["./large.webm", "data:video/mp4;base64,YWJj"]
    films = [each["src"] for each in read(write_report([run], tmp_path / "x" / "all.html")).all("video")]
    assert films[0] == "./../run/report/large.webm"


def test_what_cannot_be_read_or_written_is_told(tmp_path):
    with pytest.raises(UsageError, match="which run"):
        write_report([])
    with pytest.raises(UsageError, match="not a run folder"):
        write_report([tmp_path])
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_report([run], tmp_path / "file" / "page.html")
    os.mkfifo(tmp_path / "pipe")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="symbolic link"):
        write_report([run])


def test_a_page_never_fails_a_run(tmp_path, monkeypatch):
    told = []
    run = make_run(tmp_path / "run")
    (run / "report").symlink_to(tmp_path)
    write_beside(run, told.append)
    assert len(told) == 1 and "no report page" in told[0] and "symbolic link" in told[0]
    assert not (tmp_path / "index.html").exists()

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(report, "render", broken)
    write_beside(run, told.append)
    assert "a bug" in told[1]


def test_thinning_keeps_the_peaks():
    values = np.sin(np.arange(100_000) / 900)
    values[54_321], values[777] = 9.0, -9.0
    kept = chart.thinned(values)
    assert len(kept) <= 2 * chart.POINTS + 2 and {0, 777, 54_321, 99_999} <= set(kept.tolist())
    assert chart.thinned(values[:10]).tolist() == list(range(10))


@pytest.mark.parametrize("low, high", [(0, 1), (0, 60_204), (-1e-9, 3e-9), (435, 436.5), (-1e90, 1e90), (0, 7)])
def test_ticks_are_round_and_few(low, high):
    found = chart.ticks(low, high)
    assert 2 <= len(found) <= 6 and low - 1e-9 * abs(high) <= found[0] and found[-1] <= high * (1 + 1e-6)
    steps = np.diff(found)
    assert np.allclose(steps, steps[0]) and f"{steps[0]:.0e}"[0] in "125"


def test_labels_near_each_other_do_not_cover_one_another():
    placed = chart._apart([(1.0, 0.5), (1.0, 0.51), (0.2, 0.5), (1.0, 0.49)])
    near = sorted(placed[index] for index in (0, 1, 3))
    assert min(np.diff(near)) >= chart.LABEL - 1e-9 and placed[2] == 0.5


def test_resumes_are_lines_in_the_charts_and_a_list(tmp_path):
    marks = [{"kind": "resume", "env_steps": 500, "wall_s": 5.0, "changed": {"algo.lr": [1e-3, EVIL]}}]
    marks.append({"kind": "resume", "env_steps": 900, "wall_s": 9.0, "changed": {}})
    run = make_run(tmp_path / "run", messages=marks, init_from={"run": "/r/a", "checkpoint": "eval/best/step-1"})
    found = read(write_report([run]))
    lines = [attrs["d"] for attrs in found.all("path") if attrs.get("class") == "resumed"]
    assert "M263 0V1000" in lines and len(lines) >= 4
    assert "after 500 steps, 5 s: algo.lr 0.001 →" in found.words and "no field was changed" in found.words
    assert "began with the networks of a/step-1" in found.words and not found.all("img")
