"""For all tests: what the process that started them must not decide."""

from __future__ import annotations

import os
import signal
import sys

pytest_plugins = ["tests.support.seeds", "tests.support.cpu_time"]

# A shell starts jobs in the background deaf to Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without byte code on disk every process that a test starts compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
