"""Pictures of cameras, each with the time when it was taken.

A camera is named by a text, `rtsp://host/door`. The way of a picture:

1. `sources` finds what reads such a camera, by the word before the colon, and checks the text; `url` reads it where it
   is a URL. A kind of camera is a module and its line in that table.
2. The kind's module reads pictures: `rtsp` (with `rtp_video`), `v4l2` and `video_file` through `key_frames` (PyAV),
   `http_snapshot`, `mqtt_snapshots`, `picamera` through a process (`picamera_helper`), `folder` through `photo_watch`.
   A server's answer has a `deadline`; a password is given as `signature` says.
3. `sources` waits and reads anew where a camera is gone.
4. `motion` says which of them are wanted, where only those are in which something has moved.
5. `camera` has what they share: a picture, which part of it counts, how it is brought to a bundle's shape.
"""
