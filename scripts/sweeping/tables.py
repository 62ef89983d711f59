"""What the trials will cost, where they are, and what came out."""
import csv
import io
import os
import statistics

from . import state
from .plan import flops
from .state import DONE, RUNNING
from .text import count, duration, finite, fixed, table


class Speed:
    """FLOP/s of this sweep's trials so far; of the same configuration where one has been trained, else of all."""

    def __init__(self, found):
        self.of, self.all = {}, []
        for look in found.values():
            record = look.progress()
            seconds, tokens = finite(record.get("seconds")), finite(record.get("tokens"))
            # A beginning says little.
            if not seconds or not tokens or (look.state != DONE and record["step"] < 20):
                continue
            rate = tokens * look.trial.plan["flops_per_token"] / seconds
            self.of.setdefault(look.trial.configuration(), []).append(rate)
            self.all.append(rate)

    def seconds(self, trial, tokens):
        """Training alone, without evaluation and saving; None while nothing is measured."""
        rates = self.of.get(trial.configuration()) or self.all
        return tokens * trial.plan["flops_per_token"] / statistics.median(rates) if rates else None


def tokens_left(look):
    if look.state in state.ENDS:
        return 0
    return max(0, look.trial.plan["tokens"] - int(finite(look.progress().get("tokens")) or 0))


def short_state(look):
    if look.state in (state.STOPPED, state.DIVERGED) and "step" in look.verdict:
        return f"{look.state} at {look.verdict['step']}"
    if look.state == state.FAILED:
        return f"failed ({look.verdict.get('code')})"
    return look.state


def tally(found):
    """"4 done, 2 waiting" """
    states = [look.state for look in found.values()]
    order = (DONE, state.STOPPED, state.DIVERGED, state.FAILED, RUNNING, state.PAUSED, state.WAITING)
    return ", ".join(f"{states.count(s)} {s}" for s in order if s in states)


def plan_text(sweep, found, merged):
    speed = Speed(found)
    rows, left, seconds = [], 0.0, 0.0
    for i, trial in enumerate(sweep.trials):
        look = found[trial.hash]
        time, tokens = speed.seconds(trial, trial.plan["tokens"]), tokens_left(look)
        left += tokens * trial.plan["flops_per_token"]
        seconds += speed.seconds(trial, tokens) or 0
        rows.append((i, trial.name, count(trial.plan["parameters"]), count(trial.plan["steps"]), count(trial.plan["tokens"]),
                     f"{flops(trial):.2g}", "-" if time is None else duration(time), short_state(look)))
    out = table(("#", "trial", "parameters", "steps", "tokens", "FLOPs", "time", "state"), rows, left=2) + "\n"
    for trial, same in merged:
        out += f"{trial.name} is {same.name} by another name: trained once\n"
    resources = sweep.resources
    out += f"\n{len(sweep.trials)} trials: {tally(found)}. {sum(map(flops, sweep.trials)):.2g} FLOPs, {left:.2g} of them to come; "
    slots = f"{resources.slots} slot{'s' if resources.slots > 1 else ''}"
    if not left:
        out += "nothing to run.\n"
    elif not speed.all:
        out += f"how long in {slots}: known when the first trial is done.\n"
    else:
        waits = max((speed.seconds(t, tokens_left(found[t.hash])) or 0 for t in sweep.trials), default=0)
        out += f"about {duration(max(seconds / resources.slots, waits))} in {slots}, by the speed of those that have run.\n"
    for rule in sweep.rules:
        out += f"A trial is stopped when {rule}.\n"
    return out


def status_text(sweep, found):
    rows = []
    for i, trial in enumerate(sweep.trials):
        look = found[trial.hash]
        record = look.progress()
        speed, step = finite(record.get("tokens_per_second")), record.get("step", 0)
        left = tokens_left(look) / speed if speed and look.state == RUNNING else None
        why = look.verdict.get("reason", "") if look.state == look.verdict.get("event") else ""
        rows.append((i, trial.name, short_state(look), f"{step}/{trial.plan['steps']}", fixed(finite(record.get("loss")), 3),
                     "-" if speed is None else count(speed), "-" if left is None else duration(left), why[:100]))
    return (table(("#", "trial", "state", "step", "loss", "tok/s", "ETA", ""), rows, left=3) + f"\n\n{tally(found)}\n")


