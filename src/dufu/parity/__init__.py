"""Compare a layout with one process: record a few steps, lay the numbers side by side, and say what differs first and why."""
