"""What the simulation runs: a stub model with a closed form, plugins that watch, random schedules and their checks."""
