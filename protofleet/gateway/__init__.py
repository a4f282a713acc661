"""`protofleet gateway`: the aggregator of a site. It sends the sums of its devices upward as one contribution."""
