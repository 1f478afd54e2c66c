"""A process that has imported vLLM, and engines that are forks of it.

A server is three processes, each of which imports thousands of modules: that is nearly all of its start.
Here they are imported once. An engine's processes stay what they are otherwise: the server leads a
process group of its own, and what vLLM would spawn gets its arguments and environment as if it were
spawned.

    preloaded.py serve SOCKET               imports vLLM and serves requests until SOCKET is removed
    preloaded.py start SOCKET LOG [ARG...]  starts `vllm ARG...` with this environment; prints its pid
"""

import importlib
import json
import os
import selectors
import socket
import sys

# What a server of the kinds in `engines.sh` imports, and when it would be imported only later.
MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
)
# vLLM sets these before a worker imports PyTorch's compiler, which reads them when it is imported: it is
# not to start processes of its own.
COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
# How often the server looks whether its socket is still there.
LOOK_S = 1
REQUEST_BYTES_MAX = 1 << 20


# ---------------------------------------------------------------- what is spawned


def spawn_by_forking():
    """From now on, what this process and its children spawn is forked from a helper.

    The helper is this process as it is now, with its modules and without threads. It ends with the
    last process that could ask it.
    """
    from multiprocessing import connection, context, forkserver, resource_tracker, spawn

    prepare, preparation_data = spawn.prepare, spawn.get_preparation_data

    def with_environment(name):
        return {**preparation_data(name), "environment": dict(os.environ)}

    def prepare_with_environment(data):
        os.environ.clear()
        os.environ.update(data["environment"])
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = with_environment, prepare_with_environment
    context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]
    # Both otherwise begin with the first process that is spawned.
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_r, alive_w = os.pipe()
    helper = forkserver._forkserver
    helper.ensure_running = lambda: None
    if os.fork() == 0:
        os.close(alive_w)
        try:
            forkserver.main(listener.detach(), alive_r, preload=[])
        finally:
            os._exit(0)
    os.close(alive_r)
    listener.close()
    helper._forkserver_address, helper._forkserver_alive_fd = address, alive_w


def become_engine(arguments, environment, folder, log):
    """Runs `vllm` in this process, which leads a process group of its own."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    spawn_by_forking()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    sys.exit(main())


# ---------------------------------------------------------------- the server


def serve(path):
    """Starts engines until the socket is removed. Returns in each process that is to be an engine."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    # Whoever asks early waits until the modules are there.
    listener.listen()
    os.environ.update(COMPILER)
    for module in MODULES:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads cannot be forked"
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while os.path.exists(path):
            if selector.select(LOOK_S):
                with listener.accept()[0] as client:
                    if engine := answer(client):
                        return engine


def answer(client):
    """Forks an engine for a client, which is told its pid. Returns what it is to be, in it alone."""
    data, (log,), _, _ = socket.recv_fds(client, REQUEST_BYTES_MAX, 1)
    while not data.endswith(b"\n"):
        data += client.recv(REQUEST_BYTES_MAX)
    # Twice, so that the engine is not left to this process when it ends.
    child = os.fork()
    if child:
        os.close(log)
        os.waitpid(child, 0)
        return None
    if os.fork():
        os._exit(0)
    os.setsid()
    client.sendall(str(os.getpid()).encode())
    return {**json.loads(data), "log": log}


def start(path, log, arguments):
    """Has an engine started with the environment of this process, and prints its pid."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server, open(log, "wb") as log:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [log.fileno()])
        print(int(server.recv(64)))


if __name__ == "__main__":
    command, path, *more = sys.argv[1:]
    if command == "start":
        start(path, *more[:1], more[1:])
    elif engine := serve(path):
        become_engine(**engine)
