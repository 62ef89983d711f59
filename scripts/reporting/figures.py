"""Which pictures are made: (heading, [(file name, figure, one sentence of explanation)]). Needs matplotlib."""
from . import plots_training


def all_figures(runs, groups):
    # Grey lines lie below coloured ones.
    shown = [r for r in runs if r.grey] + [r for r in runs if not r.grey]
    return [("Training", plots_training.figures(shown))]
