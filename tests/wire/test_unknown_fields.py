"""A router in the middle must not lose what a newer client or worker says."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from router.wire import engine


def newer_generate_request() -> Any:
    """GenerateRequest as a later contract might have it: a further string field, number 90."""
    file = descriptor_pb2.FileDescriptorProto(name="newer.proto", package="newer", syntax="proto3")
    message = file.message_type.add(name="GenerateRequest")
    for name, number in (("request_id", 1), ("novelty", 90)):
        message.field.add(
            name=name,
            number=number,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("newer.GenerateRequest"))


def test_unknown_fields_survive_parsing_and_serialising() -> None:
    newer = newer_generate_request()
    sent = newer(request_id="r1", novelty="kept").SerializeToString()
    relayed = engine.GenerateRequest.FromString(sent)
    assert relayed.request_id == "r1"
    assert newer.FromString(relayed.SerializeToString()).novelty == "kept"


def test_unknown_fields_survive_clearing_our_extension() -> None:
    newer = newer_generate_request()
    request = engine.GenerateRequest.FromString(newer(novelty="kept").SerializeToString())
    request.router.model = "m"
    request.ClearField("router")
    assert request.SerializeToString() == newer(novelty="kept").SerializeToString()
