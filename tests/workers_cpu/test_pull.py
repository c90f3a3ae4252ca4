"""Pulls of images, as far as they need no engine: what the engine says of one that fails, in its several forms."""

from __future__ import annotations

import pytest

from tests.serving import Quiet, serving
from workers.cpu.docker.pull import Pull, PullRequest
from workers.cpu.errors import ImageMissing


@pytest.mark.parametrize(
    "line",
    [
        b'{"errorDetail": {"message": "no space left"}, "error": "no space left"}',
        b'{"errorDetail": {"code": 1, "message": "no space left"}}',
        b'{"error": "no space left"}',
    ],
)
def test_what_the_engine_says_of_a_pull_that_fails_underway_is_why_the_image_is_missing(line: bytes) -> None:
    class Engine(Quiet):
        def do_POST(self) -> None:
            said = b'{"status": "Pulling from a/b", "id": "latest"}\r\n' + line + b"\r\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    with serving(Engine) as port:
        request = PullRequest(url=f"http://127.0.0.1:{port}/images/create", socket=None, params={}, headers={}, stall_s=60.0)
        pull = Pull("a/b", request, 60.0, lambda done, total: None)
        with pytest.raises(ImageMissing, match="image 'a/b' cannot be had: no space left"):
            pull.done.result(60)
