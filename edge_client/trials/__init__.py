"""What a device tries before it relies on it, most of it in a process of its own, and remembers.

`provider_trials` tries execution providers, `step_forms` forms of the training step, `memory_limit` with `memory_trial`
whether a bundle fits, `bundle_trial` a bundle that a roll-out brought. `trials_file` remembers.
"""
