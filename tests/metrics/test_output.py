"""Output never raises and, for a run, never blocks; an answer waits for its reader and remembers what went wrong."""

import errno
import io
import os
import subprocess
import sys
import threading

import pytest

from rookery.metrics import output
from rookery.metrics.output import Answer, BestEffort, best_effort, standard_streams, text


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def fill(write: int) -> int:
    """Until nothing goes in any more; how much went in."""
    os.set_blocking(write, False)
    size = 0
    try:
        while True:
            size += os.write(write, b"x" * 1024)
    except BlockingIOError:
        os.set_blocking(write, True)
    return size


def read_all(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(fd, size - len(data))
    return data


def test_best_effort_writes_everything_in_order(pipe):
    writer = BestEffort(pipe[1])
    stream = text(writer, sys.__stdout__)
    for number in range(2000):
        print(number, file=stream)
    wanted = "".join(f"{number}\n" for number in range(2000)).encode()
    assert read_all(pipe[0], len(wanted)) == wanted
    assert writer.drain(60) and writer.waiting == 0


def test_best_effort_never_waits_for_a_reader_and_keeps_a_bounded_amount(pipe):
    filled = fill(pipe[1])
    writer = BestEffort(pipe[1], limit=1000)
    for _ in range(100):
        writer.write(b"y" * 90)
    assert writer.waiting == 990 and not writer.drain(0.05)
    assert read_all(pipe[0], filled) == b"x" * filled
    assert writer.drain(60) and read_all(pipe[0], 990) == b"y" * 990


def test_best_effort_swallows_the_rest_after_an_error():
    with open("/dev/full", "w") as full:
        writer = BestEffort(full.fileno())
        for _ in range(10):
            assert writer.write(b"abc") == 3
            assert writer.drain(60)
    assert writer.error.errno == errno.ENOSPC and writer.waiting == 0


def test_what_was_given_up_is_not_written_to_whoever_gets_the_descriptor_next(pipe):
    filled = fill(pipe[1])
    writer = BestEffort(pipe[1])
    writer.write(b"in hand")
    while writer._chunks:  # until the thread has taken it
        os.sched_yield()
    writer.write(b"never")
    writer.give_up()
    writer.write(b"never")
    assert writer.waiting == 0 and writer.drain(0)
    read_all(pipe[0], filled)
    writer._thread.join(60)
    assert read_all(pipe[0], 7) == b"in hand"
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 100)


@pytest.mark.parametrize("kind", [BestEffort, Answer])
def test_a_descriptor_that_others_have_made_non_blocking_loses_nothing(pipe, kind):
    os.set_blocking(pipe[1], False)
    writer, data = kind(pipe[1]), os.urandom(300_000)
    thread = threading.Thread(target=writer.write, args=(data,))
    thread.start()
    assert read_all(pipe[0], len(data)) == data
    thread.join(60)
    assert writer.error is None


def test_a_forked_process_writes_by_itself(pipe):
    writer = BestEffort(pipe[1])
    writer.write(b"parent ")
    assert writer.drain(60)
    if (child := os.fork()) == 0:
        writer.write(b"child")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(pipe[0], 100) == b"parent child"


def test_only_ordinary_streams_are_taken_for_descriptors(tmp_path):
    with open(tmp_path / "out", "w") as file:
        assert best_effort(file).fileno() == file.fileno()
        wrapped = text(BestEffort(file.fileno()), file)
        assert best_effort(wrapped) is wrapped.buffer
        assert (wrapped.fileno(), wrapped.isatty(), wrapped.encoding) == (file.fileno(), False, file.encoding)
    assert best_effort(file) is None  # closed
    assert best_effort(io.StringIO()) is None and best_effort(None) is None

    class Notebook(io.TextIOWrapper):
        """Has a descriptor, and it is not where the text goes."""

    with open(tmp_path / "out", "wb") as file:
        assert best_effort(Notebook(file)) is None


def test_streams_that_are_not_ordinary_stay_and_all_come_back(monkeypatch):
    mine, before = io.StringIO(), sys.stderr
    monkeypatch.setattr(sys, "stdout", mine)
    for run in (True, False):
        with standard_streams(run) as streams:
            print("seen")
            assert sys.stdout is mine
            assert streams.finish() is None
        assert sys.stdout is mine and sys.stderr is before
    assert mine.getvalue() == "seen\nseen\n"


# Real processes, for real descriptors

SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from rookery.metrics.output import standard_streams
with standard_streams(run={run}) as streams:
    {body}
    error = streams.finish()
sys.exit(10 + error.errno if error else 0)
"""


def script(run: bool, body: str) -> list[str]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(output.__file__)))
    return [sys.executable, "-c", SCRIPT.format(run=run, body=body, root=root)]


@pytest.mark.parametrize("run, code", [(True, 0), (False, 10 + errno.ENOSPC)])
def test_a_full_device_is_an_error_for_an_answer_only(run, code):
    with open("/dev/full", "w") as full:
        done = subprocess.run(script(run, "print('x' * 100_000)"), stdout=full, stderr=full, timeout=60)
    assert done.returncode == code, "and not 120, for a flush that fails at the end of the interpreter"


@pytest.mark.parametrize("run", [True, False])
def test_a_reader_that_has_seen_enough_is_no_error(run):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(script(run, "print('x' * 100_000)"), stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("run", [True, False])
def test_closed_descriptors_are_not_given_to_the_next_file(run, tmp_path):
    """A shell's `>&-`: the next file that is opened would have the number 1, and every print would go into it."""
    body = f"fd = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY); print('text'); os.write(1, b'text')"
    body += "; print('text', file=sys.stderr); assert fd > 2, fd"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *script(run, body)]
    assert subprocess.run(command, timeout=60).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_an_answer_waits_for_a_slow_reader_and_loses_nothing():
    body = "print('y' * 500_000)"
    with subprocess.Popen(script(False, body), stdout=subprocess.PIPE) as process:
        assert len(process.stdout.read(10)) == 10
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        assert len(process.stdout.read()) == 500_001 - 10
        assert process.wait(60) == 0


def test_standard_output_and_error_of_one_file_keep_their_order():
    body = "[print(n, file=(sys.stdout, sys.stderr)[n % 2]) for n in range(500)]"
    done = subprocess.run(script(True, body), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert [int(line) for line in done.stdout.split()] == list(range(500))


def test_letters_that_the_encoding_does_not_have_are_replaced_in_a_run():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(script(True, "print('a → b')"), env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"a ? b\n")
