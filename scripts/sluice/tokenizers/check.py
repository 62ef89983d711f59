"""Byte-level BPE against Hugging Face's `tokenizers`: ids, decoding, training and speed."""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..program import ROOT as CHECKOUT
from . import families, forms, patterns, torture

ROOT = Path(CHECKOUT)
GOLDEN = ROOT / "tests/golden/tokenizers"


def library(folder: Path) -> Any:
    """tokenizers, installed into a folder outside the tree where it is not there."""
    if not (folder / "tokenizers").is_dir():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--target",
                str(folder),
                "tokenizers",
                "sentencepiece",
            ],
            check=True,
        )
    sys.path.insert(0, str(folder))
    return importlib.import_module("tokenizers")


def lines(binary: str, arguments: list[str], values: list[Any]) -> list[Any]:
    given = "".join(json.dumps(value) + "\n" for value in values)
    done = subprocess.run(
        [binary, "tokenizer", *arguments], input=given, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"sluice tokenizer {' '.join(arguments)}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def compare(name: str, what: str, texts: list[Any], ours: list[Any], theirs: list[Any]) -> int:
    different = [i for i in range(len(texts)) if i >= len(ours) or ours[i] != theirs[i]]
    print(f"{name}: {what}: {len(texts)} compared, {len(different)} different", flush=True)
    for i in different[:3]:
        print(f"  {texts[i]!r:.300}\n    ours   {ours[i]!s:.300}\n    theirs {theirs[i]!s:.300}")
    return len(different)


def training_text(path: Path | None, count: int) -> list[str]:
    texts = torture.strings(count, seed=7)
    if path:
        texts += path.read_text(encoding="utf-8", errors="ignore")[:4_000_000].split("\n")
    return texts


def check_family(
    hf: Any, binary: str, name: str, folder: Path, texts: list[str], source: list[str], vocab_size: int
) -> int:
    tokenizer = families.make(hf, name, source, vocab_size)
    file = folder / f"{name}.json"
    tokenizer.save(str(file))
    special = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    wrong = compare(
        name, "ids", texts, lines(binary, ["encode", "--special", "--tokenizer", str(file)], texts), special
    )
    tokenizer.encode_special_tokens = True
    plain = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    wrong += compare(
        name,
        "ids, special tokens as text",
        texts,
        lines(binary, ["encode", "--tokenizer", str(file)], texts),
        plain,
    )
    decoded = lines(binary, ["decode", "--tokenizer", str(file)], special)
    return wrong + compare(name, "decoding", special, decoded, tokenizer.decode_batch(special))


def check_training(hf: Any, binary: str, folder: Path, source: list[str], vocab_size: int) -> int:
    """The same merges as Hugging Face's trainer, and its library loads the file."""
    text = folder / "training.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in source), encoding="utf-8")
    wrong = 0
    for name, extra in (("gpt2", []), ("llama3", []), ("qwen2", ["--nfc"])):
        file = folder / f"trained-{name}.json"
        command = [
            binary,
            "tokenizer",
            "train",
            str(text),
            "-o",
            str(file),
            "--force",
            "--vocab-size",
            str(vocab_size),
            "--pretokenizer",
            name,
        ]
        command += [
            *extra,
            "--min-frequency",
            "1",
            "--special-token",
            "<|endoftext|>",
            "--special-token",
            "<|im_start|>",
        ]
        subprocess.run(command, check=True, capture_output=True)
        ours = json.loads(hf.Tokenizer.from_file(str(file)).to_str())["model"]
        theirs = json.loads(families.make(hf, name, source, vocab_size).to_str())["model"]
        wrong += compare(f"training {name}", "merges", theirs["merges"], ours["merges"], theirs["merges"])
    return wrong


def check_patterns(hf: Any, binary: str, folder: Path) -> int:
    file = folder / "pattern.json"

    def encode(tokenizer: Any, texts: list[str]) -> list[Any] | None:
        tokenizer.save(str(file))
        given = "".join(json.dumps(text) + "\n" for text in texts)
        command = [binary, "tokenizer", "encode", "--tokenizer", str(file)]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else None

    return patterns.check(hf, encode, compare)


def check_forms(hf: Any, binary: str, folder: Path) -> int:
    wrong = 0
    for name in forms.NAMES:
        file, tokenizer, texts = folder / f"{name}.json", forms.tokenizer(hf, name), forms.texts()
        tokenizer.save(str(file))
        ours = lines(binary, ["encode", "--tokenizer", str(file)], texts)
        theirs = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        wrong += compare(name, "ids of all characters, by planes", list(range(len(texts))), ours, theirs)
    return wrong


def best(run: Callable[[], Any], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def speed(hf: Any, binary: str, folder: Path, path: Path) -> None:
    """MB/s of the same documents, one after the other in the same minute, each library on all cores."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    parts = text.split("\n")
    documents = ["\n".join(parts[i : i + 200]) for i in range(0, len(parts), 200)]
    file, data = folder / "llama3.json", folder / "speed.jsonl"
    data.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    megabytes = len(text.encode()) / 1e6
    tokenizer = hf.Tokenizer.from_file(str(file))
    sentencepiece = importlib.import_module("sentencepiece")
    model = folder / "speed.model"
    sentencepiece.SentencePieceTrainer.Train(
        f"--input={path} --model_prefix={folder / 'speed'} --vocab_size=2000 --model_type=bpe --minloglevel=2 --input_sentence_size=20000"
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    out = str(folder / "speed")

    def ours() -> None:
        command = [binary, "tokenize", str(data), "-o", out, "--force", "--tokenizer", str(file)]
        subprocess.run(command, check=True, capture_output=True)

    rates = {
        "sluice tokenize (reads JSONL, writes token files, start included)": megabytes / best(ours),
        "tokenizers, encode_batch_fast": megabytes
        / best(lambda: tokenizer.encode_batch_fast(documents, add_special_tokens=False)),
        "SentencePiece, encode": megabytes / best(lambda: processor.encode(documents, num_threads=2)),
    }
    first = next(iter(rates.values()))
    for name, rate in rates.items():
        print(f"speed: {name}: {rate:.1f} MB/s (sluice is {first / rate:.2f} times as fast)")


def write_goldens(hf: Any) -> None:
    """Small tokenizers, and the ids of 40 strings; what special tokens as text and decoding give only where it differs."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    texts = [t for t in torture.strings(400, seed=3) if len(t) < 40][:40]
    cases: dict[str, Any] = {"texts": texts, "families": {}}
    for name in families.NAMES:
        tokenizer = families.make(hf, name, torture.strings(300, seed=5), 320)
        tokenizer.save(str(GOLDEN / f"{name}.json"), pretty=False)
        special = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        decoded = tokenizer.decode_batch(special)
        tokenizer.encode_special_tokens = True
        plain = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        cases["families"][name] = {
            "special": special,
            "plain": {i: p for i, p in enumerate(plain) if p != special[i]},
            "decoded": {i: d for i, d in enumerate(decoded) if d != texts[i]},
        }
    checksums = {name: forms.checksum(forms.normal(hf, name)) for name in forms.NAMES}
    for name, value in (("cases", cases), ("patterns", patterns.goldens(hf)), ("forms", checksums)):
        (GOLDEN / f"{name}.json").write_text(
            json.dumps(value, separators=(",", ":")) + "\n", encoding="ascii"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/check_tokenizers", description=__doc__)
    parser.add_argument("--binary", default=str(ROOT / "build/sluice"))
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home() / ".cache/sluice-tokenizers",
        help="for the libraries and files",
    )
    parser.add_argument("--text", type=Path, help="a text, UTF-8, to train on and to measure the speed with")
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--speed", action="store_true", help="the speed alone")
    parser.add_argument("--goldens", action="store_true", help=f"writes {GOLDEN.relative_to(ROOT)} instead")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    hf = library(options.folder / "site")
    if options.goldens:
        write_goldens(hf)
        return 0
    wrong = 0
    if not options.speed:
        source, texts = training_text(options.text, 20_000), torture.strings(options.strings)
        for name in families.NAMES:
            wrong += check_family(hf, options.binary, name, options.folder, texts, source, options.vocab_size)
        wrong += check_patterns(hf, options.binary, options.folder)
        wrong += check_forms(hf, options.binary, options.folder)
        wrong += check_training(hf, options.binary, options.folder, source, options.vocab_size)
    if options.text:
        if options.speed:
            families.make(hf, "llama3", training_text(options.text, 1000), options.vocab_size).save(
                str(options.folder / "llama3.json")
            )
        speed(hf, options.binary, options.folder, options.text)
    print("all equal" if wrong == 0 else f"{wrong} different")
    return int(wrong > 0)
