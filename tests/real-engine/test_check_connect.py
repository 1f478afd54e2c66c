"""`splitrail check --connect` on the real pair: nothing to say of the right configuration, and each
fault of a wrong one named."""

import email.utils
import json
import os
import pathlib
import re
import shutil
import time

import pytest

from support import check_connect
from support.altered import Altered
from support.engine import BLOCK_SIZE

CONFIG = """\
listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: {name}
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: "{tokenizer}" }}
    flow: {flow}
    connector: nixl
    workers:
      - {{ id: p0, role: prefill, url: "{prefill}", kv_events: "{prefill_events}", kv_replay: "{prefill_replay}" }}
      - {{ id: d0, role: decode, url: "{decode}", kv_events: "{decode_events}", kv_replay: "{decode_replay}" }}
"""


@pytest.fixture
def check(tmp_path, prefill, decode):
    """Runs the check with other values than the right ones, and a changed text: `check(block_size=64)`."""

    right = {
        "name": "tiny",
        "block_size": BLOCK_SIZE,
        "tokenizer": os.environ["SPLITRAIL_MODEL_PATH"],
        "flow": "prefill_first",
        "prefill": prefill.url,
        "prefill_events": prefill.kv_events,
        "prefill_replay": prefill.kv_replay,
        "decode": decode.url,
        "decode_events": decode.kv_events,
        "decode_replay": decode.kv_replay,
    }

    def run(change=lambda text: text, **wrong):
        path = tmp_path / "splitrail.yaml"
        path.write_text(change(CONFIG.format(**(right | wrong))))
        return check_connect.check(path)

    return run


@pytest.fixture
def altered():
    """Puts something before an engine that changes its replies."""
    made = []

    def make(engine, **changes):
        made.append(Altered(engine, **changes))
        return made[-1].url

    yield make
    for each in made:
        each.close()


def findings(result):
    """`{(worker or None, kind): words}` of everything that was found."""
    found = {}
    for model in result["models"]:
        own = [finding for worker in model["workers"] for finding in worker["findings"]]
        for finding in own + model["findings"]:
            found[finding["worker"], finding["kind"]] = f"{finding['what']} {finding['remedy']}"
    return found


def facts(result, id):
    workers = result["models"][0]["workers"]
    return next(worker["facts"] for worker in workers if worker["id"] == id)


def test_the_right_pair_is_sound(check):
    code, result = check()
    assert (code, findings(result)) == (0, {})
    for id in ("p0", "d0"):
        seen = facts(result, id)
        assert seen["version"].startswith("0.32.0")
        assert seen["models"] == ["tiny", "tiny-aggregated"]
        assert (seen["block_size"], seen["context_tokens"]) == (BLOCK_SIZE, 2048)
        assert abs(seen["clock_ahead_s"]) <= 5
        for fact in (
            "kv_events_arrive",
            "kv_events_replayed",
            "reports_cached_tokens",
            "chat_tokens_agree",
            "text_tokens_agree",
        ):
            assert seen[fact] is True, (id, fact)
    assert facts(result, "d0")["hand_offs"] == [{"from": "p0", "works": True}]


def test_nothing_stays_pinned_and_the_decode_engine_received_kv(check, prefill, decode):
    before = decode.prompt_tokens_by_source()["external_kv_transfer"]
    check()
    assert decode.prompt_tokens_by_source()["external_kv_transfer"] > before
    assert prefill.running_requests() == 0


def test_vllm_ignores_thresholds_and_the_router_gates(check):
    code, result = check(flow="decode_first")
    assert (code, findings(result)) == (0, {})
    assert facts(result, "d0")["supports_cache_hit_threshold"] is False


def test_a_wrong_port_is_refused(check):
    code, result = check(prefill="http://127.0.0.1:1")
    assert code == 69
    assert set(findings(result)) == {("p0", "refused")}


def test_the_port_of_kv_events_is_no_http_server(check, prefill):
    code, result = check(prefill=prefill.kv_events.replace("tcp:", "http:"))
    assert code == 69
    assert set(findings(result)) == {("p0", "not_http")}


