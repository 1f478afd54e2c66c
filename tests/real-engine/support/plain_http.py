"""HTTP without TLS, for the many small questions of the tests."""

import httpx


def get(url, **kwargs):
    """As `httpx.get`, without loading the authorities of certificates, which takes 80 ms."""
    return httpx.get(url, verify=False, **kwargs)
