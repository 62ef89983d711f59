"""The papers' tables: a line per row, ours and theirs in cells of their own. Standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from . import paper as papers
from .groups import difference
from .tables import Table, mean_text
from .values import deviation, fixed, short, spearman

if TYPE_CHECKING:
    from .groups import Group

# Keys of Run.measures: heading, writer, writer of differences.
OURS = {
    "loss": ("val. loss", fixed(4), fixed(4, "+")),
    "ppl": ("PPL", fixed(3), fixed(3, "+")),
    "bpb": ("BPB", fixed(4), fixed(4, "+")),
    "first_token_attention": ("F-Attn", fixed(3), None),
    "gate_score": ("gate score", fixed(3), None),
    "m_act": ("M-Act", short, None),
    "imbalance": ("head imbalance", fixed(3), None),
}
THEIRS = {
    "ppl": ("PPL", fixed(3)),
    "bpb": ("BPB", fixed(4)),
    "average": ("avg. of 10 benchmarks", fixed(2)),
    "gate_score": ("gate score", fixed(3)),
    "m_act": ("M-Act", fixed(0)),
    "first_token_attention": ("F-Attn", fixed(3)),
}
EXTRA_OURS = {"sink": ["imbalance"]}
EXTRA_THEIRS = {"gated_4": ["gate_score", "m_act", "first_token_attention"], "sink_1": ["average"]}


GLOSSARY = (
    "Ours and the paper's stand in columns of their own: models, data and lengths differ, so only signs and orders may be "
    "compared. PPL: mean over the validation sets of exp(loss). BPB: bits per byte, mean over the sets. Δ: less the paper's "
    "baseline of the row, of the same model in all that the row does not set, paired and in bold as above. ±: standard deviation over n seeds. F-Attn: attention on the first token, mean over queries, heads and layers. M-Act: mean over layers of the "
    "largest |residual| after the layer. Diverged: the last logged loss is not finite, or the median of the last twentieth "
    "of the losses is more than 0.5 nats above the best such median of the run; such runs are in no mean."
)


def added(group: Group, base: Group | None) -> str:
    """Parameters beyond the baseline's."""
    mine, theirs = group.value("parameters"), base.value("parameters") if base else None
    value = None if mine is None or theirs is None else mine - theirs
    return "-" if value is None else ("+" if value >= 0 else "-") + short(abs(value))


def our_cells(
    keys: list[str], metric: str, group: Group | None, base: Group | None
) -> tuple[list[str], set[int]]:
    """The cells, and the places of those in bold."""
    if group is None:
        return ["no run"] + ["-"] * (len(keys) + 2 + (1 if metric != "loss" else 0)), set()
    cells, bold = [group.state(), "baseline" if base is group else added(group, base)], set()
    for key in keys:
        _, write, write_difference = OURS[key]
        if group.diverged():
            cells += ["diverged"] if key == keys[0] else ["-"]
            cells += ["-"] if key in ("loss", metric) else []
            continue
        cells.append(mean_text(group, key, write))
        if key in ("loss", metric):
            delta = difference(group, base, key)
            if delta and delta.better(-1):
                bold.add(len(cells))
            cells.append(delta.text(write_difference) if delta else "-")
    return cells, bold


def their_cells(table: dict[str, Any], row: dict[str, Any]) -> list[str]:
    cells = []
    if any(r.get("added_millions") is not None for r in table["rows"]):
        cells.append("-" if row.get("added_millions") is None else f"+{row['added_millions']:g}M")
    metric = table["metric"]
    cells.append("diverged" if row.get("diverged") else THEIRS[metric][1](row.get(metric)))
    cells.append(OURS[metric][2](papers.paper_delta(table, row, metric)))
    return cells + [THEIRS[key][1](row.get(key)) for key in EXTRA_THEIRS.get(table["id"], [])]


def paper_tables(groups: list[Group], paper: dict[str, Any]) -> list[PaperTable]:
    """Tables of the papers of which more than the baseline was trained, or whose row a configuration names; one per training
    protocol, and none for a single run of a protocol of its own."""
    out = []
    for table in paper["tables"]:
        by_protocol: dict[str, list[Group]] = {}
        ids = {row["id"] for row in table["rows"]}
        for group in groups:
            if ids & set(group.rows):
                by_protocol.setdefault(papers.protocol(group.first, table["family"]), []).append(group)
        for mine in sorted(by_protocol.values(), key=len, reverse=True):
            lonely = len(mine) == 1 and (
                len(by_protocol) > 1
                or not papers.NAMED_ROW.search(mine[0].first.origin)
                and not papers.NAMED_SIZE.search(mine[0].first.origin)
            )
            plain = all(r in baselines(table) for g in mine for r in g.rows if r in ids)
            if not lonely and not (plain and not names_table(mine, table)):
                out.append(paper_table(table, mine, paper))
    return out


def baselines(table: dict[str, Any]) -> set[str]:
    return {row["id"] for row in table["rows"] if not row.get("baseline")}


def names_table(groups: list[Group], table: dict[str, Any]) -> bool:
    return any(
        number == table["table"] for g in groups for number, _, _ in papers.NAMED_ROW.findall(g.first.origin)
    )


Lines: TypeAlias = "list[tuple[dict[str, Any], Group | None]]"  # the paper's rows, and what we have of each


class PaperTable(Table):
    """And for a picture: whose row, our difference and theirs, and how far the baselines' seeds lie apart."""

    deltas: list[tuple[str, float | None, float | None]]
    chance: float
    id: str
    short: str
    metric: str


