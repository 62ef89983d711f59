"""Tokenizers of the three families, trained small by Hugging Face's library, which is passed in."""

from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = ("gpt2", "gpt2-space", "llama3", "llama3-whole", "qwen2", "removed", "added", "digits", "nfkc")


def pretokenizer(hf: Any, name: str) -> Any:
    pre = hf.pre_tokenizers
    if name in ("gpt2", "added"):
        return pre.ByteLevel(add_prefix_space=False)
    if name == "gpt2-space":
        return pre.ByteLevel(add_prefix_space=True)
    if name == "digits":
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    regex = CL100K % ("1" if name == "qwen2" else "1,3")
    split = pre.Split(
        hf.Regex(regex), behavior="removed" if name == "removed" else "isolated", invert=name == "removed"
    )
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def make(hf: Any, name: str, texts: list[str], vocab_size: int) -> Any:
    tokenizer = hf.Tokenizer(hf.models.BPE(ignore_merges=name == "llama3-whole"))
    tokenizer.pre_tokenizer = pretokenizer(hf, name)
    tokenizer.decoder = hf.decoders.ByteLevel()
    if name in ("qwen2", "added"):
        tokenizer.normalizer = hf.normalizers.NFC()
    elif name == "nfkc":
        tokenizer.normalizer = hf.normalizers.NFKC()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if name == "added":
        tokenizer.add_tokens(
            [
                hf.AddedToken("e\u0301", normalized=True),
                hf.AddedToken("[MASK]", lstrip=True, normalized=False),
                hf.AddedToken("</s>", rstrip=True, normalized=False),
                hf.AddedToken("world", single_word=True),
                hf.AddedToken("  ", normalized=False),
            ]
        )
    return tokenizer
