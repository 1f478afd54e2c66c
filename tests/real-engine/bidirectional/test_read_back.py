"""What a real decode engine has generated is read back by the next turn's prefill leg, exactly."""

import contextlib
import itertools
import os
import pathlib
import random
import secrets

import pytest

from support import kills, log_probabilities, outcome, pairs, prompts, proxy, turns
from support import router as routers
from support.engine import BLOCK_SIZE, SOURCES, full_hit
from support.pairs import difference
from support.turns import common, whole
from support.waiting import eventually, settled

QUESTION, ANSWER = 40, 100
SEED = "hash_seed: 5318008\n"
MODEL = (
    "read_back: true",
    "read_back_pin: 240s",
    # These engines compute faster than they read; here they read nevertheless.
    "costs: { hand_off_base_ms: 0, kv_bytes_per_token: 1, prefill_us_per_token: 1000000 }",
)


@pytest.fixture(scope="module")
def start(pair):
    """Starts a router that reads back: `with start(name) as router`."""
    prefill, decode = pair.engines
    workers = [routers.worker("p0", "prefill", prefill), routers.worker("d0", "decode", decode)]

    def start(name, *more):
        model_path = os.environ["SPLITRAIL_MODEL_PATH"]
        yaml = routers.config(model_path, decode, workers, top=SEED, more=[*MODEL, *more])
        folder = pathlib.Path(os.environ["SPLITRAIL_TEST_LOGS"]) / name
        return routers.running(os.environ["SPLITRAIL_BIN"], yaml, folder)

    return start


class Reply:
    def __init__(self, reply):
        assert reply.status_code == 200, reply.text
        body = reply.json()
        (choice,) = body["choices"]
        self.request_id = reply.headers["x-request-id"]
        self.ids = choice["token_ids"]
        self.steps = {choice["index"]: log_probabilities.steps(choice["logprobs"])}
        self.cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert body["kv_transfer_params"] is None, "clients do not see where KV is"


def ask(router, ids, max_tokens=ANSWER, **more):
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **log_probabilities.COMPLETION, **more}
    return Reply(router.post("/v1/completions", json=body))


def ask_cold(router, ids, max_tokens=ANSWER):
    return ask(router, ids, max_tokens, cache_salt=secrets.token_hex(8))


def reads(router, outcome):
    return router.metrics().sum("splitrail_read_backs_total", model="tiny", outcome=outcome)


def parity(router):
    """By it, the router has sent the prompts of its own that engines would count."""
    workers = (worker for worker in router.workers() if worker["id"] in ("p0", "d0"))
    return {worker["id"]: worker["parity"] for worker in workers}


def counts_of_leg(router, answer):
    """What the ledger says of the prefill leg of an answer, by the engine's names."""
    leg = router.decision(answer.request_id)["ledger"]["legs"][0]
    counts = {source: leg[source] for source in SOURCES}
    counts["external_kv_transfer"] += leg.get("read_back", 0)
    return counts


def ask_turn(router, engine, talk, said, known):
    """Asks the last question. The answer is exact, and prefill has computed all but what is known.

    `known` are the tokens that prefill has in its own cache and those that it reads back.
    """
    prompt, (held, read) = talk.prompt(said), known
    expected = {"local_cache_hit": held, "external_kv_transfer": read}
    expected |= {"local_compute": len(prompt) - held - read}
    before = settled(engine.prompt_tokens_by_source)
    # By its events, the engine holds what it has read as well.
    with router.indexing("p0", len(prompt) // BLOCK_SIZE - held // BLOCK_SIZE):
        answer = talk.ask(said, max_tokens=ANSWER)
    counted = eventually(
        lambda: difference(engine.prompt_tokens_by_source(), before),
        lambda grown: sum(grown.values()) >= len(prompt),
        "the prompt in the engine's counters",
    )
    assert counted == expected
    assert counts_of_leg(router, answer) == counted
    assert answer.cached_tokens == held + read
    # KV that is wrong shows at once.
    log_probabilities.assert_exact(log_probabilities.cold(talk.ask, said, max_tokens=12), answer, whole=False)
    return turns.said_by(answer)


def agree(router):
    eventually(lambda: parity(router), lambda seen: seen == {"p0": "ok", "d0": "ok"}, "parity")


TALKS = pytest.mark.parametrize("kind", [turns.ByIds, turns.ByChat], ids=["ids", "chat"])
# No pin is released in a test: that would cost the prefill engine a token that is counted there.
ROOM = "read_back_pinned_percent_max: 90"


@TALKS
def test_in_ten_turns_prefill_computes_the_questions_and_reads_the_answers(pair, start, kind):
    with start(f"ten-turns-{kind.__name__}", ROOM) as router:
        agree(router)
        computed = ten_turns(router, pair.prefill, kind)
        assert (reads(router, "read"), reads(router, "failed")) == (9, 0)
        (worker,) = (w for w in router.workers() if w["id"] == "d0")
        assert worker["keeps_for_read_back"] is True
    print(f"computed by turns: {computed}")
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "a router that stops frees all pins")


