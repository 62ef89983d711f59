"""Every table as CSV and as a LaTeX tabular with booktabs' rules, in OUTPUT/tables. Standard library alone."""

from __future__ import annotations

import csv
import io
import os
import re
import unicodedata
from typing import TYPE_CHECKING

from .groups import difference
from .tables import COLUMNS, COMPARED

if TYPE_CHECKING:
    from .groups import Group
    from .tables import Table

FOLDER = "tables"
NAMES = ("run", "what", "set", "prompts", "variant", "less", "state", "how it ended")  # of columns flush left
Rows = list[list[str]]

LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after the end of a row it would begin a length
    "]": "{]}",
    "*": "{*}",  # and this would be a part of the row's end
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "…": r"\ldots{}",
    "–": "--",
}


def latex(text: str) -> str:
    """Text as text, whatever it holds: pdflatex sets it with its own fonts, and no letter of it is a command. What those fonts lack is
    written by its number."""
    if text == "-":
        return "--"
    out = []
    for letter in text:
        if letter in LATEX:
            out.append(LATEX[letter])
        elif " " <= letter <= "~":
            out.append(letter)
        elif "À" <= letter <= "ÿ" and letter not in "ÐðÞþ÷":  # letters of Latin-1 that every encoding of fonts has
            out.append(letter)
        elif unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Zs"):
            out.append(" ")
        else:
            out.append(rf"\texttt{{U+{ord(letter):04X}}}")
    made = "".join(out)
    made = re.sub(r"(?<![\w.$-])-(?=\d)", "$-$", made)  # a minus sign, not a hyphen
    return re.sub(r"-(?=-)", "-{}", made)  # hyphens that do not become a dash


def comment(text: str) -> str:
    """For a line that begins with %: no letter of it ends the line."""
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text)).strip()


def tabular(table: Table) -> str:
    """A tabular for \\usepackage{booktabs}; title and notes are comments, since captions are the document's."""
    columns = "".join("l" if heading in NAMES else "r" for heading in table.headings)
    lines = [f"% {comment(table.title)}"] if table.title else []
    lines += [rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    if any(whose for whose, _ in table.spans):
        cells, rules, at = [], [], 1
        for whose, headings in table.spans:
            last = at + len(headings) - 1
            cells.append(rf"\multicolumn{{{len(headings)}}}{{c}}{{{latex(whose)}}}")
            rules += [rf"\cmidrule(lr){{{at}-{last}}}"] if whose else []
            at = last + 1
        lines += [" & ".join(cells) + r" \\", " ".join(rules)]
    lines += [" & ".join(latex(heading) for heading in table.headings) + r" \\", r"\midrule"]
    for y, row in enumerate(table.rows):
        cells = [
            rf"\textbf{{{latex(cell)}}}" if (y, x) in table.bold else latex(cell)
            for x, cell in enumerate(row)
        ]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [f"% {comment(note)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def harmless(cell: str) -> str:
    """A spreadsheet takes a cell that begins so for a formula, unless a quote stands before it."""
    return "'" + cell if re.match(r"[=@\t\r]|[+-](?![\d.]|$)", cell) else cell


def csv_text(headings: list[str], rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([[harmless(cell) for cell in row] for row in [headings, *rows]])
    return out.getvalue()


def shown_cells(table: Table) -> tuple[list[str], Rows]:
    """As the page shows them."""
    prefixes = [f"{whose}: " if whose else "" for whose, headings in table.spans for _ in headings]
    return [p + h for p, h in zip(prefixes, table.headings)], table.rows


def exact(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def overview_numbers(groups: list[Group]) -> tuple[list[str], Rows]:
    """Means, standard deviations and how many runs they are of, in columns of their own, not rounded."""
    headings = ["variant", "n"]
    for key, *_ in COLUMNS:
        headings += [key, f"{key}_std", f"{key}_n"]
    rows = []
    for group in groups:
        cells = [group.label, str(len(group.sound()) or group.count())]
        for key, *_ in COLUMNS:
            cells += [exact(group.value(key)), exact(group.spread(key)), str(len(group.values(key)))]
        rows.append(cells)
    return headings, rows


def run_numbers(groups: list[Group]) -> tuple[list[str], Rows]:
    """A line for every run, not rounded."""
    keys = [key for key, *_ in COLUMNS]
    rows = []
    for group in groups:
        for run in group.runs + group.twins:
            seed = "" if run.seed() is None else str(run.seed())
            measures = [exact(run.measures[key]) for key in keys]
            rows.append([run.name, group.label, seed, *measures, run.outcome[0]])
    return ["run", "variant", "seed", *keys, "state"], rows


def difference_numbers(groups: list[Group], controls: dict[Group, Group]) -> tuple[list[str], Rows]:
    """A line for every variant and measure, not rounded."""
    rows = []
    for group in groups:
        control = controls[group]
        for key, *_ in COMPARED:
            delta = difference(group, control, key)
            if control and delta:
                rows.append(
                    [group.label, control.label, key, str(delta.n)]
                    + [exact(v) for v in (delta.mean, delta.low, delta.high, delta.p)]
                )
    return ["variant", "control", "measure", "pairs", "mean_difference", "low_95", "high_95", "p"], rows


def name_of(table: Table, heading: str, taken: set[str]) -> str:
    """A file's name, of the table's title or of the heading above it."""
    words = re.sub(r"[^a-z0-9]+", "_", (getattr(table, "id", "") or table.title or heading).lower())
    stem = name = words.strip("_")[:60] or "table"
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def write_tables(
    output: str, tables: list[tuple[str, Table]], numbers: dict[str, tuple[list[str], Rows]]
) -> dict[int, str]:
    """Writes OUTPUT/tables/NAME.csv and .tex; {id of a table: NAME}. numbers: {NAME: what its CSV has instead of the cells shown}."""
    folder = os.path.join(output, FOLDER)
    os.makedirs(folder, exist_ok=True)
    taken: set[str] = set()
    names = {}
    for heading, table in tables:
        name = names[id(table)] = name_of(table, heading, taken)
        for suffix, text in (
            (".csv", csv_text(*numbers.get(name, shown_cells(table)))),
            (".tex", tabular(table)),
        ):
            path = os.path.join(folder, name + suffix)
            with open(path + ".tmp", "w", encoding="utf-8", errors="replace", newline="") as file:
                file.write(text)
            os.replace(path + ".tmp", path)
    return names
