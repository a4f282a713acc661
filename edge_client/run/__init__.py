"""The device's process, from the command line to its end.

`cli` reads the options; `process` becomes the device's process; `service` puts files together; `client` is the loop,
and `member` who it is in a fleet;
`calibration_work` keeps what probabilities follow from;
`camera_work` begins its camera and page, and `photo_work` sees to the photos;
`round_work` does a round and makes it durable; `latest_state` keeps the newest global state for answers; `withdrawal`
is `client --withdraw`.
"""
