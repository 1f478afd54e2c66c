"""The comparison of log-probabilities: wrong KV shows in them, even if the text is the same.

Hand-offs are spoilt between the engines, past the router, which never sends such. The prompts have
salts of their own: the decode engine keeps what it fetches as if it were right.
"""

import secrets

import pytest

from support import log_probabilities, prompts
from support.engine import BLOCK_SIZE

PATH = "/v1/completions"
MAX_TOKENS = 12
# What the tiny model says after a text hardly depends on its beginning.
PROMPTS = {"ids": lambda: prompts.token_ids(320), "text": lambda: prompts.text(repeat=12)}


def ask(engine, prompt, max_tokens=MAX_TOKENS, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "cache_salt": secrets.token_hex(8), **log_probabilities.COMPLETION, **more}
    reply = engine.post(PATH, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def hand_off(prefill, prompt):
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return ask(prefill, prompt, max_tokens=1, kv_transfer_params=params)["kv_transfer_params"]


def shifted(params):
    """Its blocks, each in the place of the one before it."""
    (ids,) = params["remote_block_ids"]
    return {**params, "remote_block_ids": [ids[1:] + ids[:1]]}


def steps(reply):
    return log_probabilities.steps(reply["choices"][0]["logprobs"])


def test_a_right_hand_off_differs_by_nothing(prefill, decode):
    for prompt in (make() for make in PROMPTS.values()):
        cold = steps(ask(decode, prompt))
        fetched = ask(decode, prompt, kv_transfer_params=hand_off(prefill, prompt))
        assert fetched["usage"]["completion_tokens"] == len(cold) == MAX_TOKENS
        assert log_probabilities.difference(steps(fetched), cold) <= log_probabilities.TOLERANCE


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("wrong", ["a block further", "another prompt"])
def test_wrong_blocks_are_seen(prefill, decode, kind, wrong):
    prompt = PROMPTS[kind]()
    tokens = len(decode.tokenize(prompt=prompt)) if isinstance(prompt, str) else len(prompt)
    assert tokens > 4 * BLOCK_SIZE
    reference = ask(decode, prompt)
    if wrong == "a block further":
        params = shifted(hand_off(prefill, prompt))
    else:
        other = prompts.token_ids(tokens)
        params = hand_off(prefill, other)
    spoilt = ask(decode, prompt, kv_transfer_params=params)
    apart = log_probabilities.difference(steps(spoilt), steps(reference))
    texts = {reply["choices"][0]["text"] for reply in (spoilt, reference)}
    # Printed for the reader: how often the texts would have said nothing.
    print(f"{kind}, {wrong}: differs by {apart}, {len(texts)} texts")
    assert apart > 100 * log_probabilities.TOLERANCE
