"""One torch thread for the tests: the arrays are small, and threads that wait for each other are slow on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
