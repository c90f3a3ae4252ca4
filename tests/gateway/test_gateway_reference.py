"""The gateway's description of itself: pages that need no internet, tokens, and how calls fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

import httpx

from app.gateway import server
from tangram.settings import Settings


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> httpx.AsyncClient:
    """Return a caller of a gateway that is connected to nothing."""
    monkeypatch.setattr(server, "open_latest", lambda *_, **__: None)
    app = server.make_app(Settings(broker_url="redis://none", result_url="redis://none", state_dir=tmp_path), "sqlite://")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
async def test_the_pages_load_everything_from_the_gateway(unconnected: httpx.AsyncClient, page: str) -> None:
    async with unconnected as http:
        text = (await http.get(page)).text
        assets = re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert any(asset.endswith(".js") for asset in assets) and not re.search(r'["\'](?:https?:)?//', text), text
        for asset in assets:
            assert (await http.get(asset)).status_code == 200


async def test_the_schema_has_tokens_and_failures_and_begins_with_the_own_api(unconnected: httpx.AsyncClient) -> None:
    async with unconnected as http:
        schema: dict[str, Any] = (await http.get("/openapi.json")).json()
    first, *_, last = schema["paths"]
    assert first.startswith("/api/v1") and not last.startswith("/api/v1")
    opening = schema["paths"]["/api/v1/environments"]["post"]
    # A call without a token, for what is not there, in too large a body, on a stack that is full, or that fails
    assert {"201", "400", "401", "404", "409", "413", "422", "502", "503", "504"} <= opening["responses"].keys()
    assert opening["responses"]["503"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert {scheme["type"] for scheme in schema["components"]["securitySchemes"].values()} == {"apiKey", "http"}
    assert schema["security"] and schema["paths"]["/health"]["get"]["security"] == []
