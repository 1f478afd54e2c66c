"""Waiting for conditions. A timeout is a bound on patience, never a measure."""

import time

PATIENCE_S = 60
POLL_S = 0.05


def eventually(read, accept, what, patience_s=PATIENCE_S):
    """Reads until `accept` likes the value, and returns it.

    Fails with the last value seen, so that a wrong figure reads as one.
    """
    deadline = time.monotonic() + patience_s
    while True:
        value = read()
        if accept(value):
            return value
        assert time.monotonic() < deadline, f"{what}: still {value!r} after {patience_s} s"
        time.sleep(POLL_S)


def settled(read):
    """The value once two readings in a row agree."""
    last = [object()]

    def unchanged(value):
        same = value == last[0]
        last[0] = value
        return same

    return eventually(read, unchanged, "a value that settles")
