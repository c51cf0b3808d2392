"""A web server on loopback for pictures, and for the ways in which a host can fail."""

from __future__ import annotations

import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.real.asking import IMAGES, VIDEOS


class MediaHost:
    """Serves tests/data by file name, and /status/CODE, /reset and /cut.

    `seen` has the path of every request, in order.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def __enter__(self) -> MediaHost:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0].lstrip("/")
                seen.append(self.path)
                if path.startswith("status/"):
                    self.send_error(int(path.removeprefix("status/")))
                elif path == "reset":
                    # A close that does not linger is a reset.
                    lingering = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
                    self.connection.close()
                elif path == "cut":
                    self.send_response(200)
                    self.send_header("Content-Length", "100000")
                    self.end_headers()
                    self.wfile.write(b"only the beginning")
                    self.close_connection = True
                else:
                    self._send_file(path)

            def _send_file(self, name: str) -> None:
                found = next((d / name for d in (IMAGES, VIDEOS) if (d / name).is_file()), None)
                if found is None:
                    self.send_error(404)
                    return
                content = found.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
