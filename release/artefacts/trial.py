"""Starts programs, and sees whether they serve."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from .contents import Release

# For each step: the end of a wait that something has broken, not a measure of speed.
PATIENCE_S = 60

CHAT = {
    "model": "sim",
    "max_tokens": 8,
    "messages": [
        {"role": "system", "content": "You are a patient librarian who knows where everything is."},
        {"role": "user", "content": "Where are the maps of the northern coast?"},
    ],
}


def prove(release: Release, router: list, shim: list, how: str = "started") -> str:
    """Shows that both programs have the version, and that a quickstart serves, caches and drains."""
    for command, program in ((router, release.programs[0]), (shim, release.programs[1])):
        said = subprocess.run([*command, "--version"], check=True, text=True, stdout=subprocess.PIPE).stdout
        if said.split()[:2] != [program.name, release.version]:
            raise SystemExit(
                f"`{program.name} --version` prints {said!r}, not {program.name} {release.version}"
            )
    serves(router)
    served = "quickstart serves a chat, then from its caches, and drains"
    return f"{how}{release.arch.how()}; both programs print {release.version}; {served}"


def serves(router: list) -> None:
    """Runs `quickstart`, sends a chat until it is served from a cache, and stops it."""
    http, grpc, admin = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--admin-port={admin}"]
    process = subprocess.Popen(
        [*router, "quickstart", *ports], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        url = f"http://127.0.0.1:{http}"
        wait_for("readiness", process, lambda: get(f"{url}/ready") == 200)
        wait_for("a cache hit", process, lambda: cached_tokens(url) > 0)
        process.terminate()
        status = process.wait(timeout=PATIENCE_S)
        if status != 0:
            raise SystemExit(f"the quickstart ended with status {status} after SIGTERM: {tail(process)}")
    finally:
        process.kill()
        process.wait()


def wait_for(what: str, process: subprocess.Popen, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None:
            raise SystemExit(f"the quickstart ended before {what}: {tail(process)}")
        if time.monotonic() > deadline:
            raise SystemExit(f"the quickstart shows no {what} within {PATIENCE_S} s")
        time.sleep(0.05)


def tail(process: subprocess.Popen) -> str:
    return process.stderr.read()[-2000:]


def get(url: str) -> int | None:
    """The status of a page; nothing while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def cached_tokens(url: str) -> int:
    """Sends the chat; the prompt tokens that came from a cache."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)["usage"]["prompt_tokens_details"]["cached_tokens"]


def free_ports(number: int) -> list[int]:
    """Ports that nothing uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
