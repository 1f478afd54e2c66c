"""A P/D reply is the reply of one engine on its own, token for token and log-probability for
log-probability.

The engine's greedy output is the same cold or warm, alone or beside others, on
either engine, so any difference is a fault of the hand-off. The lone answer gets
a salt of its own: without it, it would reuse the very blocks that are in question.
"""

import concurrent.futures

import pytest

from support import prompts
from support.log_probabilities import assert_exact, cold

MAX_TOKENS = 12


def alone(ask, prompt):
    return cold(ask, prompt, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt_tokens", [20, 33, 64, 65, 500, 1500])
def test_token_ids(router, prompt_tokens, stream):
    prompt = prompts.token_ids(prompt_tokens)
    expected = alone(router.complete, prompt)
    for _ in ("cold", "warm"):
        answer = router.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
        assert_exact(answer, expected)
        assert answer.text == expected.text
        assert answer.finish_reasons == expected.finish_reasons == {0: "length"}
        assert answer.usage.completion_tokens == expected.usage.completion_tokens == MAX_TOKENS


@pytest.mark.parametrize("kind", sorted(prompts.TEXTS))
def test_text_and_chat(router, kind):
    for ask, prompt, stream in [
        (router.complete, prompts.text(kind), False),
        (router.chat, prompts.chat(kind), True),
    ]:
        expected = alone(ask, prompt)
        answer = ask(prompt, max_tokens=MAX_TOKENS, stream=stream)
        assert_exact(answer, expected)
        assert answer.text == expected.text


def test_a_conversation_that_grows(router):
    messages = prompts.chat()
    for _ in range(3):
        answer = router.chat(messages, max_tokens=MAX_TOKENS)
        assert_exact(answer, alone(router.chat, messages))
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": prompts.text(repeat=1)},
        ]


def test_many_at_once(router):
    batch = [prompts.token_ids(count) for count in (40, 64, 100, 200, 300, 400, 65, 500)]
    expected = [alone(router.complete, prompt) for prompt in batch]
    with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
        answers = pool.map(lambda p: router.complete(p, max_tokens=MAX_TOKENS), batch)
        for answer, reference in zip(answers, expected):
            assert_exact(answer, reference)
