"""The trainer: asks for tasks, pulls, pushes; and the process that runs a training script."""
