"""A router in a pod of the chart's Deployment: its configuration, service account and variables."""

import contextlib
import os
import shutil
import signal

import httpx
import yaml

from support import plain_http, process
from support.metrics import Metrics
from support.waiting import eventually

# Where a pod has the files of its service account; the folder lies in a file system of the router's own.
MOUNTED = "/run/secrets/kubernetes.io/serviceaccount"
IN_POD = """\
echo $$ >"$1" && mount -t tmpfs pod /run && mkdir -p "$2" && mount --bind "$0" "$2" && shift 2 && exec "$@"
"""


def configuration(config_map, **change):
    """The chart's configuration on loopback, without the tokenizer's files; `change` is the model's."""
    config = yaml.safe_load(config_map["data"]["splitrail.yaml"])
    config["listen"] = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    config["fleet"] = {"networks": ["127.0.0.0/8"]}
    config["limits"]["drain_delay"] = "0s"
    (model,) = config["models"]
    model.update({"tokenizer": {"kind": "none"}, **change})
    return config


@contextlib.contextmanager
def running(binary, config, account, port, folder):
    folder.mkdir(parents=True, exist_ok=True)
    mounted = MountedConfig(folder / "config", config)
    variables = ["env", "KUBERNETES_SERVICE_HOST=127.0.0.1", f"KUBERNETES_SERVICE_PORT={port}"]
    own_mounts = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    pid_file = folder / "router.pid"
    in_pod = ["sh", "-c", IN_POD, account.folder, pid_file, MOUNTED]
    command = [*variables, *own_mounts, *in_pod, binary, "serve", "--reload-on-change"]
    command += ["--config", mounted.path]
    with process.running(command, folder, "router") as ready:
        yield Router(ready, mounted, folder / "router.log", int(pid_file.read_text()))


class MountedConfig:
    """A ConfigMap's file as a kubelet mounts it, and changes it: by a link to its folder."""

    def __init__(self, folder, config):
        self._folder, self._versions = folder, 0
        self.path = folder / "splitrail.yaml"
        folder.mkdir()
        self.publish(config)
        self.path.symlink_to("..data/splitrail.yaml")

    def publish(self, config):
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        (version / "splitrail.yaml").write_text(yaml.safe_dump(config))
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self._folder / "..data")
        if self._versions > 1:
            shutil.rmtree(self._folder / f"..{self._versions - 1}")


class Router:
    def __init__(self, ready, mounted, log_path, pid):
        self._mounted, self._log_path, self._pid = mounted, log_path, pid
        self.http, self.admin = (f"http://{ready[name]}" for name in ("http", "admin"))

    def workers(self):
        """The state of each worker by its id."""
        reply = plain_http.get(f"{self.admin}/admin/workers", timeout=30)
        reply.raise_for_status()
        return {worker["id"]: worker for worker in reply.json()["workers"]}

    def serving(self):
        return sorted(id for id, worker in self.workers().items() if worker["state"] == "serving")

    def wait_for(self, *ids, patience_s=90):
        """Waits until exactly these workers serve."""
        eventually(self.serving, lambda now: now == sorted(ids), f"{ids} serve", patience_s)

    def metrics(self):
        return Metrics.scrape(f"{self.admin}/metrics")

    def metrics_text(self):
        """The lines of the metrics page."""
        return plain_http.get(f"{self.admin}/metrics", timeout=30).text.splitlines()

    def found(self):
        return int(self.metrics().sum("splitrail_discovery_workers"))

    def found_last(self):
        """As `found`, by the log: with many workers, the metrics are a page of megabytes."""
        lines = [line for line in self.log().splitlines() if "found in Kubernetes" in line]
        return int(lines[-1].rpartition("workers=")[2]) if lines else None

    def errors(self):
        return int(self.metrics().sum("splitrail_discovery_errors_total"))

    def can_read(self):
        return self.metrics().sum("splitrail_discovery_successful") == 1

    def memory_bytes(self):
        return int(self.metrics().sum("process_resident_memory_bytes"))

    def log(self):
        return self._log_path.read_text()

    def wait_for_log(self, *texts, since=0, patience_s=120):
        """Waits for a line of the log with all these texts, after the first `since` characters."""

        def lines():
            return [line for line in self.log()[since:].splitlines() if all(text in line for text in texts)]

        return eventually(lines, bool, f"a line of the log with {texts}", patience_s)[0]

    def publish(self, config):
        """Changes the ConfigMap, and nothing else."""
        self._mounted.publish(config)

    def attention(self):
        """The kinds of what needs attention."""
        reply = plain_http.get(f"{self.admin}/admin/attention", timeout=30)
        reply.raise_for_status()
        return {found["kind"] for found in reply.json()["needs_attention"]}

    def reload(self, config):
        self.publish(config)
        reply = httpx.post(f"{self.admin}/admin/reload", timeout=60)
        assert reply.is_success, reply.text

    @contextlib.contextmanager
    def frozen(self):
        """The router takes no processor time, as if its machine were overloaded."""
        os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)
