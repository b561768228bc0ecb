"""The `rookery` command: finds the verb, runs it, and turns errors into one line and an exit code.

Each verb is a function `(words) -> exit code` in a module that is imported only when the verb is asked for: help and
misspelt verbs answer at once, without loading torch. Those that train, `(words, signals)`, handle signals from the
first line on: a signal that arrives while libraries load is not lost. Their output is best effort and never decides the
exit code; the other verbs answer, and an answer that could not be written is an error (`metrics/output.py`).
"""

from __future__ import annotations

import importlib
import sys
import traceback

from rookery.core.errors import INTERRUPT, LearnerError, RookeryError, StorageError, UsageError
from rookery.core.frames import is_users, with_frames
from rookery.core.printable import printable
from rookery.core.wording import command_line
from rookery.metrics.output import standard_streams
from rookery.processes.signals import Signals, ended

VERBS = {
    "train": ("rookery.cli.train:train", "train a recipe on an environment"),
    "resume": ("rookery.cli.train:resume", "continue a run from its newest checkpoint"),
    "sweep": ("rookery.cli.sweep:sweep", "train many settings and seeds, and compare them"),
    "eval": ("rookery.cli.play:evaluate", "play whole episodes with what a run learnt, and report the return"),
    "record": ("rookery.cli.play:record", "record episodes of a run's policy, as mp4"),
    "export": ("rookery.cli.export:export", "write a run's policy as one file, ONNX or torch"),
    "plot": ("rookery.cli.plot:plot", "draw learning curves of one or more runs"),
    "compare": ("rookery.cli.compare:compare", "compare runs over their seeds, with confidence intervals"),
    "report": ("rookery.cli.report:report", "write one HTML page about one or more runs"),
    "recipes": ("rookery.cli.recipes:recipes", "list the recipes and their presets"),
    "check-env": ("rookery.cli.check_env:check_env", "try an environment in a process of its own, and report"),
    "doctor": ("rookery.cli.doctor:doctor", "what this machine offers, what is installed, and how fast it is"),
    "bench": ("rookery.cli.bench:bench", "measure how throughput grows with the number of actors"),
}

EXAMPLES = (
    "rookery train ppo --env CartPole-v1 --target-return 475",
    "rookery train ppo --env CartPole-v1 --actors 2 --core lstm",
    "rookery eval runs/ppo-CartPole-v1-1-… --episodes 100",
)


TRAINS = ("train", "resume", "sweep")


def main(argv: list[str] | None = None) -> int:
    with command_line():
        return _main(list(sys.argv[1:] if argv is None else argv), argv is None)


def _main(words: list[str], alone: bool) -> int:
    """`alone`: this is the command, and not a program that calls it."""
    if words[:1] and words[0] in TRAINS and not {"-h", "--help"} & set(words):
        with Signals() as signals, standard_streams(run=True) as streams:
            code = _code(words, signals)
            streams.finish()
            if alone:
                ended(code)
        return code
    with standard_streams(run=False) as streams:
        code, error = _code(words, Signals()), streams.finish()
        if error is not None and not code:
            _say_error(f"standard output cannot be written: {error.strerror or error}")
            code = StorageError.exit_code
        streams.finish()
    return code


def _code(words: list[str], signals: Signals) -> int:
    try:
        return _run(words, signals)
    except SystemExit as end:  # help
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except RookeryError as error:
        if "--debug" in words:
            _say_traceback()
        _say_error("\n".join([str(error), *getattr(error, "__notes__", [])]))
        return error.exit_code
    except KeyboardInterrupt:
        _say_error("interrupted")
        return signals.requested or INTERRUPT
    except Exception as error:
        _say_traceback()
        if is_users(error):
            text = f"{type(error).__name__}: {error}\nraised by code that Rookery was given:"
            _say_error(with_frames(text, error))
            return LearnerError.exit_code
        _say_error("this is a bug in Rookery, or in code it was given; the traceback above says where")
        return LearnerError.exit_code


def _run(words: list[str], signals: Signals) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else UsageError.exit_code
    if words[0] == "--version":
        from rookery import __version__

        print(f"rookery {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        from rookery.core.hints import nearest

        what = "flag" if verb.startswith("-") else "verb"
        raise UsageError(f"there is no {what} {verb!r}; {nearest(verb, VERBS)}")
    if any(word.startswith("--trust") or ":" in word for word in rest):
        from rookery.cli.local import find_local_code

        find_local_code(verb, rest)
    module, _, function = VERBS[verb][0].partition(":")
    if verb in TRAINS:
        return getattr(importlib.import_module(module), function)(rest, signals)
    return getattr(importlib.import_module(module), function)(rest)


def _help() -> str:
    bold, dim, off = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    verbs = "\n".join(f"  {bold}{verb:<10}{off} {about}" for verb, (_, about) in VERBS.items())
    examples = "\n".join(f"  {dim}${off} {line}" for line in EXAMPLES)
    return (
        f"{bold}rookery{off} VERB ...   distributed deep reinforcement learning on PyTorch\n\n{verbs}\n\n"
        f"`rookery VERB --help` has the details; `rookery train ppo --help` every field of a run.\n\n{examples}\n\n"
        f"{dim}Exit codes: 0 done, 2 usage, 3 environment, 4 learner, 5 numeric, 6 checkpoint, 7 storage, "
        f"75 requeue, 130 interrupt.{off}"
    )


def _say_error(message: str) -> None:
    red, off = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stdout.flush()
    print(f"{red}error:{off} {printable(message)}", file=sys.stderr)


def _say_traceback() -> None:
    print(printable(traceback.format_exc()), file=sys.stderr, end="")


if __name__ == "__main__":
    sys.exit(main())
