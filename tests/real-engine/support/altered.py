"""An engine that tells other things of itself than it does: its replies pass through here."""

import contextlib
import http.client
import http.server
import threading

from .proxy import SOCKET_TIMEOUT_S

# What belongs to a connection, or changes with the body.
OWN = ("connection", "transfer-encoding", "content-length")


class Altered:
    """Listens on a free port of the loopback. `headers` replace those of each reply, and `body` makes the
    body from the path and what the engine has said. KV events go past it.
    """

    def __init__(self, engine, headers=None, body=lambda path, said: said):
        self.engine, self.headers, self.body = engine, headers or {}, body
        handler = type("Handler", (_Handler,), {"altered": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._serve(None)

    def do_POST(self):
        self._serve(self.rfile.read(int(self.headers["content-length"])))

    def _serve(self, body):
        altered = self.altered
        engine = http.client.HTTPConnection(
            "127.0.0.1", altered.engine.port, timeout=SOCKET_TIMEOUT_S
        )
        with contextlib.closing(engine):
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            engine.request(self.command, self.path, body, headers)
            reply = engine.getresponse()
            said = altered.body(self.path, reply.read())
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in OWN:
                self.send_header(name, altered.headers.get(name.lower(), value))
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
