"""Generates router/wire/*_pb2*.py from proto/*.proto.

Runs by itself (`python scripts/build_wire.py`) and as hatchling's build hook,
so that an install, editable or not, always holds code that fits its protos.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    BuildHookInterface = object

PROTOS = ("common.proto", "vllm_engine.proto", "router.proto")


def generate(root: Path) -> list[Path]:
    """Compiles the protos below `root` into `root/router/wire`; returns the files written."""
    from grpc_tools import protoc

    out = root / "router" / "wire"
    include = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{root / 'proto'}",
        f"-I{include}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *PROTOS,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    written = sorted(out.glob("*_pb2*.py*"))
    for path in written:
        # protoc writes `import common_pb2`, as if the code were not in a package.
        code = path.read_text()
        code = re.sub(r"^import (\w+_pb2) as", r"from router.wire import \1 as", code, flags=re.M)
        path.write_text(code)
    return written


class WireBuildHook(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    for file in generate(root):
        sys.stdout.write(f"{file.relative_to(root)}\n")
