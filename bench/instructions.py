#!/usr/bin/env python3
"""Counts the instructions that the router executes for a request, by callgrind.

Unlike times, the counts hardly depend on what else a machine does. See README.md.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
MODEL = "bench"
CLIENTS = 16
START_TIMEOUT_S = 120
END_TIMEOUT_S = 60
# Number of requests before those that are counted. They open connections and create metrics.
WARM_UP = 400

AGGREGATED = ("flow: aggregated", [("w", "both", 4)])
SPLIT = ("flow: prefill_first\n    connector: nixl", [("p", "prefill", 2), ("d", "decode", 2)])
UNLOGGED = "access_log: {{ enabled: false }}\n"
TRACED = 'tracing: {{ otlp: {{ endpoint: "http://127.0.0.1:{collector}", protocol: http }} }}\n'
# Each workload: the flow with its workers, and further members of the configuration.
WORKLOADS = {
    "off": (AGGREGATED, UNLOGGED),
    "access_log": (AGGREGATED, ""),
    "traces": (AGGREGATED, TRACED),
    "pd": (SPLIT, UNLOGGED),
    "pd_traces": (SPLIT, TRACED),
}


def reply(body, kind="application/json"):
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(content, params=None):
    message = {"role": "assistant", "content": content}
    body = {
        "id": "chatcmpl-7d4f0d2c9a1b4e5f8a6b",
        "object": "chat.completion",
        "created": 1785000000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 250, "total_tokens": 266, "completion_tokens": 16},
        "kv_transfer_params": params,
    }
    return reply(json.dumps(body, separators=(",", ":")).encode())


HAND_OFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(7, 24))],
    "remote_engine_id": "4f2f5a7e-engine",
    "remote_request_id": "chatcmpl-p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
# The router reads the metrics once a second, however long the requests take. They are short, so that
# reading them adds few instructions.
METRICS = (
    f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000",engine="0"}} 1.0\n'
    f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0\n'
    f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0\n'
    f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.0\n'
)
STATUS_REPLIES = {
    "/metrics": reply(METRICS.encode(), "text/plain"),
    "/version": reply(b'{"version": "0.32.0"}'),
    "/v1/models": reply(json.dumps(MODELS).encode()),
}
WHOLE = completion("The router places the prompt where most of its blocks are.")
PREFILLED = completion("The", HAND_OFF)
COLLECTED = reply(b"", "application/x-protobuf")


async def read_message(reader):
    """Reads a message of HTTP/1.1. Returns its first line and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    body = await reader.readexactly(int(length[1])) if length else b""
    return head.split(b"\r\n", 1)[0].decode(), body


async def serve(reader, writer):
    """Serves a connection as an engine that replies at once, and as a collector that drops spans."""
    try:
        while True:
            line, body = await read_message(reader)
            path = line.split()[1]
            if path == "/v1/traces":
                writer.write(COLLECTED)
            elif body:
                writer.write(PREFILLED if b'"do_remote_decode":true' in body else WHOLE)
            else:
                writer.write(STATUS_REPLIES.get(path, reply(b"", "text/plain")))
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        writer.close()


def requests():
    """Different chats of 1 KB in eight groups; the chats of a group have three quarters in common."""
    draws = random.Random(1)
    words = [word for word in (FOLDER / "README.md").read_text().split() if word.isalpha()]

    def prose(size):
        text = ""
        while len(text) < size:
            text += draws.choice(words) + " "
        return text

    shared = [prose(768) for _ in range(8)]
    for number in range(256):
        parts = [("system", shared[number % 8]), ("user", prose(256))]
        messages = [{"role": role, "content": content} for role, content in parts]
        body = {"model": MODEL, "stream": False, "messages": messages, "max_tokens": 16}
        body = json.dumps(body, separators=(",", ":")).encode()
        fields = f"host: router\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        yield f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


