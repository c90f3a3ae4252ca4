"""Certificates of an authority of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path, address: str) -> None:
    """Make `ca.pem`, and `hub.pem` with `hub.key` for the host with this IP address. Raises `FileNotFoundError` without `openssl`."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    own = ("-subj", "/CN=ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # which Python 3.13 asks for
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", *own)
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "hub.key", "-out", "hub.csr", "-subj", f"/CN={address}")
    (folder / "names").write_text(f"subjectAltName=IP:{address}\nauthorityKeyIdentifier=keyid\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "hub.csr", "-out", "hub.pem", *signed)
