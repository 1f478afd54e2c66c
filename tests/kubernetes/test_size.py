"""A thousand pods."""

import time

from support.waiting import eventually

COUNT = 1000
ROUNDS = 3
# A router that is built for tests takes seconds for so many.
PATIENCE_S = 600
# What remains of a worker that has left, and of the allocator's pages, is far less than what a worker takes.
GROWTH_BYTES = 16 << 20


def test_a_thousand_pods_come_and_go_and_memory_stays(start_router, fleet):
    # Nobody listens at most addresses: how workers are found is what is tested.
    engines = {role: fleet.engine(role, role) for role in ("prefill", "decode")}
    with start_router() as router:
        held = []
        for round in range(ROUNDS):
            fleet.start_many(COUNT, engines)
            since = time.monotonic()
            eventually(router.found_last, lambda found: found == COUNT, "all pods are found", PATIENCE_S)
            eventually(lambda: len(router.workers()), lambda now: now == COUNT, "all are workers", PATIENCE_S)
            print(f"round {round}: seen {time.monotonic() - since:.2f} s after the last pod")
            fleet.remove_all()
            eventually(router.found_last, lambda found: found == 0, "all pods have left", PATIENCE_S)
            eventually(router.workers, lambda workers: workers == {}, "no worker is left", PATIENCE_S)
            held.append(router.memory_bytes())
            print(f"round {round}: {held[-1] >> 20} MiB")
        # The first rounds fill the allocator's pools.
        assert held[-1] - max(held[:-1]) < GROWTH_BYTES, held
        assert router.errors() == 0


def test_a_router_that_starts_finds_a_thousand_pods_in_pages(start_router, fleet):
    engines = {role: fleet.engine(role, role) for role in ("prefill", "decode")}
    fleet.start_many(COUNT, engines)
    with start_router() as router:
        since = time.monotonic()
        eventually(router.found_last, lambda found: found == COUNT, "all pods are found", PATIENCE_S)
        print(f"found {time.monotonic() - since:.2f} s after the start")
        # Not one page after the other.
        assert router.log().count("found in Kubernetes") == 1
        assert router.errors() == 0
