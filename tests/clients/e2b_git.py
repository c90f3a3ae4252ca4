"""What shows how E2B's git and templates go; importing it adds to `e2b_checks.CHECKS`."""

from __future__ import annotations

import json
from collections.abc import Callable

import e2b

from tests.clients.e2b_checks import CHECKS, Here, check, refused

# -- git: each in a repository of its own, with a clone beside it ----------------------------------------------------


def repository(here: Here, name: str) -> str:
    """Make a repository with one commit, a bare copy of it as `origin`, and return its path."""
    here.says(
        f"git init -q -b main {name} && cd {name} && git config user.name n && git config user.email e@example.org && echo 1 > file "
        f"&& git add file && git commit -qm first && git clone -q --bare . ../{name}.git && git remote add origin ../{name}.git"
    )
    return name


def git(method: str) -> Callable[[Callable[[Here, e2b.Sandbox, str], object]], None]:
    """Register a check that is given a repository."""

    def register(function: Callable[[Here, e2b.Sandbox, str], object]) -> None:
        CHECKS[f"Git.{method}"] = lambda here: function(here, here.sandbox, repository(here, f"git-{method.replace('_', '-')}"))

    return register


@git("init")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.init(f"{path}/new", initial_branch="trunk")
    assert here.says(f"cd {path}/new && git symbolic-ref HEAD") == "refs/heads/trunk\n"


@git("add")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"echo 2 > {path}/other")
    sandbox.git.add(path)
    assert here.says(f"cd {path} && git diff --cached --name-only") == "other\n"


@git("status")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"echo 2 > {path}/other")
    status = sandbox.git.status(path)
    assert (status.current_branch, [one.name for one in status.file_status]) == ("main", ["other"])


@git("commit")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.commit(path, "it's second", allow_empty=True)
    assert here.says(f"cd {path} && git log -1 --format=%s") == "it's second\n"


@git("branches")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && git branch other")
    found = sandbox.git.branches(path)
    assert (sorted(found.branches), found.current_branch) == (["main", "other"], "main")


@git("create_branch")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.create_branch(path, "made")
    assert "made" in here.says(f"cd {path} && git branch")


@git("checkout_branch")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && git branch other")
    sandbox.git.checkout_branch(path, "other")
    assert here.says(f"cd {path} && git branch --show-current") == "other\n"


@git("delete_branch")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && git branch other")
    sandbox.git.delete_branch(path, "other")
    assert "other" not in here.says(f"cd {path} && git branch")


@git("clone")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    url = f"file://{here.says('pwd').strip()}/{path}.git"
    sandbox.git.clone(url, f"{path}-cloned")
    assert here.says(f"cat {path}-cloned/file") == "1\n"


@git("push")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && git commit -q --allow-empty -m pushed")
    sandbox.git.push(path, "origin", "main")
    assert here.says(f"cd {path}.git && git log -1 --format=%s main") == "pushed\n"


@git("pull")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && git commit -q --allow-empty -m pulled && git push -q origin main && git reset -q --hard HEAD~1")
    sandbox.git.pull(path, "origin", "main")
    assert here.says(f"cd {path} && git log -1 --format=%s") == "pulled\n"


@git("remote_add")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.remote_add(path, "second", "https://example.org/it.git")
    assert here.says(f"cd {path} && git remote get-url second") == "https://example.org/it.git\n"


@git("remote_get")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    assert sandbox.git.remote_get(path, "origin") == f"../{path}.git" and not sandbox.git.remote_get(path, "none")


@git("reset")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && echo 2 > file")
    sandbox.git.reset(path, mode="hard")
    assert here.says(f"cat {path}/file") == "1\n"


@git("restore")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    here.says(f"cd {path} && echo 2 > file")
    sandbox.git.restore(path, ["file"])
    assert here.says(f"cat {path}/file") == "1\n"


@git("set_config")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.set_config("user.name", "somebody", scope="local", path=path)
    assert here.says(f"cd {path} && git config user.name") == "somebody\n"


@git("get_config")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    assert sandbox.git.get_config("user.email", scope="local", path=path) == "e@example.org"


@git("configure_user")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.configure_user("who", "who@example.org", scope="local", path=path)
    assert here.says(f"cd {path} && git config user.email") == "who@example.org\n"


@git("dangerously_authenticate")
def _(here: Here, sandbox: e2b.Sandbox, path: str) -> None:
    sandbox.git.dangerously_authenticate("who", "secret", host="example.org")
    asked = here.says(f"cd {path} && printf 'protocol=https\\nhost=example.org\\n\\n' | git credential fill")
    assert "password=secret" in asked


# -- templates ------------------------------------------------------------------------------------------------------


