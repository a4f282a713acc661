"""A roll-out at a device: it is offered a bundle, fetches it, tries it, and goes over or back.

`rollout_decisions` decides, as functions of values; `download` says what to ask for; `rollout_work` does it;
`probation` judges the new bundle; `rollout_file` remembers; `active_bundle` says which bundle a start runs.
"""
