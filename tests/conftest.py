"""One torch thread for the tests: arrays are small here, and waiting threads are slow on a busy machine.

Ctrl-C is heard even where the tests run as a background job: a shell has such jobs ignore it, and what they start too.
"""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
