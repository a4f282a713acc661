"""`protofleet gateway`: the aggregator of a site. It sends the sums of its devices upward as one contribution.

`cli` reads the options, `service` starts it. `uplink` is a device of the fleet above; `site_terms` are the terms from
there; `coordinator` is the aggregator below where sums stand, `rounds` in rounds, which open and close as
`followed_rounds` says. `unfit_devices` says whose sums cannot go up with the others'.
"""
