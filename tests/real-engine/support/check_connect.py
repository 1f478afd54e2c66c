"""`splitrail check --connect`."""

import json
import os
import subprocess


def check(path):
    """Checks a file and its engines. Returns the exit code, and the result."""
    # Engines that compute on a shared processor may be slow.
    command = [os.environ["SPLITRAIL_BIN"], "check", path, "--connect", "--json", "--timeout", "60s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)
