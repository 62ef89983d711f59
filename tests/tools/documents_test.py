#!/usr/bin/env python3
"""Every relative link, image, heading and source file that a document of the repository names exists; the front page stays short.
Standard library alone.
"""

import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LINES, COLUMNS = 120, 110  # of README.md
OTHERS = ("cuda_bf16.h", ".cpp")  # NVIDIA's; a suffix
EXAMPLE = re.compile(r"\bX[._]|scale_rows|example_loss")  # of the recipes
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py", ".cmake", ".sbatch")


def files():
    """All files, by their paths from the root."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith("build") and f not in (".git", "runs", "data")]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names]
    return sorted(found)


FILES = files()
DOCUMENTS = [name for name in FILES if name.endswith(".md")]


def prose(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return re.sub(r"^```.*?^```", "", file.read(), flags=re.S | re.M)


def anchors(path):
    """What links to headings are called, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose(path), flags=re.M)
    }


def broken_links(path):
    text, broken = prose(path), []
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img[^>]* src="([^"]+)"', text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if not os.path.exists(os.path.join(ROOT, target)):
            broken.append(link)
        elif heading and heading not in anchors(target):
            broken.append(link)
    return broken


def absent_sources(path):
    """Source files in backquotes that are the end of no file's path."""
    names = [name for name in re.findall(r"`([\w./-]+)`", prose(path)) if name.endswith(SOURCES)]
    return [
        name
        for name in names
        if name not in OTHERS
        and not EXAMPLE.search(name)
        and not any(("/" + file).endswith("/" + name) for file in FILES)
    ]


class Documents(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for path in DOCUMENTS:
            with self.subTest(path):
                self.assertEqual(broken_links(path), [])

    def test_named_sources_exist(self):
        for path in DOCUMENTS:
            with self.subTest(path):
                self.assertEqual(absent_sources(path), [])

    def test_the_front_page_is_short(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            lines = file.read().splitlines()
        self.assertLessEqual(len(lines), LINES)
        self.assertEqual([line for line in lines if len(line) > COLUMNS], [])

    def test_no_comment_cites_what_is_not_here(self):
        """Such as a chapter of a design that is not in the repository."""
        names = r"\b(SPEC|UX|RELIABILITY|FORMATS|PERFORMANCE|STYLE|HOUSE|LAB|EMULATION) ?[0-9]"
        found = subprocess.run(
            [
                "grep",
                "-rnE",
                names,
                "--include=*.h",
                "--include=*.cpp",
                "--include=*.cu",
                "--include=*.cuh",
                "--include=*.md",
                "src",
                "cuda",
                "tools",
                "tests",
                "configs",
                "scripts",
                "README.md",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(found.stdout, "")


if __name__ == "__main__":
    unittest.main()
