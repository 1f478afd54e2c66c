"""A collector of traces: takes spans over OTLP/gRPC and keeps those of the traces that it is told."""

import concurrent.futures
import threading

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from .waiting import eventually

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def attributes(of):
    """The attributes of a span or a resource, by name."""
    values = {}
    for attribute in of.attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key] = getattr(attribute.value, kind)
    return values


class Span:
    """A span, and the service that exported it."""

    def __init__(self, service, span):
        self.service, self.name = service, span.name
        self.id, self.parent = span.span_id.hex(), span.parent_span_id.hex()
        self.begin_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = attributes(span)

    def __repr__(self):
        return f"{self.service}: {self.name} ({self.id}, of {self.parent or 'nobody'})"


class Collector:
    """Forgets the spans of all other traces: a long run holds no more memory than a short one."""

    def __init__(self, port):
        self.endpoint = f"http://127.0.0.1:{port}"
        self._lock = threading.Lock()
        self._traces = {}
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=otlp.ExportTraceServiceRequest.FromString,
            response_serializer=otlp.ExportTraceServiceResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        assert self._server.add_insecure_port(f"127.0.0.1:{port}") == port, "the port is in use"

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *_):
        self._server.stop(grace=None).wait()

    def _export(self, request, _context):
        with self._lock:
            for resource in request.resource_spans:
                service = attributes(resource.resource).get("service.name", "")
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        if (kept := self._traces.get(span.trace_id.hex())) is not None:
                            kept.append(Span(service, span))
        return otlp.ExportTraceServiceResponse()

    def keep(self, trace_id):
        """Keeps the spans of a trace that begins after this."""
        with self._lock:
            self._traces[trace_id] = []

    def spans(self, trace_id, accept, what):
        """The spans of a trace, once `accept` likes them."""

        def read():
            with self._lock:
                return list(self._traces[trace_id])

        return eventually(read, accept, what)
