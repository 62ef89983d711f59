"""Regular expressions as Oniguruma reads them: what each class of characters holds, quantifiers, options, and random ones."""

import random
from collections.abc import Callable
from typing import Any

CATEGORIES = "L Lu Ll Lt Lm Lo M Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf Co"
SCRIPTS = (
    "Han Hiragana Katakana Hangul Bopomofo Latin Greek Cyrillic Armenian Georgian Hebrew Arabic Devanagari Bengali "
    "Tamil Telugu Kannada Malayalam Thai Lao Myanmar Ethiopic Khmer Tibetan"
)
CLASSES = [rf"\p{{{name}}}" for name in f"{CATEGORIES} {SCRIPTS}".split()] + [
    *(
        r"\s",
        r"\d",
        r"\w",
        r"\W",
        r"[\w]",
        r"[^\w]",
        r"[\s\d]",
        r"[^\s\p{L}\p{N}]",
        r"[\p{P}\p{S}]",
        r"\P{P}",
        r".",
    ),
    *(r"(?i:\p{Lu})", r"(?i:\w)", r"(?i:\s)", r"(?i:\P{L})", "(?i:k)", "(?i:s)", "(?i:[a-z])", "(?i:[^s])"),
]
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)
CASES = [
    (CL100K, "12345 678 I'LL go\n\n  x1234567 \n"),
    *(("a" + repeat, "aaaaaaab") for repeat in ("{1,3}+", "{2}+", "{2}?", "{,2}", "{2}{3}", "{1,2}?", "{2}?+", "{1,2}++")),
    *(("a" + repeat + "b", "aabb ab b aaab") for repeat in ("{2}?", "{2}??", "{2,2}?", "{,2}?", "{1,2}+", "{0,1}+", "?+")),
    *(("a" + brace, "aa{,} a{x a{ 1,2} a{") for brace in ("{,}", "{x", "{ 1,2}", "{")),
    ("[ab]{2}+", "ababa"),
    ("(?:a|b){2}?", "abab"),
    ("(?:a|ab){1,2}+b", "aabb abb"),
    ("a(?i)b|c", "abc aBC ABab cC CD"),
    ("(a(?i)b|c)d", "aBd Cd ABd CD cD"),
    ("a(?i)b(?-i)c|d", "abc aBc ABc aBC D aD ad aBd"),
    ("(?:a|(?i)b|c)d", "Ad BD CD ad bD"),
    ("(?i)(?:a(?-i)b|c)d", "Abd ABD ACD AcD CD"),
    ("(?i)'re|'ll", "'RE 'lL"),
    ("(?i:s)s", "\u00df ss Ss"),
    (r"\s++$", "a \n"),
    (r"^a|a$", "a\na\naa\nb"),
    ("a.", "a\r a\u2028 a\n a\x0b"),
]  # fmt: skip


def characters() -> str:
    """All, in order."""
    return "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def matches(hf: Any, regex: str, text: str) -> list[str]:
    split = hf.pre_tokenizers.Split(hf.Regex(regex), "removed", invert=True)
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def tokenizer(hf: Any, regex: str, behavior: str) -> Any:
    """Of bytes alone. Every piece begins with a space, so that ids show where text was cut."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    made = hf.Tokenizer(hf.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = hf.pre_tokenizers.Sequence(
        [
            hf.pre_tokenizers.Split(hf.Regex(regex), behavior),
            hf.pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def random_regex(random_: random.Random, depth: int = 0) -> str:
    kind = random_.random()
    if depth > 3 or kind < 0.4:
        return random_.choice(
            [
                "a",
                "b",
                "c",
                "B",
                ".",
                "[ab]",
                "[^a]",
                "[B-D]",
                r"\p{L}",
                r"\d",
                r"\s",
                "1",
                r"\P{L}",
                "{",
                "-",
            ]
        )
    inner = random_regex(random_, depth + 1)
    if kind < 0.6:
        repeat = [
            "*",
            "+",
            "?",
            "{2}",
            "{1,2}",
            "{,2}",
            "{2,}",
            "*?",
            "+?",
            "??",
            "*+",
            "++",
            "?+",
            "{2}?",
            "{1,2}+",
            "{1,3}?",
        ]
        return f"(?:{inner}){random_.choice(repeat)}" if len(inner) > 1 else inner + random_.choice(repeat)
    other = random_regex(random_, depth + 1)
    if kind < 0.75:
        return inner + other
    if kind < 0.85:
        return f"(?:{inner}|{other})"
    return (
        random_.choice(["(?i)", "(?i:{})", "(?-i)", "(?={})", "(?!{})", "(?>{})", "({})", "{}|"]).replace(
            "{}", inner
        )
        + other
    )


def random_cases(count: int) -> list[tuple[str, list[str]]]:
    random_ = random.Random(11)
    texts = [
        "".join(random_.choice("aAbBcCdD12-{\n\u00e9\u0e01") for _ in range(random_.randint(1, 12)))
        for _ in range(50)
    ]
    return [(random_regex(random_), texts) for _ in range(count)]


def check(
    hf: Any,
    encode: Callable[[Any, list[str]], list[Any] | None],
    compare: Callable[[str, str, list[Any], list[Any], list[Any]], int],
) -> int:
    """encode: the ids of Sluice, None where it refuses the expression."""
    wrong = 0
    everything = characters()
    for regex in CLASSES:
        made = tokenizer(hf, regex, "removed")
        theirs = made.encode(everything, add_special_tokens=False).ids
        ours = (encode(made, [everything]) or [None])[0]
        wrong += compare(f"class {regex}", "ids of all characters", [regex], [ours == theirs], [True])
    known, kept, refused, random_ = [(r, [t]) for r, t in CASES], 0, 0, random_cases(600)
    names: list[str] = []
    same: list[bool] = []
    for regex, texts in known + random_:
        try:
            made = tokenizer(hf, regex, "isolated")
        except Exception:  # noqa: BLE001, S112
            continue
        kept += 1
        ids = encode(made, texts)
        refused += ids is None
        if ids is not None or (regex, texts) in known:
            names.append(regex)
            same.append(ids == [e.ids for e in made.encode_batch(texts, add_special_tokens=False)])
    print(f"patterns: {kept} valid there, {refused} of them refused here", flush=True)
    return wrong + compare("patterns", "pieces", names, same, [True] * len(names))


def goldens(hf: Any) -> dict[str, Any]:
    """How many characters each class has, and the sum of their numbers; the matches of each case."""
    everything = characters()
    classes = {}
    for regex in CLASSES:
        members = [ord(c) for match in matches(hf, regex, everything) for c in match]
        classes[regex] = [len(members), sum(members)]
    return {
        "classes": classes,
        "cases": [[regex, text, matches(hf, regex, text)] for regex, text in CASES],
    }
