"""Prepares a text for training: one twentieth of it is held out for validation.

  scripts/split_text FILE FOLDER      writes FOLDER/train.txt and FOLDER/validation.txt
  scripts/split_text --name FILE      prints a name for the text: its file's name and the beginning of its contents' SHA-256

The text is cut into blocks, at ends of lines where there are some, else between words or characters; every twentieth block is
held out, so that no byte is in both files. A name has letters, digits, `.`, `_` and `-` only; an edited file has another one.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO

PARTS = 20  # of these blocks, the last one is held out
LARGEST_BLOCK = 4096  # bytes, before the cut is moved to the end of a line
LEAST = 20_000  # bytes: half a block of them is more than one sequence of the quickstart configurations, 257 bytes
LONGEST_NAME = 40  # letters


def stop(code: int, message: str) -> None:
    # The name of a file may hold anything, a newline too.
    print("split_text: " + message.encode("unicode_escape").decode(), file=sys.stderr)
    sys.exit(code)


def name_of(path: str) -> str:
    """book-1a2b3c4d5e6f of any/folder/book.txt."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    readable = os.fsencode(os.path.basename(path)).decode("utf-8", "replace")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", os.path.splitext(readable)[0])[:LONGEST_NAME].strip("._-")
    return f"{readable or 'text'}-{digest.hexdigest()[:12]}"


def place_to_cut(block: bytes) -> int:
    """In the second half of the block behind the last newline, else behind the last space, else before an incomplete UTF-8
    character."""
    for mark in (b"\n", b" "):
        if (at := block.rfind(mark, len(block) // 2)) >= 0:
            return at + 1
    at = len(block)
    while at > len(block) - 4 and at > 1 and block[at - 1] & 0xC0 == 0x80:
        at -= 1
    return at - 1 if at > 1 and block[at - 1] & 0xC0 == 0xC0 else len(block)


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    rest = b""
    while data := file.read(size - len(rest)):
        rest += data
        cut = place_to_cut(rest) if len(rest) == size else len(rest)
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest


def split(path: str, folder: str) -> None:
    size = os.path.getsize(path)
    if size < LEAST:
        stop(
            65,
            f"{path} has {size:,} bytes, and at least {LEAST:,} are needed: one twentieth is held out for validation, "
            "and must fill at least one sequence of 256 tokens; give a longer text",
        )
    os.makedirs(folder, exist_ok=True)
    with (
        open(path, "rb") as text,
        open(os.path.join(folder, "train.txt"), "wb") as train,
        open(os.path.join(folder, "validation.txt"), "wb") as held_out,
    ):
        for i, block in enumerate(blocks(text, min(LARGEST_BLOCK, size // PARTS))):
            (held_out if i % PARTS == PARTS - 1 else train).write(block)


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) != 2:
        sys.exit(__doc__)
    path = arguments[1] if arguments[0] == "--name" else arguments[0]
    try:
        if not os.path.isfile(path):
            stop(66, f"{path} is no file")
        if arguments[0] == "--name":
            print(name_of(path))
        else:
            split(path, arguments[1])
    except OSError as error:
        stop(66, f"{error.filename or path}: {error.strerror}")
