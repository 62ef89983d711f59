"""Unicode normalisation forms of every character, behind a letter and before a mark that orders and combines."""

from typing import Any

NAMES = ("NFC", "NFD", "NFKC", "NFKD")


def texts() -> list[str]:
    """By planes, so that no text is long."""
    return [
        "".join(f"a{chr(c)}\u0323" for c in range(first, first + 0x10000) if not 0xD800 <= c < 0xE000)
        for first in range(0, 0x110000, 0x10000)
    ]


def normal(hf: Any, name: str) -> list[str]:
    normalizer = getattr(hf.normalizers, name)()
    return [normalizer.normalize_str(text) for text in texts()]


def checksum(results: list[str]) -> str:
    """Modulo 2^64: the sum so far times 31, plus the character."""
    total = 0
    for text in results:
        for c in text:
            total = (total * 31 + ord(c)) & (2**64 - 1)
    return f"{total:016x}"


def tokenizer(hf: Any, name: str) -> Any:
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    made = hf.Tokenizer(hf.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.normalizer = getattr(hf.normalizers, name)()
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made
