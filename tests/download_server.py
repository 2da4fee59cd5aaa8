"""An HTTP server on loopback that sends any bytes as answers."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterable


def answer(body: bytes, status: int = 200, with_length: bool = True, **headers: str) -> bytes:
    """Return a correct HTTP answer. Underscores in the names of headers become hyphens."""
    headers["Connection"] = "close"  # the client must not use the connection for a redirect
    if with_length:
        headers["Content_Length"] = str(len(body))
    lines = [f"HTTP/1.1 {status} OK", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class DownloadServer(socketserver.ThreadingTCPServer):
    """Sends the pieces of each page, with pauses between them, and closes the connection.

    `requests` contains the path of every request, in order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, tuple[Iterable[bytes], float]] = {}
        self.requests: list[str] = []
        self.has_sent, self.has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self) -> DownloadServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def url(self, path: str) -> str:
        """Return the address of a path that starts with a slash."""
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def serve(self, path: str, *pieces: bytes) -> str:
        """Serve an answer at a path and return its address."""
        return self.serve_slowly(path, pieces, 0.0)

    def serve_slowly(self, path: str, pieces: Iterable[bytes], pause: float) -> str:
        """Serve an answer that may be endless, with a pause in seconds after each piece."""
        self.pages[path] = pieces, pause
        return self.url(path)


class _Handler(socketserver.StreamRequestHandler):
    server: DownloadServer

    def handle(self) -> None:
        path = self.rfile.readline().split()[1].decode()
        while self.rfile.readline().strip():
            pass
        self.server.requests.append(path)
        pieces, pause = self.server.pages.get(path, ([answer(b"", 404)], 0.0))
        with contextlib.suppress(OSError):  # the client has closed the connection
            for piece in pieces:
                self.wfile.write(piece)
                self.server.has_sent.set()
                if self.server.has_ended.wait(pause):
                    return
