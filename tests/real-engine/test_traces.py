"""Client, router and both engines in one trace, whose spans add up to the time to first token."""

import json
import secrets

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from support import prompts
from support import router as routers
from support.waiting import eventually

CLIENT, ROUTER = "a-client", "a-router"


@pytest.fixture
def traced_router(start_router, prefill, decode, collector):
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]
    top = (
        "access_log: { enabled: true, path: access.jsonl }\n"
        f'tracing: {{ otlp: {{ endpoint: "{collector.endpoint}", service_name: {ROUTER} }} }}\n'
    )
    with start_router("traces", workers, top=top) as router:
        yield router


@pytest.fixture
def tracer(collector):
    provider = TracerProvider(resource=Resource.create({"service.name": CLIENT}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


def stream(router, tracer, collector):
    """Sends a streamed chat in a span of the client. Returns the ids of trace and request."""
    request_id = f"trace-{secrets.token_hex(8)}"
    with tracer.start_as_current_span("client") as span:
        trace_id = f"{span.get_span_context().trace_id:032x}"
        collector.keep(trace_id)
        headers = {"x-request-id": request_id}
        inject(headers)
        body = {
            "model": "tiny", "messages": prompts.chat(), "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }
        url = f"{router.http}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as reply:
            assert reply.status_code == 200, reply.read()
            assert "data: [DONE]" in list(reply.iter_lines())
    return trace_id, request_id


def access_log_line(folder, request_id):
    def read():
        lines = (folder / "access.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in lines if line["request_id"] == request_id]

    (line,) = eventually(read, bool, "the line of the access log")
    return line


def is_complete(spans):
    services = [span.service for span in spans]
    return services.count(CLIENT) == 1 and ROUTER in services and len(set(services)) == 4


def test_a_request_is_one_trace_from_its_client_to_both_engines(
    traced_router, tracer, collector, prefill, decode, logs
):
    trace_id, request_id = stream(traced_router, tracer, collector)
    spans = collector.spans(trace_id, is_complete, "spans of the client, the router and both engines")
    engines = {f"vllm-{prefill.port}", f"vllm-{decode.port}"}
    assert {span.service for span in spans} == {CLIENT, ROUTER, *engines}, spans

    def only(service, name):
        (found,) = [span for span in spans if (span.service, span.name) == (service, name)]
        return found

    # Each is the child of the one that called it.
    client, request = only(CLIENT, "client"), only(ROUTER, "request")
    assert (client.parent, request.parent) == ("", client.id), spans
    for engine, leg, worker in ((prefill, "prefill leg", "p0"), (decode, "decode leg", "d0")):
        leg, span = only(ROUTER, leg), only(f"vllm-{engine.port}", "llm_request")
        assert (leg.parent, span.parent) == (request.id, leg.id), spans
        assert leg.attributes["splitrail.worker"] == worker
        assert leg.begin_ns <= span.begin_ns, "one clock: the engine gets the leg after it is sent"
    assert only(ROUTER, "hand-off").begin_ns == only(ROUTER, "prefill leg").end_ns

    # The spans from the arrival to the first token follow each other without a gap, and add up to
    # the time that the access log and the histogram have.
    parts = [span for span in spans if span.attributes.get("splitrail.ttft.part")]
    at_ns = request.begin_ns
    for part in sorted(parts, key=lambda span: span.begin_ns):
        assert part.begin_ns == at_ns, parts
        at_ns = part.end_ns
    ttft_s = (at_ns - request.begin_ns) / 1e9
    line = access_log_line(logs / "traces", request_id)
    assert line["trace_id"] == trace_id
    assert line["ttft_ms"] / 1e3 == pytest.approx(ttft_s, rel=0.01)
    metrics = traced_router.metrics()
    assert metrics.sum("splitrail_ttft_seconds_count", model="tiny") == 1
    assert metrics.sum("splitrail_ttft_seconds_sum", model="tiny") == pytest.approx(ttft_s, rel=0.01)
