"""The step, the loop, hooks, precision, checkpoints, metrics and evaluation."""
