"""`python -m router` is the `mmrouter` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs one subcommand; returns the process's exit code."""
    from router.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
