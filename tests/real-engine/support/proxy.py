"""A proxy in front of one engine: passes everything on, remembers hand-offs, breaks on demand.

A fault belongs to one prompt, so polls and other requests go through untouched,
and several faults can be under way at once.
"""

import contextlib
import dataclasses
import http.client
import http.server
import json
import select
import socket
import struct
import sys
import threading

# For the one who waits at either end; long after every time-out of a test's router.
SOCKET_TIMEOUT_S = 60

# What can go wrong, by phase. Connections are refused by the whole proxy: `Proxy.refusing`.
RESET_BEFORE = "reset before it is passed on"
HANG_UP = "closed before it is passed on"
RESET_AFTER = "reset after the engine has answered"
STATUS_500, STATUS_503 = "500 instead", "503 instead"
CUT = "reply reset half-way"
END = "reply ended half-way"
STALL = "no reply"
# Passed on once the test lets it go, unless the router has hung up by then.
HOLD = "held before it is passed on"
FREEZE = "reply frozen half-way"
BREAKS = (RESET_BEFORE, HANG_UP, RESET_AFTER, STATUS_500, STATUS_503, CUT, END)
SILENCES = (STALL, FREEZE)


@dataclasses.dataclass
class Fault:
    """Happens to requests with this prompt, up to `times` of them."""

    kind: str
    prompt: list
    times: int
    fired: int = 0
    # Held requests that the router has given up.
    given_up: int = 0
    # Ends a hold.
    go: threading.Event = dataclasses.field(default_factory=threading.Event)


def identity(params):
    """What makes a hand-off this very one, by the connector's own names."""
    keys = ("remote_engine_id", "remote_request_id", "remote_block_ids", "transfer_id")
    return json.dumps([params.get(key) for key in keys])


class Book:
    """What passed the proxies that share it, and what is to go wrong there.

    With a `mark`, it also notes the paths of requests in whose bodies the mark is. `takers` are the
    roles of workers that take hand-offs.
    """

    def __init__(self, mark=None, takers=("decode",)):
        self._mark, self._takers = mark and mark.encode(), takers
        self.passed, self.marked = 0, []
        self._lock = threading.Lock()
        self._faults = {}
        # Identities as they arrived at decode, swallowed ones too, and as prefill
        # replies gave them to the router whole.
        self.received, self.given = [], []
        # Failures of the proxies themselves.
        self.mishaps = []

    @contextlib.contextmanager
    def fault(self, role, kind, prompt, times):
        fault = Fault(kind, prompt, times)
        with self._lock:
            self._faults[role, tuple(prompt)] = fault
        try:
            yield fault
        finally:
            with self._lock:
                del self._faults[role, tuple(prompt)]

    def arrived(self, role, body):
        """Notes a request; returns the fault that is to happen to it, if any."""
        params = body.get("kv_transfer_params") or {}
        prompt = body.get("prompt")
        key = role, tuple(prompt) if isinstance(prompt, list) else prompt
        with self._lock:
            if params.get("do_remote_prefill"):
                # A hand-off at another worker would be a mistake of its own.
                assert role in self._takers, params
                self.received.append(identity(params))
            fault = self._faults.get(key)
            if fault is None or fault.fired == fault.times:
                return None
            fault.fired += 1
            return fault

    def look_at(self, path, body):
        with self._lock:
            self.passed += 1
            if self._mark and self._mark in body:
                self.marked.append(path)

    def replied(self, reply):
        params = json.loads(reply).get("kv_transfer_params")
        if params:
            with self._lock:
                self.given.append(identity(params))

    def failed(self, mishap):
        # Connections end in all manner of ways here; that is the point.
        if not isinstance(mishap, OSError):
            self.mishaps.append(repr(mishap))

    def sent_twice(self):
        with self._lock:
            return sorted({it for it in self.received if self.received.count(it) > 1})

    def made_up(self):
        """Hand-offs at decode that no prefill reply gave whole."""
        with self._lock:
            return sorted(set(self.received) - set(self.given))


class Proxy:
    """Listens on a free port of the loopback. KV events go past it."""

    def __init__(self, engine, role, book):
        self.engine, self.role, self.book = engine, role, book
        self.kv_events, self.kv_replay = engine.kv_events, engine.kv_replay
        self._open_connections = set()
        self._server = None
        self._listen(0)
        self._port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def _listen(self, port):
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._server.handle_error = lambda *_: self.book.failed(sys.exc_info()[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        """Stops listening and hangs up on everybody: further connections are refused."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self._open_connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def refusing(self):
        self.close()
        try:
            yield
        finally:
            self._listen(self._port)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.proxy._open_connections.add(self.connection)

    def finish(self):
        self.proxy._open_connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def do_GET(self):
        self._serve(b"", None)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.proxy.book.look_at(self.path, body)
        self._serve(body, self.proxy.book.arrived(self.proxy.role, json.loads(body)))

    def _serve(self, body, fault):
        kind = fault and fault.kind
        if kind == HOLD and not self._held(fault):
            return self._reset()
        if kind == RESET_BEFORE:
            return self._reset()
        if kind == HANG_UP:
            self.close_connection = True
            return None
        if kind == STALL:
            return self._wait_until_left()
        if kind in (STATUS_500, STATUS_503):
            return self._refuse_with(500 if kind == STATUS_500 else 503)
        engine = http.client.HTTPConnection(
            "127.0.0.1", self.proxy.engine.port, timeout=SOCKET_TIMEOUT_S
        )
        # What the engine does not answer, the router does not get either.
        with contextlib.closing(engine), contextlib.suppress(OSError, http.client.HTTPException):
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            engine.request(self.command, self.path, body, headers)
            reply = engine.getresponse()
            if kind == RESET_AFTER:
                reply.read()
                return self._reset()
            return self._relay(reply, kind)
        return self._reset()

    def _relay(self, reply, kind):
        length = reply.headers["content-length"]
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if length is None:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if length is None:
            return self._relay_stream(reply, kind)
        whole = reply.read()
        if kind in (CUT, END, FREEZE):
            self.wfile.write(whole[: len(whole) // 2])
            return self._break_off(kind)
        if self.command == "POST" and self.proxy.role == "prefill":
            # Before the router has it, so that it is known when it comes back.
            self.proxy.book.replied(whole)
        self.wfile.write(whole)

    def _relay_stream(self, reply, kind):
        while piece := reply.read1():
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if kind in (CUT, FREEZE):
                return self._break_off(kind)
            if kind == END:
                # The chunks end as they should, as if this had been all.
                break
        self.wfile.write(b"0\r\n\r\n")

    def _break_off(self, kind):
        if kind == CUT:
            return self._reset()
        if kind == FREEZE:
            return self._wait_until_left()
        self.close_connection = True

    def _refuse_with(self, status):
        body = json.dumps({"error": {"message": "out of order", "code": status}}).encode()
        self.send_response_only(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _held(self, fault):
        """Waits for the test; `False` if the router has hung up by then."""
        while not fault.go.wait(0.02):
            if select.select([self.connection], [], [], 0)[0]:
                fault.given_up += 1
                return False
        return not select.select([self.connection], [], [], 0)[0]

    def _wait_until_left(self):
        with contextlib.suppress(OSError):
            self.connection.recv(1, socket.MSG_PEEK)
        self.close_connection = True

    def _reset(self):
        self.close_connection = True
        # Lingering for no time makes the kernel send a reset; `close` alone waits for
        # the files made of the socket.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.proxy._open_connections.discard(self.connection)
        socket.close(self.connection.detach())
