"""Under which conditions a device runs, as it tells them in its status: its clock, its disk, its certificate.

An operator looks for these first when a device falls silent, and nobody but the device knows them. They are figures of
a status like others, and each may be missing:

- `clock_s`: the device's clock when the status was made, in seconds since the epoch;
- `disk_free_bytes`: what its state directory's file system has left. A device that ends because its disk refuses says
  it in its death, too;
- `certificate_since_s`, `certificate_until_s`: the validity of the certificate that it shows the broker, in seconds
  since the epoch.

A device that has an ε tells none of them: the free disk follows from how many photos there are.
"""

from __future__ import annotations

__all__ = ["CERTIFICATE_SINCE", "CERTIFICATE_UNTIL", "CLOCK", "CONDITIONS", "DISK_FREE", "LEAST_DISK_BYTES"]

CLOCK = "clock_s"
DISK_FREE = "disk_free_bytes"
CERTIFICATE_SINCE, CERTIFICATE_UNTIL = "certificate_since_s", "certificate_until_s"
CONDITIONS = (CLOCK, DISK_FREE, CERTIFICATE_UNTIL, CERTIFICATE_SINCE)

LEAST_DISK_BYTES = 32e6  # with less, a bundle that is rolled out, or the next round, may not fit
