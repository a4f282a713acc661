"""A real RTSP server (gst-rtsp-server) whose picture has a clock in it, as a process of the system's Python.

It prints its port, then serves `/clock` until it is killed. The picture is grey; in its upper left corner 48 cells of
16 x 16 pixels, in two rows, are the bits of the milliseconds of Unix time at which it was drawn, the highest first.

    /usr/bin/python3 rtsp_server.py [--port 0] [--width 640 --height 480] [--rate 10] [--key-s 2] [--larger-after 3]
                                    [--slices 4] [--kbit 1000] [--noise] [--user NAME:PASSWORD]
                                    [--frames FILE]

With `--frames` the picture is, in turn, each of the raw I420 pictures of a file; each has a key frame's interval.
"""

import argparse
import os
import random
import sys
import time

CELL, ACROSS, BITS = 16, 24, 48


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--rate", type=int, default=10, help="pictures a second")
    parser.add_argument("--key-s", type=float, default=2.0, help="seconds between two key frames")
    parser.add_argument("--larger-after", type=float, default=0.0, help="seconds until the picture is twice as wide")
    parser.add_argument("--slices", type=int, default=1, help="parts that each picture is sent in")
    parser.add_argument("--kbit", type=int, default=1000, help="a second, at most")
    parser.add_argument("--noise", action="store_true", help="instead of the grey, so that the stream has its bits")
    parser.add_argument("--user", default="")
    parser.add_argument("--frames", default="", help="a file of raw pictures that are shown in turn")
    given = parser.parse_args()

    import gi

    gi.require_version("Gst", "1.0")
    gi.require_version("GstRtspServer", "1.0")
    from gi.repository import GLib, Gst, GstRtspServer

    Gst.init(None)
    noise = os.urandom((1 << 20) + 8 * given.width * given.height) if given.noise else b""
    key = max(1, round(given.key_s * given.rate))
    size = given.width * given.height * 3 // 2
    with open(given.frames or os.devnull, "rb") as file:
        frames = list(iter(lambda: file.read(size), b""))
    launch = (
        "( appsrc name=clock is-live=true format=time do-timestamp=true ! queue max-size-buffers=1 leaky=downstream"
        f" ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max={key} bitrate={given.kbit}"
        f" sliced-threads={given.slices > 1} threads={given.slices}"
        " ! rtph264pay name=pay0 pt=96 config-interval=-1 )"
    )

    def caps(width: int) -> object:
        return Gst.Caps.from_string(
            f"video/x-raw,format=I420,width={width},height={given.height},framerate={given.rate}/1"
        )

    def configure(_: object, media: object) -> None:
        source = media.get_element().get_by_name("clock")
        source.set_property("caps", caps(given.width))
        began = time.monotonic()
        state = {"width": given.width, "shown": 0}

        def push() -> bool:
            if given.larger_after and time.monotonic() - began > given.larger_after and state["width"] == given.width:
                state["width"] *= 2
                source.set_property("caps", caps(state["width"]))
            drawn = picture(state["width"], given.height, int(time.time() * 1000))
            if frames:
                drawn = frames[state["shown"] // key % len(frames)]
                state["shown"] += 1
            if given.noise:
                start, free = random.randrange(1 << 20), len(drawn) // 3
                drawn = drawn[:-free] + noise[start : start + free]
            buffer = Gst.Buffer.new_wrapped(drawn)
            return source.emit("push-buffer", buffer) == Gst.FlowReturn.OK

        GLib.timeout_add(1000 // given.rate, push)

    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(launch)
    factory.set_shared(True)
    factory.connect("media-configure", configure)
    server = GstRtspServer.RTSPServer()
    server.set_service(str(given.port))
    if given.user:
        _ask_for_password(GstRtspServer, server, factory, *given.user.split(":", 1))
    server.get_mount_points().add_factory("/clock", factory)
    server.attach(None)
    print(server.get_bound_port(), flush=True)
    GLib.MainLoop().run()


def _ask_for_password(api: object, server: object, factory: object, user: str, password: str) -> None:
    auth = api.RTSPAuth()
    token = api.RTSPToken()
    token.set_string("media.factory.role", "viewer")
    auth.add_basic(api.RTSPAuth.make_basic(user, password), token)
    server.set_auth(auth)
    permissions = api.RTSPPermissions()
    permissions.add_permission_for_role("viewer", "media.factory.access", True)
    permissions.add_permission_for_role("viewer", "media.factory.construct", True)
    factory.set_permissions(permissions)


def picture(width: int, height: int, time_ms: int) -> bytes:
    """I420: the bits in the corner, grey elsewhere."""
    bits = f"{time_ms:0{BITS}b}"
    rows = []
    for start in range(0, BITS, ACROSS):
        cells = b"".join((b"\xeb" if bit == "1" else b"\x10") * CELL for bit in bits[start : start + ACROSS])
        rows.append((cells + b"\x80" * (width - len(cells))) * CELL)
    luma = b"".join(rows)
    return luma + b"\x80" * (width * height * 3 // 2 - len(luma))


def drawn_s(pixels) -> float:  # type: ignore[no-untyped-def]
    """The time that stands in such a picture (H, W, 3) uint8, in seconds of Unix time."""
    cells = [divmod(index, ACROSS) for index in range(BITS)]
    bits = "".join("01"[int(pixels[row * CELL + CELL // 2, at * CELL + CELL // 2, 1] > 128)] for row, at in cells)
    return int(bits, 2) / 1000


if __name__ == "__main__":
    sys.exit(main())
