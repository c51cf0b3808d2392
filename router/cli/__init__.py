"""The `mmrouter` command: one module a subcommand, and only the chosen one is imported.

A health probe runs every few seconds in a container with a small CPU limit, so
it must not pay for the libraries of its neighbours. Each command module has
`add_parser(subparsers)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

PROGRAM = "mmrouter"


@dataclass(frozen=True)
class Command:
    """Where a subcommand lives, its line in `--help`, and its exit code for bad arguments."""

    module: str
    summary: str
    usage_error: int = 2


COMMANDS = {
    "serve": Command("router.cli.serve", "run the router"),
    "sim": Command("router.cli.sim", "run a simulated worker"),
    "vllm": Command("router.cli.vllm", "run a real vLLM worker"),
    # 2 is taken: the usual probes mean "could not connect" by it.
    "health": Command("router.cli.health", "probe a server's gRPC health", usage_error=1),
    "generate": Command("router.cli.generate", "send a prompt with pictures, print the answer"),
    "explain": Command("router.cli.explain", "show what would happen to a prompt, send nothing"),
    "workers": Command("router.cli.workers", "list, add, drain or remove workers"),
    "log-level": Command("router.cli.log_level", "show or change what a router logs"),
}


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand that `argv` names; returns the process's exit code."""
    _open_standard_streams()
    if argv and argv[0] in COMMANDS:
        return _run_command(COMMANDS[argv[0]], argv)
    if argv and not argv[0].startswith("-"):
        near = _nearest(argv[0], COMMANDS)
        hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(COMMANDS)}"
        sys.stderr.write(f"{PROGRAM}: no command {argv[0]!r}; {hint}\n")
        return 2
    parser = _overview()
    try:
        parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    parser.print_help(sys.stderr)
    return 2


def _run_command(command: Command, argv: Sequence[str]) -> int:
    module = import_module(command.module)
    parser = argparse.ArgumentParser(prog=PROGRAM)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    module.add_parser(subparsers)
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:
        return command.usage_error if stop.code else 0
    if unknown:
        sys.stderr.write(_unknown(subparsers.choices[argv[0]], unknown))
        return command.usage_error
    try:
        return int(module.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, as `head` does; what is buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_standard_streams() -> None:
    """Opens those that were closed when we were started, on nothing.

    The first file or connection would take such a number, and get what is said to it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # It takes the lowest number that is free, and our own processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    near = _nearest(unknown[0].partition("=")[0], _flags(parser))
    hint = f"; did you mean {near}?" if near else ""
    return f"{parser.prog}: error: unrecognized arguments: {' '.join(unknown)}{hint}\n"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of the command, and of its subcommands if it has any."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _flags(subparser)


def _nearest(given: str, known: Iterable[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(given, list(known), n=1)), None)


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND …",
        description="A gRPC-native router for multimodal LLM serving.",
        epilog="\n".join(["commands:", *lines, "", f"{PROGRAM} COMMAND --help tells more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    return parser


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{PROGRAM} {version('mmrouter')}")
        parser.exit()