@check("Template.build")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().from_image("python:3.12"), "built:1", memory_mb=256, **here.control)
    assert here.new(template="built:1").kill()
    stepped = e2b.Template().from_image("python:3.12").run_cmd("true")
    refused(lambda: e2b.Template.build(stepped, "stepped", **here.control), "build an image that has them", e2b.BuildException)


@check("Template.build_in_background")
def _(here: Here) -> None:
    built = e2b.Template.build_in_background(e2b.Template().from_image("python:3.12"), "behind:1", **here.control)
    assert e2b.Template.get_build_status(built, **here.control).status.value == "ready"


@check("Template.get_build_status")
def _(here: Here) -> None:
    built = e2b.Template.build(e2b.Template().from_image("python:3.12"), "status:1", **here.control)
    assert e2b.Template.get_build_status(built, **here.control).status.value == "ready"


for _name in ("alias_exists", "exists"):

    def _known(here: Here, name: str = _name) -> None:
        known = getattr(e2b.Template, name)
        assert not known(f"known-{name}:1", **here.control)
        e2b.Template.build(e2b.Template().from_image("python:3.12"), f"known-{name}:1", **here.control)
        assert known(f"known-{name}:1", **here.control)

    CHECKS[f"Template.{_name}"] = _known


@check("Template.assign_tags")
def _(here: Here) -> None:
    refused(lambda: e2b.Template.assign_tags("known", "tag", **here.control), "405", Exception)


@check("Template.get_tags")
def _(here: Here) -> None:
    refused(lambda: e2b.Template.get_tags("known", **here.control), "405", Exception)


@check("Template.remove_tags")
def _(here: Here) -> None:
    refused(lambda: e2b.Template.remove_tags("known", "tag", **here.control), "404", Exception)


def _image_of(built: e2b.Template) -> str:
    return str(json.loads(e2b.Template.to_json(built))["fromImage"])


_IMAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "from_image": (("python:3.12",), "python:3.12"),
    "from_base_image": ((), "e2bdev/base"),
    "from_python_image": (("3.12",), "python:3.12"),
    "from_node_image": (("22",), "node:22"),
    "from_bun_image": (("1",), "oven/bun:1"),
    "from_debian_image": (("stable-slim",), "debian:stable-slim"),
    "from_ubuntu_image": (("24.04",), "ubuntu:24.04"),
    "from_alpine_image": (("3.22",), "alpine:3.22"),
    "from_arch_image": ((), "archlinux:latest"),
    "from_fedora_image": (("44",), "fedora:44"),
}
for _name, (_arguments, _image) in _IMAGES.items():

    def _made(here: Here, name: str = _name, arguments: tuple[str, ...] = _arguments, image: str = _image) -> None:
        template = getattr(e2b.Template(), name)(*arguments)
        assert _image_of(template).startswith(image)
        e2b.Template.build(template, f"{name}:1", **here.control)
        sandbox = here.new(template=f"{name}:1")
        rows = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
        here.served.live.until(lambda: [row[0].startswith(image) for row in here.served.live.rows(rows)] == [True])
        assert sandbox.kill()

    CHECKS[f"Template.{_name}"] = _made


@check("Template.from_template")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().from_image("python:3.12"), "first:1", **here.control)
    e2b.Template.build(e2b.Template().from_template("first:1"), "second:1", **here.control)
    assert here.new(template="second:1").kill()


@check("Template.skip_cache")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().skip_cache().from_image("python:3.12"), "uncached:1", **here.control)
    assert here.new(template="uncached:1").kill()


@check("Template.to_json")
def _(here: Here) -> None:
    assert _image_of(e2b.Template().from_image("python:3.12")) == "python:3.12"


@check("Template.to_dockerfile")
def _(here: Here) -> None:
    assert e2b.Template.to_dockerfile(e2b.Template().from_image("python:3.12")).startswith("FROM python:3.12")


@check("Template.from_dockerfile")
def _(here: Here) -> None:
    template = e2b.Template().from_dockerfile("FROM python:3.12\nRUN true\n")
    refused(lambda: e2b.Template.build(template, "dockerfile", **here.control), "build an image that has them", e2b.BuildException)


@check("Template.from_aws_registry")
def _(here: Here) -> None:
    template = e2b.Template().from_aws_registry("1.dkr.ecr.example.org/it:1", "id", "secret", "region")
    refused(lambda: e2b.Template.build(template, "aws", **here.control), "credentials of registries", e2b.BuildException)


@check("Template.from_gcp_registry")
def _(here: Here) -> None:
    template = e2b.Template().from_gcp_registry("gcr.example.org/it:1", {"type": "service_account"})
    refused(lambda: e2b.Template.build(template, "gcp", **here.control), "credentials of registries", e2b.BuildException)
