"""A registry of images on this machine, as far as fetching goes: version 2 of its HTTP API, with small images made on the spot.

The engine takes registries on 127.0.0.0/8 without TLS.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.serving import Quiet, serving

from .images import add_file, add_tools, busybox
from .support import engine

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
PIECES = 40


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Registry:
    """What it serves and how. Each piece of an image is sent after `pause_s`; with `login`, only who knows it is served."""

    login: tuple[str, str] | None = None
    pause_s: float = 0.0
    stalled: threading.Event = field(default_factory=threading.Event)
    stalls: bool = False
    """Send half of an image, then nothing until `stalled` is set."""
    is_silent: bool = False
    """Answer no question for a manifest until `stalled` is set."""
    broken_off: int = 0
    """How many answers nobody wanted to the end."""
    address: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    """How often the layers of a repository were asked for."""
    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def add(self, repository: str, tag: str = "latest", *, mark: str = "1", ballast: int = 0) -> str:
        """Serve an image with busybox, `mark` in /mark and `ballast` bytes besides; return its digest."""
        layer = _layer(mark, ballast)
        packed = gzip.compress(layer, 1, mtime=0)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }
        coded = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(coded), "digest": digest(coded)},
            "layers": [{"mediaType": LAYER, "size": len(packed), "digest": digest(packed)}],
        }
        listed = json.dumps(manifest).encode()
        self.blobs |= {digest(coded): coded, digest(packed): packed}
        self.manifests |= {f"{repository}:{tag}": listed, f"{repository}:{digest(listed)}": listed}
        return digest(listed)


def _layer(mark: str, ballast: int) -> bytes:
    program = busybox()
    assert program is not None, "busybox-static is not installed"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        add_tools(archive, program)
        add_file(archive, "mark", mark.encode())
        add_file(archive, "ballast", bytes(ballast))
    return packed.getvalue()


@contextmanager
def served(registry: Registry) -> Iterator[Registry]:
    """Serve as long as the block lasts, of which nothing stays with the engine; `address` is the registry's part of references."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            _answer(self, registry)

        do_HEAD = do_GET

    with serving(Handler) as port:
        registry.address = f"127.0.0.1:{port}"
        try:
            yield registry
        finally:
            for image in engine().images(filters={"reference": f"{registry.address}/*/*"}):
                subprocess.run(["docker", "rmi", "-f", image["Id"]], capture_output=True)
            registry.stalled.set()


def _answer(handler: BaseHTTPRequestHandler, registry: Registry) -> None:
    if registry.login is not None:
        expected = base64.b64encode(":".join(registry.login).encode()).decode()
        if handler.headers.get("Authorization") != f"Basic {expected}":
            refusal = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}).encode()
            return _send(handler, 401, refusal, {"WWW-Authenticate": 'Basic realm="here"', "Content-Type": "application/json"})
    path = handler.path.removeprefix("/v2/")
    if path == "":
        return _send(handler, 200, b"{}", {"Content-Type": "application/json"})
    repository, kind, name = path.rsplit("/", 2)
    found = registry.manifests.get(f"{repository}:{name}") if kind == "manifests" else registry.blobs.get(name)
    if found is None:
        refusal = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}).encode()
        return _send(handler, 404, refusal, {"Content-Type": "application/json"})
    if kind == "manifests" and registry.is_silent:
        registry.asked[f"manifest of {repository}"] += 1
        registry.stalled.wait()
    if kind == "manifests":
        return _send(handler, 200, found, {"Content-Type": MANIFEST, "Docker-Content-Digest": digest(found)})
    is_layer = found[:2] == b"\x1f\x8b"
    if is_layer and handler.command == "GET":
        registry.asked[repository] += 1
    _send(handler, 200, found, {"Content-Type": "application/octet-stream"}, registry if is_layer else None)


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], slowly: Registry | None = None) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    size = len(body) if slowly is None else max(1, len(body) // PIECES)
    try:
        for start in range(0, len(body), size):
            if slowly is not None and slowly.stalls and start >= len(body) // 2:
                slowly.stalled.wait()
            if slowly is not None and slowly.pause_s:
                slowly.stalled.wait(slowly.pause_s)
            handler.wfile.write(body[start : start + size])
    except OSError:
        handler.close_connection = True
        if slowly is not None:
            slowly.broken_off += 1
