"""Training a draft for a target: data, teacher, losses, loop. `dspark train` is `run`'s command line."""
