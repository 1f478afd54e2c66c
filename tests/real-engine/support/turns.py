"""Conversations of several turns, by token ids and as chats.

What is said is a list of lists of token ids: questions and answers by turns.
"""

import functools
import json
import os
import pathlib
import random

from . import prompts
from .engine import BLOCK_SIZE

# What an engine would read or take below this, it computes instead.
TAKEN_MIN = 64


def whole(tokens):
    """Tokens in the whole blocks of so many tokens."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def common(one, other):
    """How many leading tokens two prompts share."""
    pairs = enumerate(zip(one, other))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def said_by(answer):
    """The token ids of an answer, by the names of its log-probabilities."""
    (steps,) = answer.steps.values()
    return [int(step.token.removeprefix("token_id:")) for step in steps]


class ByIds:
    """The client keeps token ids."""

    tokens = staticmethod(prompts.token_ids)

    def __init__(self, router, engine):
        self._router = router

    def prompt(self, said):
        """The token ids of the prompt that asks the last question."""
        return [token for part in said for token in part]

    def ask(self, said, **kwargs):
        return self._router.complete(self.prompt(said), **kwargs)


class ByChat:
    """The client keeps messages, as most do. What is said is of tokens whose text, wherever it stands, is
    tokenised as these tokens.
    """

    def __init__(self, router, engine):
        self._router, self._engine = router, engine

    @staticmethod
    def tokens(count):
        choose = random.Random()
        return choose.choices(list(words()), k=count)

    def prompt(self, said):
        return self._engine.tokenize(messages=self._messages(said))

    def ask(self, said, extra_body=None, **kwargs):
        body = {"allowed_token_ids": list(words()), **(extra_body or {})}
        return self._router.chat(self._messages(said), extra_body=body, **kwargs)

    def _messages(self, said):
        roles = ("user", "assistant")
        texts = ("".join(words()[token] for token in part) for part in said)
        return [
            {"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)
        ]


@functools.cache
def words():
    """The tokens that are whole words after a space, with their texts."""
    path = pathlib.Path(os.environ["SPLITRAIL_MODEL_PATH"]) / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    # The tokenizer writes a space as this letter.
    texts = {token: text.replace("\u0120", " ") for text, token in vocabulary.items()}
    return {
        token: text
        for token, text in texts.items()
        if text[0] == " " and text[1:].isascii() and text[1:].isalpha()
    }


class Account:
    """What a prefill engine holds and what decode keeps pinned, by the turns so far."""

    def __init__(self):
        self._held, self._pinned = [], []

    def expect(self, prompt, reads_back=True):
        """The tokens that prefill has in its own cache and those that it reads back."""
        most = len(prompt) - 1
        shared = [[whole(min(common(prompt, its), most)) for its in known]
                  for known in (self._held, self._pinned)]
        held, kept = (max(tokens, default=0) for tokens in shared)
        read = kept - held if reads_back and kept - held >= TAKEN_MIN else 0
        if read:
            del self._pinned[shared[1].index(kept)]
        return held, read

    def answered(self, prompt, answer):
        self._held.append(prompt)
        # The last token of an answer has no KV.
        self._pinned.append(prompt + answer[:-1])
