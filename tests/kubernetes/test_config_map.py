"""A router applies a changed ConfigMap without a restart, and says what it cannot apply."""

from support.waiting import eventually


def test_a_changed_config_map_is_applied_or_refused_as_a_whole(start_router, config, pair):
    with start_router() as router:
        router.wait_for(*pair)
        (model,) = config["models"]
        nobody = model["discovery"][0] | {"selector": "app=nobody"}
        router.publish(config | {"models": [model | {"discovery": [nobody]}]})
        eventually(router.workers, lambda workers: workers == {}, "no worker is left")
        # What only a restart can change keeps the rest from being applied as well.
        limits = config["limits"] | {"in_flight_max": 77}
        router.publish(config | {"limits": limits})
        router.wait_for_log("reload refused")
        router.wait_for_log("limits.in_flight_max")
        assert "reload_refused" in router.attention()
        assert router.workers() == {}
        router.publish(config)
        router.wait_for(*pair)
        assert "reload_refused" not in router.attention()
