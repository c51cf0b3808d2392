"""A router in front of simulated prefill and decode workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tests.serving import Serving, eventually, serving
from workers.sim import SimOptions, SimWorker

Flow = Literal["NixlConnector", "MooncakeConnector"]
NIXL: Flow = "NixlConnector"
MOONCAKE: Flow = "MooncakeConnector"
FLOWS: tuple[Flow, ...] = (NIXL, MOONCAKE)


def prefilling(flow: Flow = NIXL, **options: Any) -> SimOptions:
    """A prefill worker, which hands over on a free port where the connector wants one."""
    bootstrap = "127.0.0.1:0" if flow == MOONCAKE else ""
    return SimOptions(
        **{"kv_connector": flow, "kv_engine_id": "p", "bootstrap": bootstrap, **options}
    )


def decoding(flow: Flow = NIXL, **options: Any) -> SimOptions:
    return SimOptions(**{"kv_connector": flow, "kv_engine_id": "d", **options})


class Paired:
    """`served` is the router and all workers; `prefill` and `decode` are the two sides."""

    def __init__(self, served: Serving, prefill: list[SimWorker], decode: list[SimWorker]) -> None:
        self.served = served
        self.prefill = prefill
        self.decode = decode

    def address(self, prefill: int = 0, decode: int = 0) -> str:
        """What the trailing metadata say of a pair."""
        return f"{self.prefill[prefill].address}+{self.decode[decode].address}"

    async def at_rest(self) -> None:
        """Waits until nothing is left of any request: no call, lease, permit or transfer."""
        await self.served.at_rest()
        await eventually(lambda: not self.served.app.dispatcher._aborts, "aborts told")
        assert not any(worker.breaker._probing for worker in self.served.app.registry)
        await eventually(
            lambda: not any(worker.bootstrap.held for worker in self.prefill),
            "transfers released",
        )


@asynccontextmanager
async def pairing(
    folder: Path,
    *,
    prefill: list[SimOptions],
    decode: list[SimOptions],
    others: list[SimOptions] | None = None,
    **settings: Any,
) -> AsyncIterator[Paired]:
    """A router that finds its workers, their roles and their bootstrap ports in a file.

    Ids of engines are made different, as those of real ones are. `others` do both legs.
    """
    async with AsyncExitStack() as stack:
        sides: dict[str, list[SimWorker]] = {"prefill": [], "decode": [], "both": []}
        entries = []
        for role, side in (("prefill", prefill), ("decode", decode), ("both", others or [])):
            for at, options in enumerate(side):
                named = options.kv_engine_id and f"{options.kv_engine_id}{at}"
                worker = SimWorker(replace(options, kv_engine_id=named))
                address = await worker.start("127.0.0.1:0")
                stack.push_async_callback(worker.stop, 0)
                sides[role].append(worker)
                port = worker.bootstrap_address.rpartition(":")[2]
                labels = {"mooncake_bootstrap_port": port} if port else {}
                entries.append({"address": address, "role": role, "labels": labels})
        file = folder / "workers.json"
        file.write_text(json.dumps({"workers": entries}))
        served = await stack.enter_async_context(
            serving(
                discovery="file",
                discovery_file=str(file),
                media_allow_private_hosts=True,
                ready=False,
                **settings,
            )
        )
        served.workers += [worker for side in sides.values() for worker in side]
        await eventually(lambda: len(served.app.registry) == len(entries), "discovered")
        await served.ready()
        yield Paired(served, sides["prefill"], sides["decode"])
