"""Tables as text: cells are strings, so that Markdown, HTML and a terminal show the same. Standard library alone."""
from . import paper as papers
from .values import count_spikes, fixed, mean, number, short


class Table:
    def __init__(self, title, spans, rows, notes=(), text=""):
        self.title, self.rows, self.notes, self.text = title, rows, list(notes), text
        self.spans = spans                                     # [(whose, [heading, ...])]
        self.headings = [h for _, hs in spans for h in hs]


# Key, heading, how a value is written, and whether the least (-1) or the greatest (+1) is set in bold.
COLUMNS = [
    ("parameters", "parameters", short, 0),
    ("active", "active per token", short, 0),
    ("tokens", "tokens seen", short, 0),
    ("loss", "validation loss", fixed(4), -1),
    ("perplexity", "perplexity", fixed(2), -1),
    ("bits_per_byte", "bits/byte", fixed(4), -1),
    ("largest_residual", "largest residual", short, -1),
    ("first_token_attention", "first-token attention", fixed(3), 0),
    ("mean_gate_score", "mean gate score", fixed(3), 0),
    ("spikes", "spikes", short, 0),
    ("speed", "tokens/s", short, 1),
]


def with_spread(write, value, spread):
    return write(value) + (f" ± {write(spread)}" if spread is not None else "")


def overview(runs):
    rows = [run.row() for run in runs]
    return Table("", [("", ["run"]), ("", [heading for _, heading, _, _ in COLUMNS])],
                 [[run.name] + [write(row[key]) for key, _, write, _ in COLUMNS] for run, row in zip(runs, rows)])


def sets_table(runs):
    """Loss, perplexity and bits per byte of every set, when there are several."""
    names = []
    for run in runs:
        names += [s for s in run.last.get("sets") or {} if s not in names]
    if len(names) < 2:
        return None
    if len(runs) > 6:   # one line per run, perplexities alone
        rows = []
        for run in runs:
            ppl = run.perplexities()
            rows.append([run.name] + [fixed(3)(ppl.get(name)) for name in names] + [fixed(3)(mean(ppl.values()))])
        return Table("", [("", ["run"]), ("", names + ["mean"])], rows)
    rows = []
    for name in names:
        for run in runs:
            values = (run.last.get("sets") or {}).get(name)
            if values is not None:
                rows.append([name, run.name] + [write(number(values.get(key))) for key, write in
                                                (("loss", fixed(4)), ("perplexity", fixed(2)),
                                                 ("bits_per_byte", fixed(4)), ("tokens", short))])
    return Table("", [("", ["set", "run"]), ("", ["loss", "perplexity", "bits/byte", "tokens"])], rows)


THRESHOLDS = (0.1, 0.2, 0.5)


def spikes_of(run):
    """(counts per threshold, logged losses looked at), after twice the warm-up (the paper's curves: after step 2,000)."""
    after = 2 * (run.get("optimizer.warmup_steps", 0) or 0)
    kept = [(r["step"], number(r.get("loss"))) for r in run.metrics]
    kept = [(step, loss) for step, loss in kept if loss is not None]
    skip = sum(step <= after for step, _ in kept)
    return count_spikes([loss for _, loss in kept], THRESHOLDS, skip), len(kept) - skip


def spike_table(runs):
    rows = []
    for run in runs:
        counts, looked = spikes_of(run)
        bad = sum(number(r.get("loss")) is None for r in run.metrics)
        counter = run.metrics[-1].get("spikes") if run.metrics else None
        skipped = run.metrics[-1].get("skipped") if run.metrics else None
        rows.append([run.name] + [str(c) for c in counts] + [f"{looked:,}", str(bad), short(counter), short(skipped),
                                                             run.outcome[1]])
    return Table("Spikes in the training loss",
                 [("", ["run"]), ("above the local median by more than", ["0.1", "0.2", "0.5"]),
                  ("", ["losses looked at", "losses not finite", "spikes while training", "steps skipped", "how it ended"])],
                 rows,
                 ["Logged losses after twice the warm-up; the local median is that of 100 logged losses to either side. Spikes "
                  "while training: steps whose loss or gradient norm was 6 deviations above the last 128."])


def lr_points(groups):
    """Per variant and depth, where several learning rates were tried: [(lr, losses, diverged)] in the order of lr."""
    ladders = {}
    for group in groups:
        lr = number(group.first.get("optimizer.lr"))
        if lr is None:
            continue
        key = (group.variant, group.first.get("model.num_hidden_layers"), group.first.get("model.hidden_size"),
               bool(group.first.get("model.moe.num_experts", 0)), papers.protocol(group.first, "dense"),
               str(papers.shape(group.first)), str(group.first.get("train.max_steps")))
        ladders.setdefault(key, []).append((lr, group))
    out = []
    for key, points in ladders.items():
        if len({lr for lr, _ in points}) < 2:
            continue
        out.append((points[0][1].short, key[1], sorted(((lr, g) for lr, g in points), key=lambda p: p[0])))
    depths = {depth for _, depth, _ in out}
    return [(name if len(depths) == 1 else f"{name}, {depth} layers", points) for name, depth, points in out]


def lr_table(groups):
    rows = []
    for name, points in lr_points(groups):
        for lr, group in points:
            rows.append([name, f"{lr:g}", group.state(),
                         "diverged" if group.diverged() else with_spread(fixed(4), group.value("loss"), group.spread("loss"))])
    if not rows:
        return None
    return Table("Learning-rate tolerance", [("", ["variant", "learning rate", "state", "validation loss"])], rows,
                 ["Mean ± standard deviation over seeds of the runs that did not diverge."])


def missing_pieces(runs):
    """What was not found, and the command that makes it."""
    out = []
    for run in runs:
        if not run.deep:
            out.append(f"{run.name}: no analysis of this run, so it is in no figure of layers and heads; "
                       f"sluice analyze {run.folder} -o {run.folder}/analysis")
        elif not run.deep_is_current():
            out.append(f"{run.name}: the analysis is of step {run.deep.data.get('step')}, the last evaluation of step "
                       f"{run.last.get('step')}: figures of layers and heads show the former, tables the latter")
        if not run.evals:
            out.append(f"{run.name}: no evaluation yet (eval.jsonl)")
        if not run.config:
            out.append(f"{run.name}: no config.yaml, so it is no row of a table")
    return out
