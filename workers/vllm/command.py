"""The command line and environment of `vllm serve --grpc` for a worker behind the router."""

from __future__ import annotations

import json
from collections.abc import Mapping

from workers.vllm.options import MmProcessor, WorkerOptions


def command(options: WorkerOptions) -> list[str]:
    """The worker's argv. A flag that `extra` gives too is left to `extra`."""
    ours: dict[str, list[str]] = {
        "--host": [options.host or "0.0.0.0"],
        "--port": [str(options.port)],
        "--served-model-name": [options.name],
        # A flag of the servicer's, which it adds to vLLM's parser.
        "--mm-processor": [options.mm_processor.value],
    }
    if options.mm_processor is MmProcessor.REDIS and options.redis_url:
        ours["--mm-redis-url"] = [options.redis_url]
    if options.allowed_media_domains:
        ours["--allowed-media-domains"] = list(options.allowed_media_domains)
    if options.media_local_root is not None:
        ours["--allowed-local-media-path"] = [str(options.media_local_root)]
    if options.kv_events:
        ours["--kv-events-config"] = [_kv_events(options.kv_events)]
    given = {argument.partition("=")[0].replace("_", "-") for argument in options.extra}
    argv = [str(options.python), "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)]
    argv.append("--grpc")
    for flag, values in ours.items():
        if flag not in given:
            argv += [flag, *values]
    return [*argv, *options.extra]


def environment(options: WorkerOptions, base: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: `base`, less what would contradict the flags."""
    # The servicer reads it too, and warns of it beside the flag.
    env = {name: value for name, value in base.items() if name != "SMG_VLLM_MM_PROCESSOR"}
    if options.pairing_protocol:
        env["SMG_PAIRING_PROTOCOL"] = options.pairing_protocol
    return env


def _kv_events(endpoint: str) -> str:
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint})
