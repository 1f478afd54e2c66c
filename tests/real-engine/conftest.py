"""Fixtures. `run.sh` starts the engines and says where they are; routers start here."""

import os
import pathlib

import pytest

# Before it is imported, so that its assertions show values.
pytest.register_assert_rewrite("support")

from support import router as routers  # noqa: E402
from support.collector import Collector  # noqa: E402
from support.engine import Engine  # noqa: E402


@pytest.fixture(scope="session")
def prefill():
    return Engine(int(os.environ["SPLITRAIL_PREFILL_PORT"]))


@pytest.fixture(scope="session")
def decode():
    return Engine(int(os.environ["SPLITRAIL_DECODE_PORT"]))


@pytest.fixture(scope="session", autouse=True)
def collector():
    """Takes the traces of engines, which export all of them, and of routers that are told to."""
    with Collector(int(os.environ["SPLITRAIL_OTLP_PORT"])) as collector:
        yield collector


@pytest.fixture(scope="session")
def logs():
    """The folder of configurations and logs, with one for each router."""
    return pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"])


@pytest.fixture(scope="session")
def start_router(prefill, decode, logs):
    """Starts a router from worker lines: `with start_router(folder, workers) as router`."""
    binary = os.environ["SPLITRAIL_BIN"]
    model_path = os.environ["SPLITRAIL_MODEL_PATH"]

    def start(name, workers, **options):
        yaml = routers.config(model_path, decode, workers, **options)
        return routers.running(binary, yaml, logs / name)

    return start


@pytest.fixture(scope="session")
def router(start_router, prefill, decode):
    """One prefill and one decode worker behind one router."""
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]
    with start_router("pair", workers) as router:
        yield router


@pytest.fixture(autouse=True)
def engines_survive(prefill, decode):
    """Whatever a test does, both engines are alive afterwards."""
    yield
    assert prefill.is_healthy(), "the prefill engine died"
    assert decode.is_healthy(), "the decode engine died"


# These start further engines, or stop some: they come after all others.
LAST = (
    "test_adapter.py",
    "test_data_parallel.py",
    "test_eagle.py",
    "test_fetch.py",
    "test_hybrid.py",
    "test_hybrid_pair.py",
    "test_mooncake.py",
    "test_placement.py",
    "test_push.py",
    "test_sglang.py",
    "test_shared_storage.py",
    "test_shims.py",
    "bidirectional",
)


def pytest_collection_modifyitems(items):
    folder = pathlib.Path(__file__).parent

    def place(item):
        name = item.path.relative_to(folder).parts[0]
        return LAST.index(name) + 1 if name in LAST else 0

    items.sort(key=place)
