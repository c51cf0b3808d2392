"""Ending a process whose work is done, whatever its threads wait for."""

from __future__ import annotations

import os
import threading
import time

from router.observe.logging import drain, get_logger

_log = get_logger("app")

# Seconds that threads get to come back.
_PATIENCE = 2.0


def leave_soon(code: int, patience: float = _PATIENCE) -> None:
    """Ends the process with `code` after `patience` seconds, unless it has ended by itself.

    Python waits at its end for every thread of its pools, and some of what they
    do cannot be stopped: a name server or a network drive that does not answer
    would keep a router that has nothing left to do for half a minute or for ever.
    """

    def leave() -> None:
        time.sleep(patience)
        names = {t.name for t in threading.enumerate() if not t.daemon} - {"MainThread"}
        if names:  # else Python itself takes its time
            _log.warning("exit_held_up", threads=sorted(names))
        drain()
        os._exit(code)

    threading.Thread(target=leave, name="leave", daemon=True).start()