def baseline_of(lines: Lines, row: dict[str, Any], group: Group | None) -> Group | None:
    """Of the row's baselines the one that is the same model but for the row."""
    if not row.get("baseline"):
        return group
    found = [g for other, g in lines if other["id"] == row["baseline"] and g is not None]
    if group is not None:
        found = [g for g in found if papers.same_but_for_the_row(group.first, g.first, row)]
    return found[0] if found else None


def paper_table(table: dict[str, Any], groups: list[Group], paper: dict[str, Any]) -> PaperTable:
    metric = table["metric"]
    keys = ["loss", metric] if metric != "loss" else ["loss"]
    keys += ["first_token_attention", "gate_score", "m_act"] + EXTRA_OURS.get(table["family"], [])
    lines: Lines = []
    for row in table["rows"]:
        # Of two readings of a row (4 more experts) the one that grows with the paper's words comes first.
        mine = sorted(
            [g for g in groups if row["id"] in g.rows],
            key=lambda g: -(g.first.get("model.moe.num_experts_per_tok", 0) or 0),
        )
        lines += [(row, g) for g in mine] or [(row, None)]
    cells: list[list[str]] = []
    our_deltas: list[float | None] = []
    bold: set[tuple[int, int]] = set()
    for row, group in lines:
        base = baseline_of(lines, row, group)
        name = row["label"]
        if sum(r is row for r, _ in lines) > 1:
            name = group.label
        if table["family"] == "dense":
            name += (
                f", {row['family'][:-1]} layers, "
                + (f"{row['tokens']}, " if "tokens" in row else "")
                + f"lr {row['lr']:g}"
            )
        ours, places = our_cells(keys, metric, group, base)
        bold |= {(len(cells), 2 + place) for place in places}
        cells.append([str(row["row"]), name] + ours + their_cells(table, row))
        finished = (
            group is not None
            and group.finished()
            and not group.diverged()
            and base is not None
            and base.finished()
        )
        delta = difference(group, base, metric) if finished and row.get("baseline") else None
        our_deltas.append(delta.mean if delta else None)
    ours = ["state", "added parameters"]
    for key in keys:
        ours += [OURS[key][0]] + (["Δ " + OURS[key][0]] if key in ("loss", metric) else [])
    theirs = ["added parameters"] if any(r.get("added_millions") is not None for r in table["rows"]) else []
    theirs += [THEIRS[metric][0], "Δ " + THEIRS[metric][0]] + [
        THEIRS[k][0] for k in EXTRA_THEIRS.get(table["id"], [])
    ]
    notes = [f"Ours: {papers.describe_protocol([r for g in groups for r in g.runs])}."]
    notes.append(correlation_note(table, lines, our_deltas))
    if table["id"] == "gated_4":
        counted = [
            (row, g)
            for row, g in (lines[i] for i in first_of_rows(lines).values())
            if g and g.finished() and not g.diverged()
        ]
        for key in ("gate_score", "m_act", "first_token_attention"):
            rho, n = spearman([(g.value(key), row.get(key)) for row, g in counted])
            notes.append(
                f"Rank correlation (Spearman) of our {THEIRS[key][0]} with the paper's: {shown(rho, n)}."
            )
    if len(first_of_rows(lines)) < len(lines):
        notes.append("Of a row that has several lines the first alone is in the rank correlations.")
    notes += spread_notes(lines, metric)
    source = paper["papers"][table["paper"]]
    title = f"Table {table['table']}" if not table["table"].startswith("A") else f"Appendix {table['table']}"
    made = PaperTable(
        f"{title}, {source['title']} ({source['source']}): {table['title']}",
        [("", ["row", "what"]), ("ours", ours), ("the paper's", theirs)],
        cells,
        [n for n in notes if n],
        bold=bold,
    )
    made.deltas = [
        (cell[1], delta, papers.paper_delta(table, row, metric))
        for cell, (row, _), delta in zip(cells, lines, our_deltas)
    ]
    made.chance = max(
        [group.spread(metric) or 0.0 for row, group in lines if group and not row.get("baseline")],
        default=0.0,
    )
    made.id, made.short, made.metric = table["id"], f"{title}, {source['title']}", THEIRS[metric][0]
    return made


def shown(rho: float | None, n: int) -> str:
    return (
        f"{rho:+.2f}, n = {n} rows"
        if rho is not None
        else f"not computed, n = {n} rows (it takes three that differ)"
    )


def first_of_rows(lines: Lines) -> dict[str, int]:
    """{id of a row: place of its first line}: two starts of a row, or two readings, are one row."""
    return {row["id"]: i for i, (row, _) in reversed(list(enumerate(lines)))}


def correlation_note(table: dict[str, Any], lines: Lines, our_deltas: list[float | None]) -> str:
    metric = table["metric"]
    first = first_of_rows(lines)
    pairs = [(our_deltas[first[row["id"]]], papers.paper_delta(table, row, metric)) for row in table["rows"]]
    rho, n = spearman(pairs)
    return (
        f"Rank correlation (Spearman) of our Δ {THEIRS[metric][0]} with the paper's, over finished rows that both have, "
        f"baselines left out: {shown(rho, n)}."
    )


def spread_notes(lines: Lines, metric: str) -> list[str]:
    """What chance alone does: the seeds of rows without a baseline of their own."""
    out = []
    for row, group in lines:
        if group is not None and not row.get("baseline") and len(group.values(metric)) > 1:
            values = group.values(metric)
            out.append(
                f"Seeds of row {row['row']} ({row['label']}): {THEIRS[metric][0]} from {min(values):.4g} to "
                f"{max(values):.4g}, standard deviation {deviation(values):.2g}, n = {len(values)}."
            )
    return out
