"""The gateway's description of itself, `/openapi.json`: its tokens, and how calls fail.

`/docs` and `/redoc` show it, without the internet.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.gateway.errors import GatewayError

OWN = "/api/v1"
"""What the paths of the gateway's own API begin with. All others are of other systems' clients, which know their errors."""

_ABOUT = """Environments, commands, files and models for callers that speak HTTP. `/api/v1` is the gateway's own API. Unchanged clients of
other systems call the other paths."""

_SCHEMES = {
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The token of a job: `tangram token JOB`."},
    "bearer": {"type": "http", "scheme": "bearer", "description": "The same token."},
    "basic": {"type": "http", "scheme": "basic", "description": "The same token as the password, for clients that take only a URL."},
}

_WORD = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["kind", "message", "cause", "fault"],
            "properties": {
                "kind": _WORD,
                "message": _WORD,
                "cause": {**_WORD, "description": "why, as in ends.md"},
                "fault": {"enum": ["program", "infrastructure", "caller"], "description": "whose fault it is"},
            },
        }
    },
}


def describe(app: FastAPI) -> None:
    """Have an application describe what FastAPI does not see by itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    schema["paths"] = dict(sorted(schema["paths"].items(), key=lambda path: not path[0].startswith(OWN)))
    schema["security"] = [{name: []} for name in _SCHEMES]
    components = schema.setdefault("components", {})
    components["securitySchemes"] = _SCHEMES
    components.setdefault("schemas", {})["Error"] = _ERROR
    answers = _answers()
    for path, methods in schema["paths"].items():
        for method in methods.values():
            if path.startswith(OWN):
                method["responses"] = {**{status: answer for status, answer in method["responses"].items() if status < "3"}, **answers}
            if "gateway" in method.get("tags", ()):
                method["security"] = []
    return schema


def _answers() -> dict[str, Any]:
    """Return the answers of the gateway's own API that say a failure, by status."""
    meanings = defaultdict[int, dict[str, None]](dict)
    left = GatewayError.__subclasses__()
    while left:
        error = left.pop(0)
        left += error.__subclasses__()
        meanings[error.status][(error.__doc__ or "").removeprefix("Raised when ").partition("\n")[0]] = None
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": " Or: ".join(said), "content": content} for status, said in sorted(meanings.items())}
