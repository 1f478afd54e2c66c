"""Clients that send one request after the other for as long as a test takes."""

import contextlib
import threading

import httpx

from support.waiting import eventually

CLIENTS = 6


class Traffic:
    def __init__(self, router, model, max_tokens):
        self._url = f"{router.http}/v1/completions"
        self._model, self._max_tokens = model, max_tokens
        self._stop = threading.Event()
        self.replies, self.failures = 0, []
        self._lock = threading.Lock()

    def _run(self, client):
        # A client that keeps its connection, half of them with streams.
        with httpx.Client(timeout=120, verify=False) as connection:
            number = 0
            while not self._stop.is_set():
                number += 1
                body = {
                    "model": self._model,
                    "prompt": [client * 1000 + place + number for place in range(64)],
                    "max_tokens": self._max_tokens,
                    "stream": client % 2 == 0,
                }
                failure = self._failure(connection, body)
                with self._lock:
                    self.replies += 1
                    if failure:
                        self.failures.append(failure)

    def _failure(self, connection, body):
        """What is wrong with the reply."""
        try:
            reply = connection.post(self._url, json=body)
        except httpx.HTTPError as error:
            return repr(error)
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text}"
        if body["stream"] and not reply.text.rstrip().endswith("data: [DONE]"):
            return f"a stream ends with {reply.text[-300:]}"

    def goes_on(self):
        """Waits until requests that were sent after this call have been answered."""
        # Each client has at most one request under way.
        wanted = self.replies + 2 * CLIENTS
        eventually(lambda: self.replies, lambda now: now >= wanted, "requests are answered")
        assert self.failures == []


@contextlib.contextmanager
def running(router, model, max_tokens=8):
    """Yields traffic of which no request may fail."""
    traffic = Traffic(router, model, max_tokens)
    threads = [threading.Thread(target=traffic._run, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        traffic.goes_on()
        yield traffic
        traffic.goes_on()
    finally:
        traffic._stop.set()
        for thread in threads:
            thread.join()
    assert traffic.failures == []
