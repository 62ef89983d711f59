"""Parts of scripts/report. values, plain_yaml, runs, paper, rows and tables need Python's standard library alone."""
