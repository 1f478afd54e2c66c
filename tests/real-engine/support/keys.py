"""Keys of tenants, as an operator makes them, and the cache salts that the router derives."""

import hashlib
import hmac
import json
import os
import subprocess


class Keys:
    """A file of keys, written by `splitrail keys`."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "keys.yaml"
        self.path.unlink(missing_ok=True)

    def new(self, tenant):
        """Adds a key of a tenant; returns its id and the key."""
        made = json.loads(self._run("new", "--tenant", tenant, "--json", "--file", self.path))
        return made["entry"]["id"], made["key"]

    def revoke(self, key_id):
        self._run("revoke", key_id, "--file", self.path)

    def _run(self, *arguments):
        command = [os.environ["SPLITRAIL_BIN"], "keys", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout


def salt_of_tenant(secret, tenant):
    """The `cache_salt` that engines get for a tenant with a cache of its own.

    That is the salt of a request in which the client sends none.

    `secret` is the text of `cache_salt_key`; `crates/access/src/salt.rs` describes the derivation.
    """
    name = tenant.encode()
    parts = b"\x00" + len(name).to_bytes(8, "little") + name + b"\xff"
    return hmac.new(secret.encode(), parts, hashlib.sha256).hexdigest()[:32]
