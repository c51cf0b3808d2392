"""One router in this process, from its start until its end: what `serve` does, with or without
others beside it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.cli.leave import leave_soon
from router.cli.serve import STOPS
from router.config import Settings
from router.supervise.place import Place

if TYPE_CHECKING:
    from router.app import App


async def run_app(
    settings: Settings, place: Place | None = None, *, before: Callable[[App], None] | None = None
) -> int:
    """Serves until a signal, or until the app is told to stop. 0: stopped, 1: could not start.

    `before` is called with the app that is about to run.
    """
    from router.app import App
    from router.rooms import CannotStart

    code = 0
    try:
        app = App(settings, place)
        loop = asyncio.get_running_loop()
        for number in STOPS:
            loop.add_signal_handler(number, app.stop)
        if before is not None:
            before(app)
        await app.run()
    except CannotStart as error:
        sys.stderr.write(f"mmrouter serve: {error}\n")
        code = 1
    leave_soon(code)
    return code