def test_a_wrong_model_name_is_named(check):
    code, result = check(name="large")
    assert code == 69
    found = findings(result)
    assert set(found) == {("p0", "wrong_model"), ("d0", "wrong_model")}
    assert "serves `tiny`, `tiny-aggregated`, not `large`" in found["p0", "wrong_model"]


def test_a_wrong_block_size_is_named(check):
    code, result = check(block_size=64)
    assert code == 69
    found = findings(result)
    assert set(found) == {("p0", "block_size_differs"), ("d0", "block_size_differs")}
    assert "block_size: 32" in found["p0", "block_size_differs"]


def test_wrong_addresses_of_events_and_replay_are_corrected(check, prefill, decode):
    code, result = check(prefill_events=prefill.kv_replay, decode_replay=decode.kv_events)
    assert code == 69
    found = findings(result)
    assert set(found) == {("p0", "kv_events_unreachable"), ("d0", "kv_replay_fails")}
    assert prefill.kv_events in found["p0", "kv_events_unreachable"]
    assert decode.kv_replay in found["d0", "kv_replay_fails"]
    code, result = check(prefill_replay="tcp://127.0.0.1:1")
    assert (code, set(findings(result))) == (69, {("p0", "kv_replay_fails")})


def test_a_replay_that_is_not_written_down_is_a_warning(check, prefill):
    code, result = check(lambda text: text.replace(f', kv_replay: "{prefill.kv_replay}"', ""))
    found = findings(result)
    assert (code, set(found)) == (0, {("p0", "kv_replay_off")})
    assert f'kv_replay: "{prefill.kv_replay}"' in found["p0", "kv_replay_off"]


def test_an_engine_that_does_not_tell_its_cached_tokens_is_named(check, altered, prefill):
    def without(_path, said):
        return re.sub(rb'"prompt_tokens_details":\{[^}]*\}', b'"prompt_tokens_details":null', said)

    code, result = check(prefill=altered(prefill, body=without))
    found = findings(result)
    assert (code, set(found)) == (0, {("p0", "details_off")})
    assert "--enable-prompt-tokens-details" in found["p0", "details_off"]


def test_engines_that_are_too_old_are_named(check, altered, prefill, decode):
    def old(path, said):
        return b'{"version":"0.8.5"}' if path == "/version" else said

    code, result = check(prefill=altered(prefill, body=old), decode=altered(decode, body=old))
    assert set(findings(result)) == {("p0", "too_old"), ("d0", "too_old")}, code


def test_a_clock_that_is_off_is_named(check, altered, decode):
    late = {"date": email.utils.formatdate(time.time() - 120, usegmt=True)}
    code, result = check(decode=altered(decode, headers=late))
    found = findings(result)
    assert (code, set(found)) == (0, {("d0", "clock_off")})
    assert "behind" in found["d0", "clock_off"]


def test_another_connector_is_named(check):
    code, result = check(lambda text: text.replace("connector: nixl", "connector: nixl_push"))
    assert code == 69
    assert ("p0", "other_connector") in findings(result)


def test_another_template_and_another_vocabulary_are_found(check, tmp_path):
    model = pathlib.Path(os.environ["SPLITRAIL_MODEL_PATH"])
    other = tmp_path / "model"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(model / name, other / name)
    templates = list(model.glob("chat_template*"))
    config = json.loads((other / "tokenizer_config.json").read_text())
    template = config.get("chat_template") or templates[0].read_text()
    config["chat_template"] = template.replace("<|im_end|>", "<|im_end|>\n")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    code, result = check(tokenizer=other)
    found = findings(result)
    assert (code, set(found)) == (69, {("p0", "chat_differs"), ("d0", "chat_differs")})
    assert "first difference is at position" in found["p0", "chat_differs"]

    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:200]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, result = check(tokenizer=other)
    found = findings(result)
    assert (code, set(found)) == (69, {("p0", "text_differs"), ("d0", "text_differs")})
