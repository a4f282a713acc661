"""`protofleet gateway`: an aggregator of a site, which sends its devices' sums upward as one contribution."""
