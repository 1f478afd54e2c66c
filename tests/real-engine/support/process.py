"""Programs of Splitrail, started and ended by the tests."""

import contextlib
import json
import subprocess

from .waiting import eventually


@contextlib.contextmanager
def running(command, folder, name):
    """Runs a command that writes a ready file, and yields what the file says.

    Ends the program in order afterwards. Ready file and log are in `folder`, after `name`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log_file = folder / f"{name}.json", folder / f"{name}.log"
    ready_file.unlink(missing_ok=True)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--ready-file", ready_file], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def read_ready():
        assert process.poll() is None, f"{name} ended:\n{log_file.read_text()[-4000:]}"
        # Readers may see the file before its last byte.
        try:
            return json.loads(ready_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    try:
        yield eventually(read_ready, bool, f"the ready file of {name}")
        process.terminate()
        assert process.wait(timeout=60) == 0, log_file.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
