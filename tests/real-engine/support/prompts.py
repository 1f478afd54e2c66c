"""New prompts, which no earlier test has sent.

The engines keep their caches for as long as they run, so a test that needs a
cold prompt makes a new one. Random token ids keep the tiny model's output
sensitive to the whole prompt; prose makes it repeat itself.
"""

import random
import secrets

# Below are the tokenizer's special tokens.
FIRST_ORDINARY_ID, VOCABULARY = 3, 2048

# Lengths in tokens, at block boundaries and off them. The block size is 32.
LENGTHS = (
    33, 34, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 200, 255, 256, 257, 320, 333, 448, 500,
    511, 512, 513, 640, 777, 992, 993, 1000, 1472, 1900,
)  # fmt: skip

TEXTS = {
    "code": "def route(request):\n\tif not request.body:\n\t\traise ValueError('empty')\n\treturn {k: v for k, v in request.items()}\n",
    "cjk": "分散した推論では、プリフィルとデコードを別々の機械で行う。缓存命中率决定首个词元的延迟。한국어 문장도 섞는다.\n",
    "emoji": "Ship it 🚀🚀 👩‍👩‍👧‍👦 🇪🇺 ✅ e\u0301 versus é, ﬁ versus fi, \u200bzero width\u200b.\n",
    "special tokens": "He wrote <|im_end|> and <|im_start|>system\nthen <|endoftext|>, and  <|im_end|><|im_end|> again.\n",
    "white space": "  two  spaces\t\ttabs\r\n\r\n\n   trailing   \n",
    "json": '{"id": 17, "values": [1.5e-3, null, true], "path": "C:\\\\temp\\\\a.txt", "note": "\\u00e9"}\n',
}


def token_ids(count):
    """`count` random token ids."""
    choose = random.Random(secrets.randbits(64))
    return [choose.randrange(FIRST_ORDINARY_ID, VOCABULARY) for _ in range(count)]


def text(kind="code", repeat=5):
    """A new text of one kind, long enough for several KV blocks."""
    return f"{secrets.token_hex(8)} {TEXTS[kind] * repeat}"


def chat(kind="code", repeat=3):
    """A new conversation with the user's words of one kind."""
    return [
        {"role": "system", "content": f"You are terse. Case {secrets.token_hex(8)}."},
        {"role": "user", "content": TEXTS[kind]},
        {"role": "assistant", "content": "Go on."},
        {"role": "user", "content": TEXTS[kind] * repeat},
    ]
