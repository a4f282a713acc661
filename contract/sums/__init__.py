"""What is computed from samples and may leave a device, and how it is added up.

- `statistics`: a statistic declares its fields, which are class rows and a `triangle`.
- `factor`: a symmetric sum of few samples as a factor, which is smaller than its triangle.
- `fixed_point`: exact sums, so that what was added can be subtracted again without a trace.
- `merge_rules`: many statistics become one.
- `plausibility`: the bounds of what an aggregator and a device accept.
"""
