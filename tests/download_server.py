"""An HTTP server on loopback that misbehaves on request."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Page:
    """What one path answers, and how badly."""

    body: bytes
    status: int = 200
    ranges: bool = True  # honour Range requests
    with_length: bool = True
    failures: int | None = None  # misbehave so often, then be good; None: always
    truncate_after: int | None = None  # close the connection after so many bytes
    stall_after: int | None = None  # send so many bytes, then nothing
    headers: Mapping[str, str] = field(default_factory=dict)  # more of them


class DownloadServer:
    """Serves pages from a thread, and remembers who asked for what.

    `requests` holds (path, Range header or None) of every GET, in order. `stalled` is set when a
    page has stalled; the connection is then held until `release` is set or the server ends.
    """

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.stalled, self.release = threading.Event(), threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> DownloadServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, path: str) -> str:
        """Return the address of a path that starts with a slash."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{path}"

    def serve(self, path: str, body: bytes, **behaviour) -> str:
        """Answer a path with a page; returns its address."""
        self.pages[path] = Page(body, **behaviour)
        return self.url(path)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: DownloadServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.owner.requests.append((self.path, asked))
        page = self.owner.pages.get(self.path)
        if page is None:
            self.send_error(404)
            return
        good = page.failures == 0
        if page.failures:
            page.failures -= 1
        status = 200 if good else page.status
        start = int(re.match(r"bytes=(\d+)-", asked).group(1)) if asked and page.ranges else 0
        if status == 200 and start:
            status = 206 if start < len(page.body) else 416
        body = b"" if status == 416 else page.body[start:]
        self.send_response(status)
        for name, value in page.headers.items():
            self.send_header(name, value)
        if status == 206:
            self.send_header(
                "Content-Range", f"bytes {start}-{len(page.body) - 1}/{len(page.body)}"
            )
        if page.with_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        stall = None if good else page.stall_after
        cut = None if good else page.truncate_after
        self.wfile.write(body[: cut if stall is None else stall])
        if stall is not None:
            self.wfile.flush()
            self.owner.stalled.set()
            self.owner.release.wait()

    def log_message(self, *_: object) -> None:
        """Keep the test output free of access logs."""
