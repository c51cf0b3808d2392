"""One of several router processes; started by their supervisor and by nobody else."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from typing import TYPE_CHECKING

import uvloop

from router import heap
from router.cli.running import run_app
from router.config import Settings
from router.observe import logging
from router.supervise.place import Place, heard

if TYPE_CHECKING:
    from router.app import App


def main() -> int:
    """Serves until SIGTERM, or until the supervisor is gone. 0: stopped, 1: could not start."""
    # Media decoders that we start inherit standard input: the supervisor's pipe is ours alone.
    supervisor = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    line = supervisor.readline()
    if not line:
        return 0  # it died before it had told us anything
    place, settings = heard(line)
    heap.keep_freed_memory()
    logging.configure_server(settings.log_format, settings.log_level)
    logging.bind_process(place.number)
    return uvloop.run(_serve(settings, place, supervisor.fileno()))


async def _serve(settings: Settings, place: Place, supervisor: int) -> int:
    loop = asyncio.get_running_loop()

    def follow(app: App) -> None:
        def gone() -> None:
            # Nothing more is said on it, so this is its end; nobody else clears up then.
            loop.remove_reader(supervisor)
            shutil.rmtree(place.folder, ignore_errors=True)
            app.stop()

        loop.add_reader(supervisor, gone)

    return await run_app(settings, place, before=follow)


if __name__ == "__main__":
    sys.exit(main())
