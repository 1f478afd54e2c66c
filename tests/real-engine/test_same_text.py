"""A P/D answer is, text for text, the answer of one engine on its own.

The engine's greedy output is the same cold or warm, alone or beside others, on
either engine, so any difference is a fault of the hand-off. The lone answer gets
a salt of its own: without it, it would reuse the very blocks that are in question.
"""

import concurrent.futures
import secrets

import pytest

from support import prompts

MAX_TOKENS = 12


def alone(ask, prompt):
    return ask(
        prompt,
        model="tiny-aggregated",
        max_tokens=MAX_TOKENS,
        extra_body={"cache_salt": secrets.token_hex(8)},
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt_tokens", [20, 33, 64, 65, 500, 1500])
def test_token_ids(router, prompt_tokens, stream):
    prompt = prompts.token_ids(prompt_tokens)
    expected = alone(router.complete, prompt)
    for state in ("cold", "warm"):
        answer = router.complete(prompt, max_tokens=MAX_TOKENS, stream=stream)
        assert answer.text == expected.text, state
        assert answer.finish_reasons == expected.finish_reasons == {0: "length"}
        assert answer.usage.completion_tokens == expected.usage.completion_tokens == MAX_TOKENS


@pytest.mark.parametrize("kind", sorted(prompts.TEXTS))
def test_text_and_chat(router, kind):
    prompt, messages = prompts.text(kind), prompts.chat(kind)
    expected = alone(router.complete, prompt).text
    assert router.complete(prompt, max_tokens=MAX_TOKENS).text == expected
    expected = alone(router.chat, messages).text
    assert router.chat(messages, max_tokens=MAX_TOKENS, stream=True).text == expected


def test_a_conversation_that_grows(router):
    messages = prompts.chat()
    for _ in range(3):
        answer = router.chat(messages, max_tokens=MAX_TOKENS)
        assert answer.text == alone(router.chat, messages).text
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": prompts.text(repeat=1)},
        ]


def test_many_at_once(router):
    batch = [prompts.token_ids(count) for count in (40, 64, 100, 200, 300, 400, 65, 500)]
    expected = [alone(router.complete, prompt).text for prompt in batch]
    with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
        answers = pool.map(lambda p: router.complete(p, max_tokens=MAX_TOKENS), batch)
        assert [answer.text for answer in answers] == expected
