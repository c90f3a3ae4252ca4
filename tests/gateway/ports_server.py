"""A server for environments, which says what it was asked. Arguments: the port, and the file to write once it listens."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers by path; any other than those below is echoed as JSON."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        """Answer one request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0]
        if name == "/bytes":
            self.give(200, body[::-1], {"Content-Type": "application/octet-stream"})
        elif name == "/moved":
            self.give(302, b"", {"Location": "/elsewhere", "Vary": "a", "Tangram-Cause": "forged"}, ("Vary", "b"))
        elif name == "/sticky":
            cookies = (("Set-Cookie", "a=1; Domain=.example.org; Path=/"), ("Set-Cookie", "b=2"))
            self.give(200, b"", {"Strict-Transport-Security": "max-age=9", "Clear-Site-Data": "*"}, *cookies)
        elif name == "/hop":
            self.give(200, b"", {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-End": "1"})
        elif name == "/large":
            self.give(200, b"x" * (5 << 20), {})
        elif name == "/garbage":
            self.wfile.write(b"\x00\x01 this is no HTTP\r\n\r\n")
            self.close_connection = True
        elif name == "/never":
            time.sleep(300)
        else:
            said = {"method": self.command, "path": self.path, "headers": self.headers.items(), "body": body.decode("latin-1")}
            self.give(201 if self.command == "POST" else 200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def give(self, status: int, body: bytes, headers: dict[str, str], *more: tuple[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in (*headers.items(), *more, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    Path(sys.argv[2]).touch()
    server.serve_forever()