class Result:
    """Figures of one trial: of its last evaluation, and of its training."""

    def __init__(self, look):
        self.look, trial = look, look.trial
        folder = trial.folder
        evaluation, record = state.last_record(os.path.join(folder, "eval.jsonl")), look.progress()
        sets = evaluation.get("sets") if isinstance(evaluation.get("sets"), dict) else {}
        analysis = evaluation.get("analysis") if isinstance(evaluation.get("analysis"), dict) else {}
        self.loss = {name: finite(s.get("loss")) for name, s in sets.items()}
        self.perplexity = {name: finite(s.get("perplexity")) for name, s in sets.items()}
        self.bits = {name: finite(s.get("bits_per_byte")) for name, s in sets.items()}
        self.step, self.record = record.get("step", 0), record
        self.first_token = finite(analysis.get("first_token_attention"))
        self.gate = finite(analysis.get("mean_gate_score"))
        self.residual = finite(analysis.get("largest_residual"))

    @staticmethod
    def mean(values):
        """Over sets; None when one is missing."""
        values = list(values)
        return statistics.fmean(values) if values and None not in values else None


def csv_text(sweep, results):
    keys = list(dict.fromkeys(key for trial in sweep.trials for key in trial.values))
    sets = list(dict.fromkeys(name for r in results for name in r.loss))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "group", "base", *keys, "seed", "hash", "folder", "state", "reason", "step", "steps", "tokens", "parameters", "flops",
                     "train_loss", "grad_norm", "spikes", "skipped", "seconds", "tokens_per_second", "val_loss", "val_perplexity",
                     *(f"val_loss/{s}" for s in sets), *(f"val_perplexity/{s}" for s in sets), *(f"val_bits_per_byte/{s}" for s in sets),
                     "first_token_attention", "mean_gate_score", "largest_residual"])
    for r in results:
        trial, look, record = r.look.trial, r.look, r.record
        writer.writerow(["" if cell is None else cell for cell in [
            trial.name, trial.group, trial.base, *(trial.values[k].flow() if k in trial.values else "" for k in keys),
            trial.seed.text if trial.seed else "", trial.hash, os.path.basename(trial.folder), look.state,
            look.verdict.get("reason", "") if look.state == look.verdict.get("event") else "", r.step, trial.plan["steps"],
            record.get("tokens"), trial.plan["parameters"], flops(trial), finite(record.get("loss")), finite(record.get("grad_norm")),
            record.get("spikes"), record.get("skipped"), finite(record.get("seconds")), finite(record.get("tokens_per_second")),
            Result.mean(r.loss.values()), Result.mean(r.perplexity.values()), *(r.loss.get(s) for s in sets),
            *(r.perplexity.get(s) for s in sets), *(r.bits.get(s) for s in sets), r.first_token, r.gate, r.residual]])
    return out.getvalue()


def spread(values, digits):
    """Mean and, of several, the sample's standard deviation."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    return fixed(statistics.fmean(values), digits) + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def results_text(sweep, results):
    """Seeds together; figures are those of finished trials, and how many there are is said."""
    sets = list(dict.fromkeys(name for r in results for name in r.loss))
    groups = {}
    for r in results:
        groups.setdefault(r.look.trial.configuration(), []).append(r)
    rows, figures = [], {}
    for members in groups.values():
        name = members[0].look.trial.group
        done = [m for m in members if m.look.state == DONE]
        losses = [Result.mean(m.loss.values()) for m in done]
        perplexities = [Result.mean(m.perplexity.values()) for m in done]
        others = {}
        for m in members:
            if m.look.state != DONE:
                others[m.look.state] = others.get(m.look.state, 0) + 1
        note = ", ".join(f"{n} {s}" for s, n in others.items())
        for metric, values in [("validation loss", losses), *((f"loss on {s}", [m.loss.get(s) for m in done]) for s in sets if len(sets) > 1)]:
            values = [v for v in values if v is not None]
            if values:
                figures.setdefault(metric, []).append((statistics.fmean(values), name, len(values)))
        rows.append((name, f"{len(done)}/{len(members)}", spread(losses, 4), spread(perplexities, 3),
                     *(spread([m.perplexity.get(s) for m in done], 3) for s in sets if len(sets) > 1),
                     spread([finite(m.record.get("spikes")) for m in done], 1), spread([m.first_token for m in done], 3),
                     spread([m.residual for m in done], 1), note))
    header = ("configuration", "seeds", "val loss", "perplexity", *(f"ppl {s}" for s in sets if len(sets) > 1), "spikes", "first token",
              "residual max", "")
    out = table(header, rows) + "\n"
    out += "\nMeans of the finished seeds, ± their standard deviation; over sets, means of their losses and of their perplexities.\n"
    for metric, values in figures.items():
        value, name, seeds = min(values)
        out += f"lowest {metric}: {value:.4f}  {name} ({seeds} seed{'s' if seeds > 1 else ''})\n"
    return out
