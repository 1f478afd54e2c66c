"""The files of a service account, as a kubelet mounts them into a pod and renews them."""

import os
import secrets
import shutil

from .control_plane import NAMESPACE

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


class AccountFiles:
    """`token`, `ca.crt` and `namespace`. All change at once, by a link to their folder."""

    def __init__(self, control_plane, name, folder):
        self._control_plane, self._name, self.folder = control_plane, name, folder
        # What the tokens are bound to, one after the other, as those of a pod are to the pod.
        self._bound_to = []
        self.token = None
        folder.mkdir(parents=True)
        self.renew()
        for file in ("token", "ca.crt", "namespace"):
            (folder / file).symlink_to(f"..data/{file}")

    def renew(self):
        """Writes a new token, and returns the one before."""
        former, name = self.token, f"{self._name}-{secrets.token_hex(4)}"
        self._bound_to.append(name)
        bound = self._control_plane.create(SECRETS, {"metadata": {"name": name}})
        reference = {"apiVersion": "v1", "kind": "Secret", "name": name, "uid": bound["metadata"]["uid"]}
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{self._name}/token"
        spec = {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": reference}
        self.token = self._control_plane.create(path, {"spec": spec})["status"]["token"]
        version = self.folder / f"..{len(self._bound_to)}"
        version.mkdir()
        (version / "token").write_text(self.token)
        (version / "ca.crt").write_text(self._control_plane.authority())
        (version / "namespace").write_text(NAMESPACE)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self.folder / "..data")
        if former:
            shutil.rmtree(self.folder / f"..{len(self._bound_to) - 1}")
        return former

    def revoke(self, which=-1):
        """Makes the API server refuse a token: the present one, or with -2 the one before."""
        self._control_plane.ask("DELETE", f"{SECRETS}/{self._bound_to[which]}")
