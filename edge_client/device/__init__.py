"""The device's core: a round as a function of bundle, data, announcement and global state.

`own_samples` are its photos over the years; `device` does the round; `global_state_check` doubts what cannot be true;
`evaluation` tests on held-out photos, and `calibration` says how true probabilities are on them; `answer_choice` lists
the ways to answer, `unknown` what is none of the classes; `left_out` is what a device keeps that a round left out;
`drift_watch` and `exposure` are what it says of its photos.
"""
