"""An HTTP server on loopback that misbehaves on request."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Page:
    """The answer of one path, and how it misbehaves."""

    body: bytes
    status: int = 200
    with_length: bool = True
    failures: int | None = None  # number of responses that misbehave, or None for all responses
    truncate_after: int | None = None  # close the connection after this many bytes
    stall_after: int | None = None  # pause forever after this many bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers


class DownloadServer:
    """Serves pages from a thread.

    `requests` contains the path of every GET, in order. `stalled` is set when a page has stalled.
    The connection is then held until `release` is set or the server ends.
    """

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requests: list[str] = []
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

    def serve(self, path: str, body: bytes, **behavior) -> str:
        """Serve a page at a path and return its address."""
        self.pages[path] = Page(body, **behavior)
        return self.url(path)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: DownloadServer

    def do_GET(self) -> None:
        self.owner.requests.append(self.path)
        page = self.owner.pages.get(self.path)
        if page is None:
            self.send_error(404)
            return
        good = page.failures == 0
        if page.failures:
            page.failures -= 1
        self.send_response(200 if good else page.status)
        for name, value in page.headers.items():
            self.send_header(name, value)
        if page.with_length:
            self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        stall = None if good else page.stall_after
        cut = None if good else page.truncate_after
        self.wfile.write(page.body[: cut if stall is None else stall])
        if stall is not None:
            self.wfile.flush()
            self.owner.stalled.set()
            self.owner.release.wait()

    def log_message(self, *_: object) -> None:
        """Keep the test output free of access logs."""
