"""The page: Markdown beside its pictures, and HTML that holds them."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .exports import FOLDER
from .shapes import clean

if TYPE_CHECKING:
    from .runs import Run
    from .tables import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1760px; margin: 2em auto; padding: 0 1em }
p, figure { max-width: 1180px }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2.2em } h3 { font-size: 1em; margin: 1.8em 0 .4em }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93em }
th { text-align: right; font-weight: 600; border-bottom: 2px solid #888; vertical-align: bottom }
td { text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap } th, td { padding: 4px 9px }
th:first-child, td:first-child, .left { text-align: left; white-space: nowrap }
.whose { text-align: center; border-bottom: 1px solid #aaa } .theirs { background: #f6f1e7 } .ours { background: #eaf3fa }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em }
img { max-width: 100%; height: auto } figure { margin: 2.2em 0 } figcaption, .small { color: #555; font-size: .9em }
"""


# (heading, tables, what to know about them), and (name, PNG, caption).
Section = tuple[str, list["Table"], str]
Picture = tuple[str, bytes, str]
FORMATS = ("png", "svg", "pdf")
TABLE_FORMATS = (("csv", "CSV"), ("tex", "LaTeX"))

# Headings of columns of names, flush left.
NAMES = ("run", "what", "set", "prompts", "class", "variant", "gate", "less")


def files_html(files: list[tuple[str, str]]) -> str:
    """Links to [(path, what)] beside the page."""
    return " · ".join(f'<a href="{html.escape(path)}">{what}</a>' for path, what in files)


def files_markdown(files: list[tuple[str, str]]) -> str:
    return " · ".join(f"[{what}]({path})" for path, what in files)


def table_files(name: str) -> list[tuple[str, str]]:
    return [(f"{FOLDER}/{name}.{suffix}", what) for suffix, what in TABLE_FORMATS]


def picture_files(name: str, formats: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"{name}.{suffix}", suffix.upper()) for suffix in formats]


def table_html(table: Table, file: str) -> str:
    whose = {"ours": "ours", "the paper's": "theirs"}
    classes = [whose.get(who, "") for who, headings in table.spans for _ in headings]
    left = max([0] + [i for i, heading in enumerate(table.headings) if heading in NAMES])
    out = [f"<h3>{html.escape(table.title)}</h3>"] if table.title else []
    out.append('<div class="scroll"><table>')
    if any(who for who, _ in table.spans):
        out.append(
            "<tr>"
            + "".join(
                f'<th class="{"whose " + whose.get(who, "") if who else ""}" colspan="{len(headings)}">'
                f"{html.escape(who)}</th>"
                for who, headings in table.spans
            )
            + "</tr>"
        )
    name = lambda i, css: (
        f' class="{(css + " left").strip() if i <= left else css}"' if css or i <= left else ""
    )
    out.append(
        "<tr>"
        + "".join(
            f"<th{name(i, c)}>{html.escape(h)}</th>" for i, (h, c) in enumerate(zip(table.headings, classes))
        )
        + "</tr>"
    )
    for y, row in enumerate(table.rows):
        cells = []
        for i, (cell, css) in enumerate(zip(row, classes)):
            text = html.escape(cell)
            text = f"<b>{text}</b>" if "diverged" in cell or (y, i) in table.bold else text
            if i == 0 and table.colours:
                text = f'<span class="dot" style="background:{table.colours[y]}"></span>' + text
            cells.append(f"<td{name(i, css)}>{text}</td>")
        out.append("<tr>" + "".join(cells) + "</tr>")
    out.append("</table></div>")
    out += [f'<p class="small">{html.escape(note)}</p>' for note in table.notes]
    out.append(f'<p class="small">{files_html(table_files(file))}</p>')
    return "\n".join(out)


