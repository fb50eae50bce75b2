"""For all tests: what the process that started them must not decide."""

from __future__ import annotations

import signal

# A shell starts jobs in the background deaf to Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
