"""Pods, each with a simulated engine on a loopback address, as a scheduler and a kubelet would report them."""

import concurrent.futures
import contextlib

from support import process

from .control_plane import MERGE_PATCH, NAMESPACE

PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
ROLE_LABEL = "splitrail.io/role"
APP_LABEL = "app.kubernetes.io/name"
ENGINE_PORTS = ("http", "kv_events", "kv_replay")


class Engine:
    """A running `splitrail sim-engine`: its ports, by what they are for."""

    def __init__(self, ready):
        self.ports = {name: int(ready[name].rsplit(":", 1)[1]) for name in ENGINE_PORTS}

    @property
    def http(self):
        return self.ports["http"]


class Fleet:
    """The engines and the pods of a test."""

    def __init__(self, control_plane, binary, model, folder):
        self._control_plane, self._binary, self._model, self._folder = control_plane, binary, model, folder
        self._engines = contextlib.ExitStack()
        self._stops = {}

    def close(self):
        self._engines.close()
        self.remove_all()

    def engine(self, name, role, *options):
        """Starts an engine, which ends with the test or with `stop`."""
        command = [self._binary, "sim-engine", "--role", role, "--model", self._model, *options]
        stack = self._engines.enter_context(contextlib.ExitStack())
        self._stops[name] = stack
        return Engine(stack.enter_context(process.running(command, self._folder, name)))

    def stop(self, name):
        """Ends an engine, as a kubelet does once a pod's grace period is over."""
        self._stops.pop(name).close()

    def start(self, name, role, *options):
        """A ready pod with an engine of its own."""
        engine = self.engine(name, role, *options)
        self.create(name, role, engine)
        self.set_status(name)
        return engine

    def create(self, name, role, engine):
        """A pod that is bound to a node, and of which its kubelet has reported nothing."""
        names = {"http": "engine", "kv_events": "kv-events", "kv_replay": "kv-replay"}
        ports = [{"name": names[key], "containerPort": port} for key, port in engine.ports.items()]
        self._control_plane.create(
            PATH,
            {
                "metadata": {"name": name, "labels": {APP_LABEL: "vllm", ROLE_LABEL: role}},
                "spec": {
                    "nodeName": "node-a",
                    "containers": [{"name": "engine", "image": "engine", "ports": ports}],
                },
            },
        )

    def set_status(self, name, ready=True, ip="127.0.0.1"):
        """What its kubelet reports of a pod."""
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
        self._patch(f"{PATH}/{name}/status", {"status": status})

    def set_labels(self, name, **labels):
        self._patch(f"{PATH}/{name}", {"metadata": {"labels": labels}})

    def set_annotations(self, name, annotations):
        self._patch(f"{PATH}/{name}", {"metadata": {"annotations": annotations}})

    def _patch(self, path, body):
        self._control_plane.ask("PATCH", path, body, content_type=MERGE_PATCH)

    def delete(self, name):
        """Asks for the end of a pod, which stays until its kubelet removes it."""
        self._control_plane.ask("DELETE", f"{PATH}/{name}")

    def remove(self, name):
        """Removes a pod at once, as its kubelet does when it has ended."""
        self._control_plane.ask("DELETE", f"{PATH}/{name}", gracePeriodSeconds=0)

    def names(self):
        return [pod["metadata"]["name"] for pod in self._control_plane.ask("GET", PATH)["items"]]

    def remove_all(self):
        # The API server removes a collection one after the other.
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(self.remove, self.names()))

    def start_many(self, count, engines):
        """Ready pods that share an engine of each role, at addresses of their own."""
        roles = list(engines)

        def start(number):
            name, role = f"many-{number}", roles[number % len(roles)]
            self.create(name, role, engines[role])
            self.set_status(name, ip=f"127.1.{number // 250}.{number % 250 + 1}")

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(start, range(count)))
