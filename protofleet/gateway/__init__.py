"""`protofleet gateway`: the aggregator of a site. It sends the sums of its devices upward as one contribution.

`settings` are its options, `cli` its command, and `service` starts it. `uplink` is a device of the fleet above, and
`upward` what it gives. `standing_site` is the site below where sums stand, `rounds_site` in rounds, which open and
close as `followed_rounds` says; `site_terms` are the terms from above. `unfit_devices` says whose sums cannot go up
with the others'.
"""
