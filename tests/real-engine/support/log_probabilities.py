"""Whether a reply comes from the right KV: its log-probabilities say so, its text may not.

The tiny model often says the same with wrong KV. Over a hand-off with blocks in the wrong order or of
another prompt, the greedy tokens may agree while their log-probabilities differ by 2 to 10. Replies
therefore carry the log-probabilities of the likeliest tokens of each step, and are compared with those
of a cold reference: the same prompt under a salt that nobody has used, which one engine computes whole.

`/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/inference/v1/generate` offer
log-probabilities. `/v1/messages` has none: there, texts are compared, beside a chat with the same tokens.
"""

import math
import secrets
import typing

# The most that every endpoint gives without flags of the engine.
TOP = 5

# Engines compute in float32. How many tokens a step computes at once decides how its sums are
# grouped: warm and cold, alone and beside others, the last bits differ now and then, by up to 0.00003.
TOLERANCE = 0.001

# What asks for the log-probabilities, by path. Names of tokens are ids, since texts of tokens repeat.
_BY_ID = {"return_tokens_as_token_ids": True}
COMPLETION = {"logprobs": TOP, **_BY_ID}
CHAT = {"logprobs": True, "top_logprobs": TOP, **_BY_ID}
RESPONSE = {"include": ["message.output_text.logprobs"], "top_logprobs": TOP}
# For `sampling_params` of `/inference/v1/generate`.
GENERATE = {"logprobs": TOP}


class Step(typing.NamedTuple):
    """One generated token, and the log-probabilities of the likeliest ones by token."""

    token: object
    likely: dict


def _named(entry):
    return entry["token_id"] if "token_id" in entry else entry["token"]


def _likely(pairs):
    # Texts of tokens, where an endpoint has no ids, may repeat: the likeliest counts.
    likely = {}
    for token, logprob in pairs:
        likely[token] = max(logprob, likely.get(token, -math.inf))
    return likely


def steps(logprobs):
    """The steps that `logprobs` of a choice or chunk has, in the shape of any endpoint."""
    if not logprobs:
        return []
    if "tokens" in logprobs:
        zipped = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        return [Step(token, dict(likely)) for token, likely in zipped]
    content = logprobs if isinstance(logprobs, list) else logprobs["content"]
    return [
        Step(_named(entry), _likely((_named(top), top["logprob"]) for top in entry["top_logprobs"]))
        for entry in content or []
    ]


def _apart(one, other):
    if one.token != other.token:
        return math.inf
    # What is not among the likeliest is at most as likely as the last of them.
    lowest = min(one.likely.values()), min(other.likely.values())
    return max(
        abs(one.likely.get(token, lowest[0]) - other.likely.get(token, lowest[1]))
        for token in one.likely.keys() | other.likely.keys()
    )


def difference(seen, cold):
    """By how much the log-probabilities of two lists of steps differ at most.

    Infinite if their tokens differ. The shorter list counts, so that a reply which broke off can be
    compared with a whole one.
    """
    return max((_apart(*pair) for pair in zip(seen, cold)), default=0.0)


def assert_exact(seen, cold, whole=True):
    """Two answers come from equal KV; with `whole=False`, the first is a beginning of the second."""
    seen, cold = (answer if isinstance(answer, dict) else answer.steps for answer in (seen, cold))
    assert sorted(seen) == sorted(cold), "the answers have other choices"
    for index, its in seen.items():
        assert len(its) == len(cold[index]) or (not whole and len(its) < len(cold[index]))
        assert its or not whole, "a reply without log-probabilities proves nothing"
        apart = difference(its, cold[index])
        assert apart <= TOLERANCE, f"the log-probabilities of choice {index} differ by {apart}"


def cold(ask, prompt, model="tiny-aggregated", **kwargs):
    """The reference: one engine's own answer, to which no cached block contributes."""
    body = {**kwargs.pop("extra_body", {}), "cache_salt": secrets.token_hex(8)}
    answer = ask(prompt, model=model, extra_body=body, **kwargs)
    # Of several samples, the others find what the first one has computed.
    assert len(answer.steps) > 1 or answer.cached_tokens == 0, "the reference was not cold"
    return answer
