"""`python -m router` is the `mmrouter` command."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs one subcommand; returns the process's exit code."""
    # Else gRPC tells in words of its own of each server that goes, between the log's lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from router.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
