"""`protofleet advise`: which method without training suits a user's own photos.

`frozen_fleet` simulates a fleet on the photos. `near_copies` keeps similar photos on one side of the split. `advice`
measures and recommends.
"""
