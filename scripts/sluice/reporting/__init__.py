"""Parts of scripts/report. values, runs, paper, rows and tables need Python's standard library alone."""
