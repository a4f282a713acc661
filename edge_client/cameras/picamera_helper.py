"""The process beside `picamera.py`, of the system's Python: a JPEG for each line of standard input.

It imports nothing but Picamera2 and the standard library, and is never imported. An answer is `P`, four bytes of length
and the JPEG; or `E`, the length and a sentence.
"""

import io
import os
import sys


def main(number: int) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        camera = _started(number)
    except Exception as error:
        sys.stdin.buffer.readline()
        _put(answers, b"E", _in_words(error))
        return
    while sys.stdin.buffer.readline():
        try:
            picture = io.BytesIO()
            camera.capture_file(picture, format="jpeg")
            _put(answers, b"P", picture.getvalue())
        except Exception as error:
            _put(answers, b"E", _in_words(error))
            return


def _started(number):  # type: ignore[no-untyped-def]
    from picamera2 import Picamera2

    camera = Picamera2(number)
    camera.configure(camera.create_still_configuration(main={"size": (1280, 720)}, buffer_count=2))
    camera.start()
    return camera


def _in_words(error: Exception) -> bytes:
    if isinstance(error, ImportError):
        return b"no picamera2 for /usr/bin/python3, try apt install python3-picamera2"
    return " ".join(f"{type(error).__name__}: {error}".split()).encode()[:200]


def _put(answers: io.BufferedWriter, kind: bytes, content: bytes) -> None:
    answers.write(kind + len(content).to_bytes(4, "big") + content)
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
