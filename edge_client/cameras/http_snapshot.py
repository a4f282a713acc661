"""`http://[user:password@]host[:port]/path`, or https: a camera's snapshot, asked for anew for each picture.

The server may be hostile, or another than it was. So of each answer:

- all of it, from the connection to the last byte, comes within ten seconds, however it drips;
- it has at most 16 MiB, and as many bytes as it says;
- a redirect is followed three times, to the same scheme, host and port; what it says beside is not read;
- a password goes to this host alone, as it asks: Basic or Digest. No proxy of the environment is asked.

A picture was taken when it was asked for. Whether the camera keeps an older one cannot be seen.
"""

from __future__ import annotations

import functools
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

from protofleet.edge_client.cameras.camera import LARGEST_BYTES, CameraGoneError, Pace, Picture
from protofleet.edge_client.cameras.deadline import Deadline
from protofleet.edge_client.cameras.signature import signature
from protofleet.edge_client.cameras.url import CameraUrl, read_url

__all__ = ["HttpSnapshot"]

_PORTS = {"http": 80, "https": 443}
_WHOLE_S = 10.0
_REDIRECTS = 3
_PART_BYTES = 1 << 16


class HttpSnapshot:
    """A URL that gives a picture whenever it is asked."""

    ends = False

    def __init__(self, text: str) -> None:
        self._url = read_url(text, _PORTS, "http://192.168.1.20/snapshot.jpg")
        self.shown = str(self._url)

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`."""
        pace = Pace(every_s)
        while True:
            pace.wait()
            asked_s = time.time()
            yield Picture(_fetched(self._url), asked_s)


def _fetched(url: CameraUrl) -> bytes:
    deadline = Deadline(_WHOLE_S)
    try:
        with _opener(url, deadline).open(url.bare, timeout=_WHOLE_S) as response:
            body = _body(response)
        why = ""
    except CameraGoneError as error:
        why = str(error)
    except urllib.error.HTTPError as error:
        error.close()
        why = f"HTTP {error.code}"
    except Exception as error:  # urllib and http.client raise nearly anything on what is no HTTP
        why = _why(error)
    finally:
        deadline.close()
    if deadline.is_over:  # a head or a body that was cut off may look whole
        raise CameraGoneError(_late())
    if why:
        raise CameraGoneError(why)
    return body


def _body(response: Any) -> bytes:
    parts, count = [], 0
    while part := response.read(_PART_BYTES):
        parts.append(part)
        count += len(part)
        if count > LARGEST_BYTES:
            raise CameraGoneError(f"more than {LARGEST_BYTES >> 20} MiB")
    said = response.headers.get("Content-Length")
    if said is not None and said != str(count):
        raise CameraGoneError(f"{count:,} bytes, and another number in Content-Length")
    return b"".join(parts)


def _late() -> str:
    return f"no whole answer in {_WHOLE_S:g} s"


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError) and not reason.errno:
        return _late()
    if isinstance(reason, ssl.SSLError):
        return f"TLS: {(reason.reason or 'no TLS').replace('_', ' ').lower()}"
    if isinstance(reason, OSError) and reason.errno:
        return os.strerror(reason.errno) if reason.errno > 0 else "no such host"
    return "no HTTP" if isinstance(reason, http.client.HTTPException) else type(reason).__name__


def _opener(url: CameraUrl, deadline: Deadline) -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Http(deadline),
        _Https(deadline),
        _Redirects(url),
        _Password(url),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    opener.addheaders = []
    return opener


def _connection(kind: Any, deadline: Deadline, *args: Any, **named: Any) -> Any:
    connection = kind(*args, **named)
    connection._create_connection = deadline.connect
    return connection


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._makes = functools.partial(_connection, http.client.HTTPConnection, deadline)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._makes, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._makes = functools.partial(_connection, http.client.HTTPSConnection, deadline)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._makes, req)


class _Redirects(urllib.request.BaseHandler):
    def __init__(self, url: CameraUrl) -> None:
        self._host, self._count = _host_of(url.bare), 0

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        fp.close()
        target = urljoin(req.full_url, headers.get("Location", ""))
        self._count += 1
        if _host_of(target) != self._host:
            raise CameraGoneError("it redirects to another address")
        if self._count > _REDIRECTS:
            raise CameraGoneError(f"more than {_REDIRECTS} redirects")
        return self.parent.open(target, timeout=req.timeout)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Password(urllib.request.BaseHandler):
    def __init__(self, url: CameraUrl) -> None:
        self._url = url

    def http_error_401(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        if req.has_header("Authorization") or not self._url.user + self._url.password:
            return None
        fp.close()
        signed = signature(headers.get_all("WWW-Authenticate", []), self._url)(req.get_method(), req.selector)
        return self.parent.open(
            urllib.request.Request(req.full_url, headers={"Authorization": signed}), timeout=req.timeout
        )


def _host_of(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
