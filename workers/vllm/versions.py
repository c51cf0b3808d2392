"""Which releases of vLLM and its gRPC servicer an environment has, and whether they will do."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

# Run by the other Python, which need not have mmrouter; so it imports nothing else.
_PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_PROBE_TIMEOUT = 60.0


@dataclass(frozen=True)
class Range:
    """Releases of one distribution: `oldest` can do what is asked, `newest` has been tried."""

    oldest: Version
    newest: Version
    why: str
    install: str


SUPPORTED: Mapping[str, Range] = {
    "vllm": Range(
        (0, 28), (0, 32), "older ones have another gRPC launcher", "pip install 'vllm>=0.28,<0.33'"
    ),
    "smg-grpc-servicer": Range(
        (0, 14),
        (0, 14),
        "older ones lack --mm-processor or name no item limits",
        "pip install 'smg-grpc-servicer[vllm]==0.14.*'",
    ),
    "smg-grpc-proto": Range(
        (0, 4, 27), (0, 4), "the servicer needs it", "pip install 'smg-grpc-proto>=0.4.27,<0.5'"
    ),
}


class EnvironmentUnfit(RuntimeError):
    """The other environment cannot run a worker; the message is one sentence."""


@dataclass(frozen=True)
class Verdict:
    """`problems` prevent a start; `doubts` are only worth a line. Each is a sentence."""

    problems: tuple[str, ...]
    doubts: tuple[str, ...]


def installed(python: Path) -> dict[str, str]:
    """The versions of the distributions in SUPPORTED that `python` has.

    Raises EnvironmentUnfit when it is not a Python that runs.
    """
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE, *SUPPORTED],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
            check=True,
        )
        found: dict[str, str] = json.loads(probe.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        raise EnvironmentUnfit(f"{python} is not a Python interpreter that runs") from error
    return found


def judge(found: Mapping[str, str], python: Path) -> Verdict:
    """What is missing, too old, or newer than anything tried."""
    problems: list[str] = []
    doubts: list[str] = []
    for name, supported in SUPPORTED.items():
        if name not in found:
            problems.append(f"{python} has no {name}; install it there: {supported.install}")
            continue
        version = parse(found[name])
        if version < supported.oldest:
            oldest = ".".join(map(str, supported.oldest))
            problems.append(
                f"{python} has {name} {found[name]}, but {oldest} is needed "
                f"({supported.why}); {supported.install}"
            )
        elif version[: len(supported.newest)] > supported.newest:
            newest = ".".join(map(str, supported.newest))
            doubts.append(f"{name} {found[name]} is newer than {newest}, the newest one tried")
    return Verdict(tuple(problems), tuple(doubts))


def parse(version: str) -> Version:
    """The release's numbers: 0.32.0 of `0.32.0+cpu`, 0.33 of `0.33rc1`; () when there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    return tuple(map(int, match[1].split("."))) if match else ()
