"""A gRPC client of the router, which reads the service's description by reflection."""

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

SERVICE = "splitrail.v1.FrontDoorService"

# The needed fields of `grpc.reflection.v1`. Its FileDescriptorResponse is a list of encoded
# FileDescriptorProto, and so is FileDescriptorSet.
REFLECTION = """
name: "reflection.proto" package: "reflection" syntax: "proto3"
dependency: "google/protobuf/descriptor.proto"
message_type { name: "Request"
  field { name: "file_containing_symbol" number: 4 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "Response"
  field { name: "files" number: 4 type: TYPE_MESSAGE label: LABEL_OPTIONAL
          type_name: ".google.protobuf.FileDescriptorSet" } }
"""


def _messages(files):
    """The message class of a full name, given the files that define it."""
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _files_of_service(channel, metadata):
    file = text_format.Parse(REFLECTION, descriptor_pb2.FileDescriptorProto())
    standard = descriptor_pb2.FileDescriptorProto()
    descriptor_pb2.DESCRIPTOR.CopyToProto(standard)
    message = _messages([standard, file])
    ask = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=message("reflection.Response").FromString,
    )
    request = message("reflection.Request")(file_containing_symbol=SERVICE)
    (response,) = ask(iter([request]), metadata=metadata, timeout=30)
    return response.files.file


class FrontDoor:
    """Asks as the holder of one key."""

    def __init__(self, address, key):
        self._channel = grpc.insecure_channel(address)
        self._metadata = [("authorization", f"Bearer {key}")]
        message = _messages(_files_of_service(self._channel, self._metadata))
        self._request = message("splitrail.v1.GenerateRequest")
        self._call = self._channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=self._request.SerializeToString,
            response_deserializer=message("splitrail.v1.GenerateResponse").FromString,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()

    def generate(self, **request):
        """The text and the usage of one call; `request` are the fields of GenerateRequest."""
        events = list(self._call(self._request(**request), metadata=self._metadata, timeout=120))
        assert events[-1].WhichOneof("event") == "usage"
        text = "".join(e.delta.text for e in events if e.WhichOneof("event") == "delta")
        return text, events[-1].usage