def ten_turns(router, engine, kind):
    """Asks ten questions. Returns the tokens that prefill computes for each: the question, and what of the
    answer before is in no whole block.
    """
    talk, said, computed, before = kind(router, engine), [], [], []
    for turn in range(10):
        said.append(kind.tokens(QUESTION))
        prompt = talk.prompt(said)
        assert common(prompt, before) == len(before), "an answer is tokenised as it was generated"
        # The last token of an answer has no KV.
        held = whole(len(before) - ANSWER) if turn else 0
        read = whole(len(before) - 1) - held if turn else 0
        said.append(ask_turn(router, engine, talk, said, (held, read)))
        assert len(said[-1]) == ANSWER
        computed.append(len(prompt) - held - read)
        before = prompt + said[-1]
    return computed


# Where the history is edited before a turn. Of an answer that is edited late, more is read than an engine
# would compute; of one that is edited early, nothing is.
EDITS = ("nowhere", "late in the answer", "early in the answer", "in the question", "anywhere")


def edit(choose, said, where, tokens):
    """Replaces a few tokens of what was said."""
    if where == "nowhere":
        return
    part, first, end = {
        "late in the answer": (-1, turns.TAKEN_MIN, ANSWER),
        "early in the answer": (-1, 0, BLOCK_SIZE),
        "in the question": (-2, 0, len(said[-2])),
    }.get(where, (choose.randrange(len(said)), 0, None))
    at = choose.randrange(first, end or len(said[part]))
    replaced = said[part][at]
    new = [token for token in tokens(6) if token != replaced][: choose.randrange(1, 5)]
    said[part] = said[part][:at] + new + said[part][at + choose.randrange(1, 5) :]


def assert_its_cache_is_right(engine, other, prompt):
    """An engine answers from its cache as another one that computes the prompt."""
    # Further tokens would complete a block that the next turn is not expected to find.
    body = outcome.body(prompt, stream=False, max_tokens=1)
    hit = engine.post("/v1/completions", body).json()
    cold = other.post("/v1/completions", {**body, "cache_salt": secrets.token_hex(8)}).json()
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == full_hit(len(prompt))
    seen, expected = ({0: log_probabilities.steps(its["choices"][0]["logprobs"])} for its in (hit, cold))
    log_probabilities.assert_exact(seen, expected)


@TALKS
def test_a_history_that_was_edited_is_read_up_to_the_edit(pair, start, decode, kind):
    choose = random.Random(secrets.randbits(64))
    with start(f"edited-{kind.__name__}", ROOM) as router:
        agree(router)
        talk, account = kind(router, pair.prefill), turns.Account()
        said, read_back = [], []
        for turn in range(10):
            if turn:
                edit(choose, said, EDITS[turn % len(EDITS)], kind.tokens)
            # The first prompt is longer than one that is prefilled by the decode worker.
            said.append(kind.tokens(choose.randrange(40, 90)))
            prompt = talk.prompt(said)
            known = account.expect(prompt)
            print(f"turn {turn}: {len(prompt)} tokens, {known} are held and read")
            said.append(ask_turn(router, pair.prefill, talk, said, known))
            account.answered(prompt, said[-1])
            read_back.append(known[1])
            # Nothing wrong is left in the prefill engine's cache either.
            assert_its_cache_is_right(pair.prefill, decode, prompt)
        ends = [reads(router, end) for end in ("read", "failed", "mismatch")]
        assert ends == [sum(map(bool, read_back)), 0, 0]
        # Unedited histories and those that are edited late are read, if not the whole answer.
        assert all(read_back[turn] for turn in range(1, 10) if turn % len(EDITS) < 2), read_back
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "a router that stops frees all pins")


def test_pins_that_will_not_be_read_are_released(pair, start):
    decode = pair.decode
    eventually(decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    # One percent of the engine's blocks: less than a conversation of ten blocks has.
    with start("bound", "read_back_pinned_percent_max: 1") as router:
        for _ in range(5):
            ask(router, prompts.token_ids(200))
        eventually(decode.kv_usage, lambda usage: usage == 0, "pinned blocks are freed")
        released = router.metrics().sum("splitrail_read_back_releases_total", outcome="released")
        assert released == 5


def test_what_a_fetch_leaves_pinned_is_freed_by_the_decode_engine(pair, decode):
    """The second step of a peer fetch is a leg with a hand-off: these engines keep its blocks pinned."""
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    costs = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }"
    fetching = ("peer_fetch: two_step", "peer_fetch_min_tokens: 1", "queue: none", costs)
    options = {"name": "read-back-fetch", "policy": "predicted_ttft", "top": SEED}
    with pairs.cluster(pair, "nixl", decode, more=(*MODEL[:2], *fetching), **options) as cluster:
        router, prefix = cluster.router, prompts.token_ids(320)
        cluster.hold([prefix])
        prompt = prefix + prompts.token_ids(50)
        log_probabilities.assert_exact(router.complete(prompt), log_probabilities.cold(router.complete, prompt))
        # Much earlier than the pin ends; what decode keeps is for the next turn.
        cluster.nothing_is_held(pair.prefill)
        metrics = router.metrics()
        assert metrics.sum("splitrail_peer_fetches_total", outcome="fetched") == 1
        assert metrics.sum("splitrail_read_back_releases_total", outcome="released") == 1


