"""The wire: code generated from `proto/` at build time, re-exported under short names."""

from router.wire import common_pb2 as common
from router.wire import router_pb2 as admin
from router.wire import router_pb2_grpc, vllm_engine_pb2_grpc
from router.wire import vllm_engine_pb2 as engine

ENGINE_SERVICE = engine.DESCRIPTOR.services_by_name["VllmEngine"].full_name
ADMIN_SERVICE = admin.DESCRIPTOR.services_by_name["RouterAdmin"].full_name

__all__ = [
    "ADMIN_SERVICE",
    "ENGINE_SERVICE",
    "admin",
    "common",
    "engine",
    "router_pb2_grpc",
    "vllm_engine_pb2_grpc",
]
