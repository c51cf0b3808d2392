"""A simulated vLLM worker that speaks the whole wire; see docs/simulator.md."""

from workers.sim.options import SimOptions
from workers.sim.worker import SimWorker

__all__ = ["SimOptions", "SimWorker"]
