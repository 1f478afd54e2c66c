"""Faults of the API server and of the way to it: the fleet stays, requests go on, and the log says what happened."""

import time

import pytest

from cluster.control_plane import NAMESPACE
from support.waiting import eventually

OUTAGE_S = 60


def test_an_api_server_that_is_killed_for_a_minute(control_plane, serving, fleet, pair):
    router, traffic = serving
    control_plane.kill_api_server()
    since = time.monotonic()
    try:
        router.wait_for_log("the known pods are kept", "Connection refused")
        while time.monotonic() - since < OUTAGE_S:
            traffic.goes_on()
        assert router.serving() == pair and router.found() == len(pair)
        assert router.errors() > 0
    finally:
        control_plane.start_api_server()
    # Starts take time: a change is seen without another one.
    fleet.start("late", "decode")
    router.wait_for("late", *pair)
    traffic.goes_on()


def test_a_version_that_the_api_server_no_longer_has(control_plane, start_router, fleet, pair, model):
    with start_router() as router:
        router.wait_for(*pair)
        with router.frozen():
            # The watch is at a version before all of this, which neither cache nor store has afterwards.
            fleet.remove("decode-0")
            fleet.start("decode-2", "decode")
            # The router may have been sent these changes, which it reads once it goes on.
            control_plane.create(f"/api/v1/namespaces/{NAMESPACE}/configmaps", {"metadata": {"name": "later"}})
            control_plane.kill_api_server()
            control_plane.compact()
            control_plane.start_api_server()
        router.wait_for("decode-1", "decode-2", "prefill-0", "prefill-1")
        router.wait_for_log("too old resource version")


def test_an_api_server_that_says_nothing_any_more(control_plane, serving, fleet, pair):
    router, traffic = serving
    with control_plane.frozen_api_server():
        errors = router.errors()
        eventually(router.errors, lambda now: now > errors, "the silence is noticed", patience_s=150)
        traffic.goes_on()
        assert router.serving() == pair
    fleet.start("late", "prefill")
    router.wait_for("late", *pair)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_permission_that_is_lacking_is_named_and_can_be_granted(
    control_plane, chart, user, start_router, fleet, pair, verb
):
    role = chart["Role"]
    (rule,) = role["rules"]
    remaining = [other for other in rule["verbs"] if other != verb]
    lacking = role | {"rules": [rule | {"verbs": remaining}]}
    control_plane.replace_resource(lacking)
    try:
        may = control_plane.permission(user, verb, "pods")
        eventually(may, lambda allowed: not allowed, "the Role counts")
        with start_router() as router:
            router.wait_for_log("WARN", user, f'cannot {verb} resource \\"pods\\"')
            assert router.errors() > 0
            assert not router.can_read()
            control_plane.replace_resource(role)
            fleet.start("late", "decode")
            router.wait_for("late", *pair)
            eventually(router.can_read, bool, "the source can be read", patience_s=120)
    finally:
        control_plane.replace_resource(role)
        eventually(may, bool, "the Role counts")


def test_a_permission_that_is_taken_away_leaves_the_fleet_as_it_is(
    control_plane, chart, serving, fleet, pair
):
    router, traffic = serving
    binding = chart["RoleBinding"]
    control_plane.remove_resource(binding)
    try:
        # The present watch goes on until its end.
        router.wait_for_log("is forbidden")
        fleet.start("late", "decode")
        traffic.goes_on()
        assert router.serving() == pair
    finally:
        control_plane.create_resource(binding)
    router.wait_for("late", *pair)


def test_a_token_that_is_renewed(control_plane, serving, account, fleet, pair):
    router, traffic = serving
    former = account.renew()
    account.revoke(-2)
    eventually(lambda: control_plane.accepts(former), lambda accepted: not accepted, "it is refused")
    # All connections end, so that the next watch needs a token again.
    control_plane.kill_api_server()
    control_plane.start_api_server()
    fleet.start("late", "decode")
    router.wait_for("late", *pair)
    traffic.goes_on()


def test_a_token_that_is_refused_before_it_is_renewed(control_plane, serving, account, fleet, pair):
    router, traffic = serving
    account.revoke()
    control_plane.kill_api_server()
    control_plane.start_api_server()
    router.wait_for_log("the known pods are kept", "Unauthorized")
    traffic.goes_on()
    assert router.serving() == pair
    fleet.start("late", "decode")
    account.renew()
    router.wait_for("late", *pair, patience_s=180)
