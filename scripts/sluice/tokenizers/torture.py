"""Strings that are hard on tokenizers, from a seed: the same on every machine."""

import random

TEXT = (
    "the In beginning don't I'LL we'RE it's ſtrange 'S 'ſ naïve café Straße ΑΒΓ σς привет мир İstanbul ß ﬁ ǅ 你好 世界 "
    "日本語 テスト かな 한국어 각 สวัสดี नमस्ते ক্ষ עִבְרִית العربية 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ e\u0301 o\u0308\u0323 A\u030a ½ ² Ⅷ ٣٤٥ १२ "
    "12345678 3.14 x=1; def f(): return None #!/bin/sh http://a.b/c?d=e&f \\n \\t <|endoftext|> <|im_start|> </s> [MASK]"
)
WORDS = TEXT.split(" ")
SPACES = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u2009",
    "\u180e",
    "\u200b",
    "\u200d",
    "\x85",
    "\x1c",
    "\x00",
    "\ufeff",
]
PUNCTUATION = list("!?.,:;'\"`~@#$%^&*()-_=+[]{}|\\/<>") + [
    "…",
    "—",
    "«",
    "»",
    "。",
    "、",
    "！",
    "’",
    "€",
    "№",
    "→",
    "∑",
]
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0x0EFF), (0x1100, 0x11FF),
          (0x1E00, 0x1FFF), (0x2000, 0x2BFF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFDFF), (0xFE00, 0xFFEF),
          (0x1D100, 0x1D1FF), (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF)]  # fmt: skip


def any_character(random_: random.Random) -> str:
    while True:
        code = (
            random_.randrange(0x110000)
            if random_.random() < 0.1
            else random_.randint(*random_.choice(RANGES))
        )
        if not 0xD800 <= code <= 0xDFFF:
            return chr(code)


def part(random_: random.Random) -> str:
    kind = random_.random()
    if kind < 0.35:
        return random_.choice(WORDS)
    if kind < 0.6:
        return random_.choice(SPACES) * (
            random_.choice([1, 1, 2, 3, 17, 90]) if random_.random() < 0.3 else 1
        )
    if kind < 0.75:
        return random_.choice(PUNCTUATION) * random_.choice([1, 1, 1, 2, 5])
    if kind < 0.85:
        return "".join(chr(random_.randint(0x300, 0x36F)) for _ in range(random_.randint(1, 5)))
    return "".join(any_character(random_) for _ in range(random_.randint(1, 6)))


def strings(count: int, seed: int = 1) -> list[str]:
    random_ = random.Random(seed)
    texts = [
        "",
        " ",
        "\n",
        "a",
        "é",
        "e\u0301",
        "\U0010ffff",
        " " * 1000,
        "a" * 5000,
        "ab" * 3000 + "\n" * 700,
        "\u0301" * 50,
    ]
    while len(texts) < count:
        texts.append("".join(part(random_) for _ in range(random_.choice([1, 2, 3, 5, 8, 20]))))
    return texts[:count]