class Clients:
    """Closed-loop clients: each sends its next request when it has received the previous reply."""

    def __init__(self):
        self.requests = list(requests())
        self.connections = []

    async def connect(self, port):
        opening = (asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS))
        self.connections = await asyncio.gather(*opening)

    async def send(self, count):
        numbers = iter(range(count))
        await asyncio.gather(*(self.run_client(numbers, *streams) for streams in self.connections))

    async def run_client(self, numbers, reader, writer):
        for number in numbers:
            writer.write(self.requests[number % len(self.requests)])
            line, body = await read_message(reader)
            if " 200 " not in line:
                sys.exit(f"a request failed: {line} {body.decode()}")


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def configuration(flow, workers, further, ports, engines):
    lines = [
        f'{further}listen: {{ http: "127.0.0.1:{ports[0]}", admin: "127.0.0.1:{ports[1]}" }}',
        "models:",
        f"  - name: {MODEL}",
        "    block_size: 16",
        "    tokenizer: { kind: none }",
        f"    {flow}",
        "    policy: { kind: round_robin }",
        "    canary: { enabled: false }",
        "    workers:",
    ]
    ids = ((f"{short}{at}", role) for short, role, count in workers for at in range(count))
    for (id, role), port in zip(ids, engines):
        lines.append(f'      - {{ id: {id}, role: {role}, url: "http://127.0.0.1:{port}" }}')
    return "\n".join(lines) + "\n"


async def wait_until_ready(process, port, log):
    for _ in range(START_TIMEOUT_S * 10):
        if process.poll() is not None:
            sys.exit(log.read_text())
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /ready HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
            line, _ = await read_message(reader)
            writer.close()
            if " 200 " in line:
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(0.1)
    sys.exit("the router is not ready in time")


async def count(arguments, name, folder):
    """Runs a workload. Returns its number of instructions per request."""
    (flow, workers), further = WORKLOADS[name]
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(5)]
    *engines, collector = (server.sockets[0].getsockname()[1] for server in servers)
    ports = [free_port(), free_port()]
    config, log, out = (folder / f"{name}.{end}" for end in ("yaml", "log", "out"))
    further = further.format(collector=collector)
    config.write_text(configuration(flow, workers, further, ports, engines))
    for old in folder.glob(f"{name}.out*"):
        old.unlink()
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    program = [arguments.splitrail, "serve", "--config", config]
    # One thread for requests, because several threads would wake each other more or less often in
    # each run.
    environment = {**os.environ, "TOKIO_WORKER_THREADS": "1", "RUST_LOG": "info"}
    lines = folder / f"{name}.lines"
    with log.open("w") as stderr, lines.open("w") as stdout:
        process = subprocess.Popen([*tool, *program], stdout=stdout, stderr=stderr, env=environment)

    async def control(option):
        command = ["callgrind_control", option, str(process.pid)]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)

    try:
        await wait_until_ready(process, ports[1], log)
        clients = Clients()
        await clients.connect(ports[0])
        await control("--instr=on")
        await clients.send(WARM_UP)
        await control("--zero")
        await clients.send(arguments.requests)
        await control("--dump=counted")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)
    for server in servers:
        server.close()
    # The first dump has the counted requests. Later ones have what the router executes when it ends.
    profile = folder / f"{name}.out.1"
    found = re.search(r"^(?:summary|totals): (\d+)", profile.read_text(), re.MULTILINE)
    return int(found[1]) / arguments.requests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    program = FOLDER.parent / "target/release/splitrail"
    parser.add_argument("--splitrail", default=program, help="the router's program")
    parser.add_argument("--requests", type=int, default=2000, help="number of counted requests")
    parser.add_argument("--only", action="append", choices=WORKLOADS)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="keep the profiles")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        first = None
        for name in arguments.only or WORKLOADS:
            per_request = asyncio.run(count(arguments, name, folder))
            first = first or per_request
            print(f"{name:12} {per_request:10,.0f} {per_request / first:6.3f}", flush=True)


if __name__ == "__main__":
    main()
