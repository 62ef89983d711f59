"""The checks of scripts/faults."""