def markdown(text: str) -> str:
    """Text as text: no HTML, no links, no columns of a table."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("](", "]\\(").replace("`", "\\`")


def table_markdown(table: Table, name: str) -> str:
    prefix = {"ours": "ours: ", "the paper's": "paper: "}
    headings = [prefix.get(who, who + " " if who else "") + h for who, hs in table.spans for h in hs]
    lines = [f"### {markdown(table.title)}", ""] if table.title else []
    lines += [
        "| " + " | ".join(markdown(h) for h in headings) + " |",
        "|" + "|".join(" :-- " if h in NAMES else " --: " for h in headings) + "|",
    ]
    for y, row in enumerate(table.rows):
        lines.append(
            "| "
            + " | ".join(
                f"**{markdown(c)}**" if c == "diverged" or (y, i) in table.bold else markdown(c)
                for i, c in enumerate(row)
            )
            + " |"
        )
    lines += [""] + [markdown(note) + "\n" for note in table.notes]
    return "\n".join([*lines, files_markdown(table_files(name)), ""])


def overview_note(runs: list[Run]) -> str:
    several = any(len(r.last.get("sets") or {}) > 1 for r in runs)
    return (
        "Values of the last evaluation"
        + ("; means over the validation sets" if several else "")
        + ". Of n seeds that finished (of those under way where none has): the mean, ± the standard deviation. Speed is the median over "
        "the log lines. Bold: better than the control beyond what the seeds differ by (see the differences)."
    )


def write(path: str, text: str) -> None:
    with open(
        path + ".tmp", "w", encoding="utf-8", errors="replace"
    ) as file:  # a folder's name may be no text
        file.write(text)
    os.replace(path + ".tmp", path)


def write_html(
    path: str,
    title: str,
    runs: list[Run],
    overview: Table,
    sections: list[Section],
    pictures: list[tuple[str, list[Picture]]],
    missing: list[str],
    names: dict[int, str],
    formats: Sequence[str],
) -> None:
    """sections: [(heading, [Table], text)]; pictures: [(heading, [(name, png, caption)])]; names: of the tables' files, by id;
    formats: in which every picture lies beside the page."""
    body = [
        f"<h1>{html.escape(title)}</h1>",
        table_html(overview, names[id(overview)]),
        f'<p class="small">{html.escape(overview_note(runs))}</p>',
    ]
    for heading, tables, text in sections:
        body += [f"<h2>{html.escape(heading)}</h2>"] + (
            [f'<p class="small">{html.escape(text)}</p>'] if text else []
        )
        body += [table_html(table, names[id(table)]) for table in tables]
    for heading, shown in pictures:
        body.append(f"<h2>{html.escape(heading)}</h2>")
        for name, png, text in shown:
            data = base64.b64encode(png).decode()
            body.append(
                f'<figure><img alt="{name.replace("_", " ")}" src="data:image/png;base64,{data}">'
                f"<figcaption>{html.escape(text)} {files_html(picture_files(name, formats))}</figcaption></figure>"
            )
    if missing:
        body.append(
            "<h2>Not there, or of another step</h2><ul class=small>"
            + "".join(f"<li>{html.escape(m)}</li>" for m in missing)
            + "</ul>"
        )
    body.append(
        "<h2>Runs</h2><ul class=small>"
        + "".join(
            f"<li>{html.escape(r.name)}: {html.escape(os.path.abspath(r.folder))}, configuration "
            f"{html.escape(str(r.info.get('config_hash', '-')))}, {html.escape(r.outcome[1])}</li>"
            for r in runs
        )
        + "</ul>"
    )
    write(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>'
        + "\n".join(body)
        + "</body></html>\n",
    )


def write_markdown(
    path: str,
    title: str,
    runs: list[Run],
    overview: Table,
    sections: list[Section],
    pictures: list[tuple[str, list[Picture]]],
    missing: list[str],
    names: dict[int, str],
    formats: Sequence[str],
) -> None:
    lines = [
        f"# {markdown(title)}",
        "",
        table_markdown(overview, names[id(overview)]),
        overview_note(runs),
        "",
    ]
    for heading, tables, text in sections:
        lines += [f"## {heading}", ""] + ([text, ""] if text else [])
        lines += [table_markdown(table, names[id(table)]) for table in tables]
    for heading, shown in pictures:
        lines += [f"## {heading}", ""]
        for name, _, text in shown:
            lines += [f"![{name.replace('_', ' ')}]({name}.png)", ""]
            lines += [f"{markdown(text)} {files_markdown(picture_files(name, formats))}", ""]
    if missing:
        lines += ["## Not there, or of another step", ""] + [f"- {markdown(m)}" for m in missing] + [""]
    lines += ["## Runs", ""] + [
        "- "
        + markdown(
            f"{r.name}: {clean(r.folder, 4096)}, configuration {r.info.get('config_hash', '-')}, {r.outcome[1]}"
        )
        for r in runs
    ]
    write(path, "\n".join(lines) + "\n")


def text_table(overview: Table, endings: list[str]) -> str:
    """For a terminal: one variant per column where they fit, else one per line with the main figures and how it ended."""
    lines = [overview.headings] + overview.rows
    if len(overview.rows) > 5:
        keep = [
            i
            for i, h in enumerate(overview.headings)
            if h in ("variant", "n", "validation loss", "perplexity", "bits/byte", "loss spikes")
        ]
        lines = [[line[i] for i in keep] + [end] for line, end in zip(lines, ["how it ended"] + endings)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                [line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:-1], widths[1:])] + [line[-1]]
            )
            for line in lines
        )
    widths = [max(len(c) for c in line) for line in lines]
    return "\n".join(
        "  ".join(
            [lines[0][i].ljust(widths[0])] + [line[i].rjust(w) for line, w in zip(lines[1:], widths[1:])]
        )
        for i in range(len(lines[0]))
    )
