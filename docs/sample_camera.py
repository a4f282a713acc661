"""A camera to practise with: `/usr/bin/python3 docs/sample_camera.py FOLDER [--serve PORT]`; Debian's Python is enough.

FOLDER gets shipped photos of hands (lab/demo/shipped/README.md): `door/` and `hall/`, each what one camera sees, in
turn a fist and one, two and five fingers; and `new/`, labelled photos that neither sees. `--serve` shows `door/` as a
stream, rtsp://127.0.0.1:PORT/door, a photo every two seconds, for ever. It needs python3-gi, gir1.2-gst-rtsp-server-1.0
and gstreamer1.0-plugins-base, -good and -ugly.
"""

import argparse
import sys
import zipfile
from pathlib import Path

HANDS = Path(__file__).resolve().parents[1] / "lab" / "demo" / "shipped" / "sign_digits.zip"
SIGNS = {"0": "fist", "1": "one", "2": "two", "5": "five"}
EACH = {"door": 12, "hall": 6, "new": 10}  # photos of each sign
PIPELINE = (
    "( multifilesrc location={folder}/%03d.jpg loop=true caps=image/jpeg,framerate=1/2 ! jpegdec ! videoconvert"
    " ! videoscale ! videorate ! video/x-raw,format=I420,width=320,height=320,framerate=5/1"
    " ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=5"
    " ! rtph264pay name=pay0 pt=96 config-interval=-1 )"
)


def main() -> None:
    """Write the photos, and serve."""
    parser = argparse.ArgumentParser(description="A camera to practise with.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT")
    given = parser.parse_args()
    write(given.folder)
    if given.serve:
        serve(given.folder / "door", given.serve)


def write(folder: Path) -> None:
    """The photos; which hand is where, is the same each time."""
    with zipfile.ZipFile(HANDS) as archive:
        for row, (digit, sign) in enumerate(SIGNS.items()):
            names = iter([name for name in archive.namelist() if name.startswith(f"{digit}/")][::3])
            for place, count in EACH.items():
                for number in range(count):
                    name = next(names)
                    camera = f"{number * len(SIGNS) + row:03d}.jpg"
                    path = folder / place / (f"{sign}/{Path(name).name}" if place == "new" else camera)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))


def serve(folder: Path, port: int) -> None:
    """Show the photos of a folder as a stream, until this is killed."""
    try:
        import gi

        gi.require_version("Gst", "1.0")
        gi.require_version("GstRtspServer", "1.0")
        from gi.repository import GLib, Gst, GstRtspServer
    except (ImportError, ValueError):
        sys.exit("error: no RTSP server, try apt install python3-gi gir1.2-gst-rtsp-server-1.0, or --camera folder:")
    Gst.init(None)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(PIPELINE.format(folder=folder))
    factory.set_shared(True)
    server = GstRtspServer.RTSPServer()
    server.set_service(str(port))
    server.get_mount_points().add_factory("/door", factory)
    if not server.attach(None):
        sys.exit(f"error: port {port}, expected a free one, got one in use, try another")
    print(f"rtsp://127.0.0.1:{port}/door", flush=True)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main()
