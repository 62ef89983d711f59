"""What came out of a sweep, as a table for a README: means over seeds, and differences to the control paired by seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..reporting.comparing import FEWEST, choose_baselines
from ..reporting.groups import difference
from ..reporting.tables import mean_text, source_note
from ..reporting.values import fixed, short
from .state import DONE
from .tables import groups_of

if TYPE_CHECKING:
    from ..reporting.comparing import Difference
    from .tables import Result

# Key of Run.measures: heading, how a value is written, how a difference is (None: none is shown).
MEASURES: dict[str, tuple[str, Callable[[float | None], str], Callable[[float], str] | None]] = {
    "loss": ("validation loss", fixed(4), fixed(4, "+")),
    "ppl": ("perplexity", fixed(3), fixed(3, "+")),
    "first_token_attention": ("first-token attention", fixed(3), fixed(3, "+")),
    "strongest_sink": ("of the strongest head", fixed(3), fixed(3, "+")),
    "sink_share": ("Sink^eps", fixed(3), fixed(3, "+")),
    "largest_residual": ("largest residual", short, None),
    "gate_score": ("mean gate score", fixed(3), None),
    "gates_low": ("gates < 0.05", fixed(3), None),
    "gates_high": ("gates > 0.95", fixed(3), None),
    "imbalance": ("imbalance of heads", fixed(3), fixed(3, "+")),
    "spikes": ("loss spikes", short, None),
}
USUAL = "loss,first_token_attention,sink_share,largest_residual,gates_low"


def unknown(names: list[str]) -> list[str]:
    return [name for name in names if name not in MEASURES]


def counted(result: Result) -> bool:
    """Whether the means have it: finished, and not diverged by its losses."""
    return result.look.state == DONE and result.run is not None and result.run.outcome[0] != "diverged"


def interval(found: Difference | None, write: Callable[[float], str]) -> str:
    """ "+0.10 (0.05 to 0.15)", or "+0.10 (n < 3)" where too few seeds are paired."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{write(found.mean)} (n < {FEWEST})"
    return f"{write(found.mean)} ({write(found.low)} to {write(found.high)})"


def markdown(results: list[Result], names: list[str], control: str | None = None) -> str:
    """A row for each configuration that has a finished trial, with the number of its seeds; a column for each measure, and another for
    its difference to the control with a 95 % interval. Below: the control, where figures are from, and whose seeds are left out."""
    made = [(group, members) for group, members in groups_of(results) if group]
    bases = choose_baselines([group for group, _ in made], control) if made else {}
    made = [(group, members) for group, members in made if any(map(counted, members))]
    notes = [f"Control: `{base.label}`." for base in dict.fromkeys(base for base in bases.values() if base)]
    headings = ["configuration", "seeds"]
    for name in names:
        heading, _, write = MEASURES[name]
        headings += [heading] + (["less the control"] if write else [])
    rows = [headings, ["---"] * len(headings)]
    for group, members in made:
        name = members[0].look.trial.group
        row = [f"`{name}`", str(sum(map(counted, members)))]
        diverged = sum(m.look.state == DONE and not counted(m) for m in members)
        notes += [f"`{name}`: {diverged} diverged (loss at end), in no mean."] if diverged else []
        notes += [f"`{name}`: {group.unequal()}."] if group.unequal() else []
        for measure in names:
            _, write_value, write = MEASURES[measure]
            row.append(mean_text(group, measure, write_value))
            if write:
                row.append(
                    ""
                    if bases[group] is group
                    else interval(difference(group, bases[group], measure), write)
                )
        rows.append(row)
    if source := source_note([group for group, _ in made]):
        notes.append(source + " Sinks and shares of gates are of the evaluations.")
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + "".join(f"\n{note}\n" for note in notes)
