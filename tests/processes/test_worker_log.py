"""Logs of workers: appended to, shortened while they are written, and read at their end."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from rookery.processes import worker_log
from rookery.processes.worker_log import END, HEAD, LIMIT, WorkerLog

LONG = 120.0  # seconds: never reached unless something is broken


def write(log: WorkerLog, text: str, fd: int | None = None) -> None:
    """As the next process would, or one that has the file open."""
    own = log.open() if fd is None else fd
    os.write(own, text.encode())
    if fd is None:
        os.close(own)


def test_the_tail_is_that_of_the_present_process(tmp_path):
    log = WorkerLog(tmp_path / "logs" / "actor-0.log")
    write(log, "first life\n")
    write(log, "second life\nmore\n")
    assert log.tail(20) == "second life\nmore" and log.tail(1) == "more"
    assert log.path.read_text() == "first life\nsecond life\nmore\n"


def test_the_tail_does_not_steer_a_terminal(tmp_path):
    log = WorkerLog(tmp_path / "logs" / "actor-0.log")
    write(log, "\x1b]0;owned\x07\x1b[2Jfine\ttext\n\rover\x9b1m\n")
    assert log.tail(20) == "\\x1b]0;owned\\x07\\x1b[2Jfine\ttext\n\nover\\x9b1m"


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_what_is_missing(tmp_path):
    log = WorkerLog(tmp_path / "log")
    lines = "".join(f"line {i}\n" for i in range(2_200_000))
    assert len(lines) > LIMIT
    write(log, lines)
    log.shorten()
    text = log.path.read_text()
    head, _, rest = text.partition("\n[log shortened: ")
    missing, _, end = rest.partition(" bytes were removed here]\n")
    assert lines == head + lines[len(head) : len(head) + int(missing)] + end
    assert (len(head), len(end)) == (HEAD, END)
    assert log.tail(1) == "line 2199999"


def test_a_log_that_is_not_too_long_stays_as_it_is(tmp_path):
    log = WorkerLog(tmp_path / "log")
    write(log, "x" * LIMIT)
    log.shorten()
    assert log.path.stat().st_size == LIMIT


@pytest.mark.parametrize("before", [10, LIMIT - END, LIMIT + 100])
def test_the_tail_does_not_reach_into_an_earlier_life_after_a_cut(tmp_path, monkeypatch, before):
    monkeypatch.setattr(worker_log, "TAIL", 2 * END)  # as if it looked back further than what was kept
    log = WorkerLog(tmp_path / "log")
    write(log, "1" * before)
    write(log, "2" * (LIMIT - before + 10 if before < LIMIT else 1000))
    log.shorten()
    assert set(log.tail(10).replace("\n", "")) - set("[log shortened: 0123456789 bytes were removed here]") == set()
    if before > LIMIT - END:
        assert log.tail(10) == "2" * 1000


def test_it_stays_bounded_while_a_process_writes_without_a_pause(tmp_path):
    """The process goes on at the new end: no hole, no old bytes, and its last line is there."""
    log = WorkerLog(tmp_path / "log")
    fd = log.open()
    program = (
        "import os\n"
        "for i in range(12_000): print(f'{i:04000}', flush=True)\n"
        "os.close(2)\n"
        "input()\n"  # no cut while the last line is written: what is written in that instant may be missing
        "print('done')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=fd, stderr=pipe) as process:
        os.close(fd)
        while not select.select([process.stderr], [], [], 0)[0]:
            log.shorten()
        process.communicate(b"\n", timeout=60)
    log.shorten()
    data = log.path.read_bytes()
    assert len(data) <= LIMIT and b"\0" not in data and data.endswith(b"done\n")
    (missing,) = worker_log.NOTE.findall(data)  # the second cut takes the note of the first with it, and its number
    written = 4001 * 12_000 + len("done\n")
    removed = written - (len(data) - len(worker_log.NOTE.search(data)[0]))
    assert removed >= int(missing) > 0, "what was written in the instant of a cut may be missing, unsaid"


def test_a_link_or_a_special_file_is_not_written_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "log").symlink_to(victim)
    os.mkfifo(tmp_path / "fifo")
    assert WorkerLog(tmp_path / "log").open() is None
    assert WorkerLog(tmp_path / "fifo").open() is None
    assert victim.read_text() == "precious"
