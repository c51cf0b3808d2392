"""Prints a protobuf module's file and its imports as JSON: `dump_descriptors.py MODULE`.

Two definitions of one package cannot be loaded into one process, so each side
of the comparison is dumped by a process of its own.
"""

import json
import sys
from importlib import import_module
from typing import Any

from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    FileDescriptor,
    ServiceDescriptor,
)


def files(root: FileDescriptor) -> dict[str, FileDescriptor]:
    found = {root.name: root}
    for dependency in root.dependencies:
        found |= files(dependency)
    return found


def messages(top: Descriptor) -> dict[str, Descriptor]:
    found = {top.full_name: top}
    for nested in top.nested_types:
        found |= messages(nested)
    return found


def describe_field(field: FieldDescriptor) -> dict[str, Any]:
    oneof = field.containing_oneof
    return {
        "number": field.number,
        "type": field.type,
        "repeated": field.is_repeated,
        "packed": field.is_packed,
        "presence": field.has_presence,
        "oneof": oneof.name if oneof is not None else None,
        "message": field.message_type.full_name if field.message_type else None,
        "enum": field.enum_type.full_name if field.enum_type else None,
    }


def describe_enum(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def describe_service(service: ServiceDescriptor) -> dict[str, Any]:
    return {
        method.name: {
            "takes": method.input_type.full_name,
            "gives": method.output_type.full_name,
            "client_streaming": method.client_streaming,
            "server_streaming": method.server_streaming,
        }
        for method in service.methods
    }


def dump(root: FileDescriptor) -> dict[str, Any]:
    every = [f for f in files(root).values() if not f.package.startswith("google.")]
    found = {
        name: message
        for file in every
        for top in file.message_types_by_name.values()
        for name, message in messages(top).items()
    }
    enums = [enum for file in every for enum in file.enum_types_by_name.values()]
    enums += [enum for message in found.values() for enum in message.enum_types]
    return {
        "messages": {
            name: {field.name: describe_field(field) for field in message.fields}
            for name, message in found.items()
        },
        "enums": {enum.full_name: describe_enum(enum) for enum in enums},
        "services": {
            service.full_name: describe_service(service)
            for file in every
            for service in file.services_by_name.values()
        },
    }


if __name__ == "__main__":
    json.dump(dump(import_module(sys.argv[1]).DESCRIPTOR), sys.stdout)
