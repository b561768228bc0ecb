"""`rookery check-env`: play an environment at random in a separate process, and report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import tyro

from rookery.cli.configure import JSON
from rookery.cli.flags import parse
from rookery.cli.show import console, escape, facts
from rookery.core.errors import EnvError, UsageError
from rookery.crews.probe import ask, probe


@dataclass(frozen=True)
class CheckEnv:
    env: tyro.conf.Positional[str]  # Gymnasium id, ALE/... id, or "package.module:factory"
    env_kwargs: Annotated[dict[str, Any], JSON] = field(default_factory=dict)  # its keyword arguments
    steps: int = 1000  # environment steps to play at random
    deadline: float = 300.0  # seconds the whole check may take
    json: bool = False  # print the report as JSON, and nothing else
    debug: bool = False  # show tracebacks


def check_env(words: list[str]) -> int:
    args = parse(CheckEnv, words, "rookery check-env", "Try an environment in a process of its own, and report.")
    if args.steps < 1:
        raise UsageError("--steps must be at least 1")
    question = {"what": "check", "env": args.env, "env_kwargs": args.env_kwargs, "steps": args.steps}
    if args.json:
        answer = ask(question, args.deadline)
    else:
        with console().status(f"playing {escape(args.env)} …"):
            answer = ask(question, args.deadline)
    if answer["errors"] and answer["action"] is None:
        probe(args.env, args.env_kwargs, args.deadline)  # it could not even be made: this raises, and says why
    if args.json:
        print(json.dumps(answer | {"ok": not answer["errors"]}, indent=2))
    else:
        _show(answer)
    return EnvError.exit_code if answer["errors"] else 0


def _show(answer: dict[str, Any]) -> None:
    from rookery.envs.check import Report

    title, *lines = msgspec.convert(answer, Report).lines()
    rows: dict[str, str] = {}
    remarks = []
    for line in lines:
        name, _, value = line.strip().partition(": ")
        if name in ("warning", "error"):
            colour = "yellow" if name == "warning" else "bold red"
            remarks.append(f" [{colour}]{name}[/]  {escape(value)}")
        else:
            rows[escape(name)] = escape(value)
    out = console()
    out.print(f" [bold {'red' if answer['errors'] else 'green'}]{escape(title)}[/]")
    out.print(facts(rows))
    for remark in remarks:
        out.print(remark, soft_wrap=True)  # paths stay whole
