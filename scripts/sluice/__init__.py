"""What the commands in scripts/ are made of. Python's standard library alone, except where a module says what it needs."""
