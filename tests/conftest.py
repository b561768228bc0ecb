"""One torch thread for the tests: arrays are small here, and waiting threads are slow on a busy machine.

Signals are heard even where the tests run as a background job or under nohup: such jobs ignore some, and so does what
they start.
"""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
