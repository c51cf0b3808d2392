"""Which backend the `--vision-backend` setting means on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from router.vision.backend.base import Backend
from router.vision.backend.cpu import CpuBackend


def choose_backend(
    wanted: Literal["auto", "cpu", "cuda"], on_failure: Callable[[], None] = lambda: None
) -> Backend:
    """The backend to use; `on_failure` is called for each draw a device failed at.

    `auto` is CUDA where a device is found. Raises ValueError for `cuda` where
    none is.
    """
    cpu = CpuBackend()
    if wanted == "cpu":
        return cpu
    # Looking for a device loads its driver, which a CPU-only router never needs.
    from router.vision.backend.cuda import CudaBackend, device_present

    if device_present():
        return CudaBackend(cpu, on_failure=on_failure)
    if wanted == "cuda":
        raise ValueError("the vision backend is set to cuda and no CUDA device was found")
    return cpu
