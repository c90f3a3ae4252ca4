"""How those methods of E2B's client go here that do not do what they do at E2B. `tests/clients/e2b_checks.py` checks each method."""

from __future__ import annotations

_NO_SNAPSHOT = "refused: 501"
_NO_BUILD = "refused: an image is built where images are built, and named here"
_COMMAND = "differs: as the command that it is: needs git in the image"

OTHERWISE = {
    "Sandbox.create": "differs: `network` and `allow_internet_access` are for the operator of the nodes to say",
    "Sandbox.get_info": "differs: one core, as every command gets what it asks for; no disk size",
    "Sandbox.get_metrics": "differs: no samples; the journal has what each command used",
    "Sandbox.update_network": "differs: noted in the log, without effect",
    "Sandbox.download_url": "differs: needs a host name for each sandbox (E2B_DOMAIN), not E2B_SANDBOX_URL",
    "Sandbox.upload_url": "differs: as download_url",
    "Sandbox.get_host": "differs: HTTP alone, no WebSocket; every request needs the sandbox's token or the job's",
    "Sandbox.get_mcp_url": "refused: no sandbox runs E2B's MCP gateway",
    "Sandbox.get_mcp_token": "refused: as get_mcp_url",
    "Sandbox.pause": _NO_SNAPSHOT,
    "Sandbox.beta_pause": _NO_SNAPSHOT,
    "Sandbox.fork": _NO_SNAPSHOT,
    "Sandbox.create_snapshot": _NO_SNAPSHOT,
    "Sandbox.list_snapshots": "refused: 404",
    "Sandbox.delete_snapshot": "differs: there is none, so False",
    "Commands.run": "differs: runs as the sandbox's own user, whoever is named; a login shell, as at E2B",
    "Commands.kill": "differs: what the command has started ends with it",
    "Commands.connect": "differs: begins with what was printed before",
    "Filesystem.write": "differs: no metadata; the answer has the path as it was given",
    "Filesystem.write_files": "differs: as write",
    "Filesystem.watch_dir": "refused: unimplemented",
    "Template.build": "differs: an image without steps is ready at once; steps and `tags` are refused",
    "Template.build_in_background": "differs: as build",
    "Template.assign_tags": "refused: 405",
    "Template.get_tags": "refused: 404",
    "Template.remove_tags": "refused: 404",
    "Template.from_dockerfile": _NO_BUILD,
    "Template.from_aws_registry": "refused: the engines of the nodes have the credentials of registries",
    "Template.from_gcp_registry": "refused: as from_aws_registry",
}
"""`differs: …` or `refused: …`, by method."""


def how(method: str) -> str:
    """Return how a method goes here."""
    return OTHERWISE.get(method, _COMMAND if method.startswith("Git.") else "works")
