"""Lets the tests import the scripts and each other's helpers, and keeps them off the network."""

import os
import pathlib
import signal
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy reads it at import
TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

# In a shell's background job Ctrl-C is ignored, and would be by the scripts that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Every call of a kernel is checked against the shapes in its signature.
install_import_hook(["common"], "beartype.beartype")

torch.set_num_threads(1)  # tiny matrices: more threads wait for each other longer than they work
