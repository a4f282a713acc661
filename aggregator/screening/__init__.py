"""Which devices are left out of a merge, or count for less: what only a comparison of devices can show.

`outliers` weighs and screens. `contradictions` finds the devices whose labels the others contradict, by how far class
means move (`class_displacements`).
"""
