"""The parts that a coordinator has whatever it runs, put together by `common_parts`.

`fleet_terms` are the bundle, the settings, and what follows from them. `device_statuses` are what devices say of
themselves, and `exclusions` whom nothing is taken of. `announcement_numbers` number what is signed. `order_desk` takes
operators' orders up. `rollout_coordinator` and `bundle_handout` roll a bundle out. `background_work` runs long work.
`steps` are what a coordinator did.
"""
