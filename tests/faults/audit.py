"""What a training opens to write, and which names it changes, by its system calls (P15): nothing beyond its run folder."""

import os
import re
import shutil
import subprocess

from .harness import Failure

ALLOWED = ("/dev/null", "/dev/tty", "/dev/shm/", "/proc/self/")
WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND")
CHANGES = ("rename", "unlink", "mkdir", "rmdir", "link", "symlink", "truncate", "mknod", "chmod", "chown")


def reason():
    return "" if shutil.which("strace") else "no strace"


def whole_calls(lines):
    """The lines of strace, those of a call that another thread's interrupted put together again."""
    begun = {}
    for line in lines:
        first = re.match(r"(\d+) +(.*?) *<unfinished \.\.\.>$", line)
        rest = re.match(r"(\d+) +<\.\.\. \w+ resumed>(.*)$", line)
        if first:
            begun[first[1]] = first[2]
        elif rest and rest[1] in begun:
            yield f"{rest[1]} {begun.pop(rest[1])}{rest[2]}"
        else:
            yield line


def audit(world, tally):
    run = world.run_folder("audited")
    log = os.path.join(world.folder, "calls")
    command = ["strace", "-f", "-y", "-s", "4096", "-e", "trace=%file,openat", "-o", log]
    command += [world.binary, "train", world.config, f"run_dir={run}", "train.max_steps=20"]
    done = subprocess.run(command, cwd=world.folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        if "ptrace" in done.stderr:
            raise Failure(f"strace may not trace here: {done.stderr}")
        raise Failure(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    with open(log, errors="replace") as file:
        for line in whole_calls(file):
            found = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
            if not found or int(found[3]) < 0:
                continue
            call, arguments = found[1], found[2]
            changes = any(call.startswith(word) for word in CHANGES)
            if not changes and not (call.startswith(("open", "creat")) and WRITES.search(arguments)):
                continue
            # "AT_FDCWD</work>, "x"": a relative path is below the folder in angle brackets before it.
            for place, path in re.findall(r'(?:<([^<>]*)>, )?"([^"]*)"', arguments):
                whole = os.path.normpath(os.path.join(place or world.folder, path))
                tally.add("names that were written or changed")
                if not whole.startswith(run) and not whole.startswith(ALLOWED):
                    raise Failure(f"outside the run folder: {line.strip()}")
    if not tally.figures.get("names that were written or changed"):
        raise Failure("the trace holds no call that writes")


def check(world, tally, count):
    for _ in world.turns(count):
        tally.trial("a training", lambda: audit(world, tally))
