"""Which methods of E2B's client are served, and how those differ that do not do what they do at E2B."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "2.63.0"

_NO_SNAPSHOT = "refused: 501"
_NO_BUILD = "refused: an image is built where images are built, and named here"
_COMMAND = "differs: as the command that it is: needs git in the image"


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a client, and how it goes here: `works`, `differs: …` or `refused: …`."""

    method: str
    how: str = "works"
    client: str = "e2b"
    version: str = VERSION


METHODS = (
    Method("Sandbox.create", "differs: `network` and `allow_internet_access` are for the operator of the nodes to say"),
    Method("Sandbox.connect"),
    Method("Sandbox.list"),
    Method("Sandbox.get_info", "differs: one core, as every command gets what it asks for; no disk size"),
    Method("Sandbox.is_running"),
    Method("Sandbox.set_timeout"),
    Method("Sandbox.kill"),
    Method("Sandbox.get_metrics", "differs: no samples; the journal has what each command used"),
    Method("Sandbox.update_network", "differs: noted in the log, without effect"),
    Method("Sandbox.download_url", "differs: needs a host name for each sandbox (E2B_DOMAIN), not E2B_SANDBOX_URL"),
    Method("Sandbox.upload_url", "differs: as download_url"),
    Method("Sandbox.get_host", "differs: HTTP alone, no WebSocket; every request needs the sandbox's token or the job's"),
    Method("Sandbox.get_mcp_url", "refused: no sandbox runs E2B's MCP gateway"),
    Method("Sandbox.get_mcp_token", "refused: as get_mcp_url"),
    Method("Sandbox.pause", _NO_SNAPSHOT),
    Method("Sandbox.beta_pause", _NO_SNAPSHOT),
    Method("Sandbox.fork", _NO_SNAPSHOT),
    Method("Sandbox.create_snapshot", _NO_SNAPSHOT),
    Method("Sandbox.list_snapshots", "refused: 404"),
    Method("Sandbox.delete_snapshot", "differs: there is none, so False"),
    Method("Commands.run", "differs: runs as the sandbox's own user, whoever is named; a login shell, as at E2B"),
    Method("Commands.list"),
    Method("Commands.kill", "differs: what the command has started ends with it"),
    Method("Commands.connect", "differs: begins with what was printed before"),
    Method("Commands.send_stdin"),
    Method("Commands.stream_input"),
    Method("Commands.close_stdin"),
    Method("CommandHandle.wait"),
    Method("CommandHandle.kill"),
    Method("CommandHandle.disconnect"),
    Method("CommandHandle.send_stdin"),
    Method("CommandHandle.close_stdin"),
    Method("Pty.create"),
    Method("Pty.connect"),
    Method("Pty.send_stdin"),
    Method("Pty.stream_input"),
    Method("Pty.resize"),
    Method("Pty.kill"),
    Method("Filesystem.read"),
    Method("Filesystem.write", "differs: no metadata; in process sandboxes, paths begin at the work folder or below it"),
    Method("Filesystem.write_files", "differs: as write"),
    Method("Filesystem.list"),
    Method("Filesystem.exists"),
    Method("Filesystem.get_info"),
    Method("Filesystem.rename"),
    Method("Filesystem.remove"),
    Method("Filesystem.make_dir"),
    Method("Filesystem.watch_dir", "refused: unimplemented"),
    *(
        Method(f"Git.{name}", _COMMAND)
        for name in [
            "add",
            "branches",
            "checkout_branch",
            "clone",
            "commit",
            "configure_user",
            "create_branch",
            "dangerously_authenticate",
            "delete_branch",
            "get_config",
            "init",
            "pull",
            "push",
            "remote_add",
            "remote_get",
            "reset",
            "restore",
            "set_config",
            "status",
        ]
    ),
    Method("Template.build", "differs: an image without steps is ready at once; steps are refused"),
    Method("Template.build_in_background", "differs: as build"),
    Method("Template.get_build_status"),
    Method("Template.alias_exists"),
    Method("Template.exists"),
    Method("Template.assign_tags", "refused: 405"),
    Method("Template.get_tags", "refused: 405"),
    Method("Template.remove_tags", "refused: 404"),
    *(
        Method(f"Template.{name}")
        for name in [
            "from_image",
            "from_template",
            "from_base_image",
            "from_python_image",
            "from_node_image",
            "from_bun_image",
            "from_debian_image",
            "from_ubuntu_image",
            "from_alpine_image",
            "from_arch_image",
            "from_fedora_image",
            "skip_cache",
            "to_json",
            "to_dockerfile",
        ]
    ),
    Method("Template.from_dockerfile", _NO_BUILD),
    Method("Template.from_aws_registry", "refused: the engines of the nodes have the credentials of registries"),
    Method("Template.from_gcp_registry", "refused: as from_aws_registry"),
)
