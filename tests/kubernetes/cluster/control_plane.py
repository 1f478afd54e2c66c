"""A real etcd and a real kube-apiserver. Nothing schedules pods or runs them: the tests do."""

import base64
import contextlib
import os
import pathlib
import secrets
import signal
import subprocess

import httpx

from support.waiting import eventually

NAMESPACE = "llm"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MERGE_PATCH = "application/merge-patch+json"
# Where resources are whose kinds the chart has, below `/apis` or `/api`.
PLURALS = {
    "Deployment": "deployments",
    "HTTPRoute": "httproutes",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "StatefulSet": "statefulsets",
    "ConfigMap": "configmaps",
}


class ControlPlane:
    """The servers, and an administrator's client of them."""

    def __init__(self, folder, servers, ports):
        self._folder, self._servers = folder, pathlib.Path(servers)
        self._etcd_port, self._peer_port, self.port = ports
        self._etcd = self._api_server = None
        self._token = secrets.token_hex(16)
        self.address = f"https://127.0.0.1:{self.port}"
        self._client = httpx.Client(
            base_url=self.address,
            # Routers check the certificate.
            verify=False,
            headers={"authorization": f"Bearer {self._token}"},
            timeout=60,
            limits=httpx.Limits(max_connections=32),
        )

    @contextlib.contextmanager
    def running(self):
        """Runs both servers with an empty namespace in an empty store."""
        self._folder.mkdir(parents=True)
        (self._folder / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        key = self._folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        try:
            self._start_etcd()
            self.start_api_server()
            self.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            yield self
        finally:
            self._client.close()
            for process in (self._api_server, self._etcd):
                if process:
                    process.kill()
                    process.wait()

    def _spawn(self, name, arguments):
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [self._servers / name, *arguments]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _start_etcd(self):
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        arguments = ["--name=only", f"--data-dir={self._folder / 'etcd'}", "--unsafe-no-fsync"]
        arguments += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        arguments += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        self._etcd = self._spawn("etcd", [*arguments, f"--initial-cluster=only={peer}"])
        self._etcd_url = client

    def start_api_server(self):
        """Starts the API server, and returns once it is ready."""
        folder, key = self._folder, self._folder / "accounts.key"
        arguments = [f"--etcd-servers={self._etcd_url}", f"--cert-dir={folder / 'certificates'}"]
        arguments += ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"]
        arguments += [f"--secure-port={self.port}", f"--token-auth-file={folder / 'tokens.csv'}"]
        arguments += [f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"]
        arguments += ["--service-account-issuer=https://kubernetes.default.svc"]
        arguments += ["--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24"]
        # A loopback address is no endpoint, and no controller creates accounts for pods.
        arguments += ["--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount"]
        process = self._api_server = self._spawn("kube-apiserver", arguments)

        def is_ready():
            assert process.poll() is None, (folder / "kube-apiserver.log").read_text()[-4000:]
            with contextlib.suppress(httpx.TransportError):
                return self._client.get("/readyz").status_code == 200

        eventually(is_ready, bool, "the API server is ready", patience_s=180)

    def kill_api_server(self):
        self._api_server.kill()
        self._api_server.wait()

    @contextlib.contextmanager
    def frozen_api_server(self):
        """The API server accepts connections, and says nothing."""
        os.kill(self._api_server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._api_server.pid, signal.SIGCONT)

    def compact(self):
        """Removes all former versions from etcd, as an API server does every five minutes."""

        def ask(path, body):
            reply = httpx.post(f"{self._etcd_url}/v3/kv/{path}", json=body, timeout=60)
            reply.raise_for_status()
            return reply.json()

        latest = ask("range", {"key": base64.b64encode(b"\0").decode()})["header"]["revision"]
        ask("compaction", {"revision": latest, "physical": True})

    def authority(self):
        """The certificates that clients trust, as PEM."""
        return (self._folder / "certificates" / "apiserver.crt").read_text()

    def ask(self, method, path, body=None, content_type="application/json", **params):
        """A request as administrator. Fails with the API server's message."""
        reply = self._client.request(
            method, path, json=body, headers={"content-type": content_type}, params=params
        )
        assert reply.is_success, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply.json()

    def has(self, path):
        return self._client.get(path).is_success

    def create(self, path, body, **params):
        return self.ask("POST", path, body, fieldValidation="Strict", **params)

    def create_resource(self, resource, **params):
        """Creates a resource of the chart, with nothing in it that the API server does not know."""
        return self.create(self.path(resource), resource, **params)

    def replace_resource(self, resource):
        self.ask("PUT", f"{self.path(resource)}/{resource['metadata']['name']}", resource)

    def remove_resource(self, resource):
        self.ask("DELETE", f"{self.path(resource)}/{resource['metadata']['name']}")

    @staticmethod
    def path(resource):
        version = resource["apiVersion"]
        base = "/apis" if "/" in version else "/api"
        namespace = resource["metadata"].get("namespace", NAMESPACE)
        return f"{base}/{version}/namespaces/{namespace}/{PLURALS[resource['kind']]}"

    def accepts(self, token):
        """Whether a token is one of an account, whatever that account may do."""
        path = f"{self.address}/api/v1/namespaces/{NAMESPACE}/pods"
        reply = httpx.get(path, verify=False, headers={"authorization": f"Bearer {token}"})
        return reply.status_code != 401

    def permission(self, user, verb, resource, group=""):
        """A function that asks whether a user may do this."""
        attributes = {"namespace": NAMESPACE, "verb": verb, "resource": resource, "group": group}
        spec = {"user": user, "groups": [], "resourceAttributes": attributes}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return lambda: self.create(path, {"spec": spec})["status"]["allowed"]

    def watches_of_pods(self):
        """How many watches of pods are open, those of the API server itself left out."""
        page = self._client.get("/metrics").text
        (name, labels) = ("apiserver_longrunning_requests{", ('resource="pods"', 'verb="WATCH"'))
        lines = [line for line in page.splitlines() if line.startswith(name)]
        lines = [line for line in lines if all(label in line for label in (*labels, 'scope="namespace"'))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
