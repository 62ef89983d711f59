"""The parts of scripts/sweep, from the sweep file to the results."""
