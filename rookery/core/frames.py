"""Where in the user's code an error was raised: the last frames that are neither Rookery's nor a library's."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

OURS = str(Path(__file__).resolve().parents[1])
LIBRARIES = tuple(
    str(Path(path).resolve())
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
MOST = 3  # frames shown


def user_frames(error: BaseException | None) -> str:
    """The last frames of the user's code, each with file, line and source; "" if there are none.

    If none are the user's, but an installed package's other than Rookery, the last frames of that package.
    """
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    others = [each for each in frames if not _within(each.filename, OURS) and not each.filename.startswith("<frozen")]
    own = [each for each in others if not any(_within(each.filename, library) for library in LIBRARIES)]
    return "".join(traceback.format_list((own or others)[-MOST:])).rstrip()


def with_frames(message: str, error: BaseException | None) -> str:
    """The message, and below it where the user's code raised the error."""
    frames = user_frames(error)
    return f"{message}\n{frames}" if frames else message


def is_users(error: BaseException) -> bool:
    """Whether code of the user, or of a package it uses, raised the error, and Rookery only passed it on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((each for each in reversed(frames) if not _in_library(each.filename)), None)
    return first is not None and not _within(first.filename, OURS)


def _in_library(filename: str) -> bool:
    return not _within(filename, OURS) and any(_within(filename, library) for library in LIBRARIES)


def _within(filename: str, folder: str) -> bool:
    return Path(filename).resolve().is_relative_to(folder)