@pytest.fixture(scope="module")
def cluster(pair, decode):
    """With a second decode engine, which keeps nothing pinned."""
    options = {"name": "read-back", "top": SEED, "spare": decode}
    more = (*MODEL, "read_back_pinned_percent_max: 90")
    with pairs.cluster(pair, "nixl", decode, more=more, **options) as cluster:
        yield cluster


def test_conversations_of_every_length_go_on_at_once(cluster, pair):
    """Of each answer, prefill computes what is in no whole block."""
    eventually(pair.decode.kv_usage, lambda usage: usage == 0, "blocks of other tests")
    histories = [prompts.token_ids(length) for length in prompts.LENGTHS]
    router, blocks = cluster.router, sum(length // BLOCK_SIZE for length in prompts.LENGTHS)
    with router.draining("d1"):
        with router.indexing("p0", blocks):
            said = cluster.map(lambda history: ask(router, history).ids, histories)
        batch = [
            history + ids + prompts.token_ids(10 + at % BLOCK_SIZE)
            for at, (history, ids) in enumerate(zip(histories, said))
        ]
        references = cluster.references(batch)
        asked = cluster.ask_all(batch, references)
    known = [(length + ANSWER - 1) // BLOCK_SIZE * BLOCK_SIZE for length in prompts.LENGTHS]
    assert asked.cached_tokens == known
    assert asked.on_prefill["local_compute"] == sum(map(len, batch)) - sum(known)
    assert asked.told_prefill == asked.on_prefill
    assert asked.told_decode == asked.on_decode
    assert reads(router, "read") == len(batch)
    assert (reads(router, "failed"), reads(router, "mismatch")) == (0, 0)
    cluster.nothing_is_held(pair.prefill)


# The decode engine that keeps an answer, or the prefill engine that reads it, is killed at a step.
STEPS = (
    "between the turns",
    "before the read",
    "in the read",
    "before decode pulls",
    "while decode pulls",
)
KILLS = tuple(itertools.product(("decode", "prefill"), STEPS))
TELLING = (("decode", "before the read"), ("prefill", "in the read"))


def two_turns(cluster):
    """Lets a prompt be answered. Returns the next one."""
    history = prompts.token_ids(100)
    with cluster.router.draining("d1"):
        return history + ask(cluster.router, history).ids + prompts.token_ids(40)


def offers(router, request_id):
    """What legs of a request were to read."""
    ledger = router.decision(request_id)["ledger"]
    legs = ledger["legs"] + ledger.get("discarded", [])
    return [leg["read_back_offer"] for leg in legs if "read_back_offer" in leg]


@pytest.mark.parametrize(("victim", "step"), kills.chosen(KILLS, TELLING))
def test_an_engine_is_killed_around_a_read(cluster, pair, decode, victim, step):
    router = cluster.router

    def read():
        history = two_turns(cluster)
        return bool(offers(router, ask(router, history, 12).request_id))

    # An engine of which a read has failed reads nothing for a while.
    eventually(read, bool, "a read")
    one, other = two_turns(cluster), two_turns(cluster)
    cluster.nothing_is_held(pair.prefill)
    killed, survivor = (pair.decode, pair.prefill)[:: 1 if victim == "decode" else -1]
    sends, takes = {
        "in the read": (pair.decode, pair.prefill),
        "while decode pulls": (pair.prefill, pair.decode),
    }.get(step, (None, None))
    if step == "between the turns":
        pair.crash(killed)
        with kills.Kill(cluster, killed, one) as kill:
            pass
    else:
        role = "prefill" if "read" in step else "decode"
        with contextlib.ExitStack() as alone, cluster.book.fault(role, proxy.HOLD, one, 1) as fault:
            # The engine that keeps the answer is to decode, too.
            alone.enter_context(router.draining("d1"))
            with kills.Kill(cluster, killed, one) as kill:
                kills.strike_at(kill, fault, step, sends, takes, reached=alone.close)
        assert offers(router, kill.outcome.request_id), "a leg was to read"
    assert kill.outcome.done, "another engine answers"
    cluster.nothing_is_held(survivor, decode, patience_s=kills.LEASE_S)
    pair.again(killed)
    cluster.all_up()
    # What the engine that was killed had pinned, or what it had, is read no more; later pins are.
    for history in (one, other):
        reply = ask(router, history)
        log_probabilities.assert_exact(reply, ask_cold(router, history))
        history = history + reply.ids + prompts.token_ids(20)
        log_probabilities.assert_exact(ask(router, history, 12), ask_cold(router, history, 12))
    cluster.nothing_is_held(pair.prefill, decode, patience_s=kills.LEASE_S)
    assert cluster.book.sent_twice() == []
