"""Router and engine make the same tokens and KV blocks of a known prompt, and know it."""

from support.waiting import eventually


def test_both_workers_agree(router):
    def parity():
        workers = [worker for worker in router.workers() if worker["model"] == "tiny"]
        return {worker["id"]: (worker["parity"], worker["parity_cause"]) for worker in workers}

    agreed = {"p0": ("ok", None), "d0": ("ok", None)}
    eventually(parity, lambda seen: seen == agreed, "both workers agree with the router")
    assert all(worker["kv_routing"] for worker in router.workers())
