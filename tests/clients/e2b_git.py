"""What shows how E2B's git and templates go; importing it adds to `e2b_checks.CHECKS`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import e2b

from tests.clients.e2b_checks import CHECKS, Here, check, refused

# -- git: repositories with a clone beside them ----------------------------------------------------------------------


def repository(here: Here, name: str) -> str:
    """Make a repository with one commit, a bare copy of it as `origin`, and return its path."""
    here.says(
        f"git init -q -b main {name} && cd {name} && git config user.name n && git config user.email e@example.org && echo 1 > file "
        f"&& git add file && git commit -qm first && git clone -q --bare . ../{name}.git && git remote add origin ../{name}.git"
    )
    return name


CHANGES = "init add commit create_branch checkout_branch delete_branch push pull remote_add reset restore"
CONFIGURES = "set_config configure_user dangerously_authenticate"


@check(*(f"Git.{name}" for name in f"{CHANGES} {CONFIGURES}".split()))
def _(here: Here) -> None:
    git, path = here.sandbox.git, repository(here, "git-changed")

    def says(command: str) -> str:
        return here.says(f"cd {path} && {command}").removesuffix("\n")

    says("echo 2 > other")
    git.add(path)
    assert says("git diff --cached --name-only") == "other"
    git.commit(path, "it's second", allow_empty=True)
    assert says("git log -1 --format=%s") == "it's second"
    git.create_branch(path, "made")
    assert says("git branch --format='%(refname:short)' --list made") == "made"
    git.checkout_branch(path, "main")
    git.delete_branch(path, "made")
    assert says("git branch --format='%(refname:short)'") == "main"
    git.push(path, "origin", "main")
    assert says(f"git -C ../{path}.git log -1 --format=%s main") == "it's second"
    says("git reset -q --hard HEAD~1")
    git.pull(path, "origin", "main")
    assert says("git log -1 --format=%s") == "it's second"
    git.remote_add(path, "second", "https://example.org/it.git")
    assert says("git remote get-url second") == "https://example.org/it.git"
    for undo in (lambda: git.restore(path, ["file"]), lambda: git.reset(path, mode="hard")):
        says("echo 2 > file")
        undo()
        assert says("cat file") == "1"
    git.set_config("user.name", "somebody", scope="local", path=path)
    assert says("git config user.name") == "somebody"
    git.configure_user("who", "who@example.org", scope="local", path=path)
    assert says("git config user.email") == "who@example.org"
    git.dangerously_authenticate("who", "secret", host="example.org")
    asked = "printf 'protocol=https\\nhost=example.org\\n\\n' | git credential fill | grep password"
    assert says(asked) == "password=secret"
    git.init(f"{path}/new", initial_branch="trunk")
    assert says("git -C new symbolic-ref HEAD") == "refs/heads/trunk"


@check("Git.clone", "Git.status", "Git.branches", "Git.remote_get", "Git.get_config")
def _(here: Here) -> None:
    git, path = here.sandbox.git, repository(here, "git-asked")
    here.says(f"cd {path} && echo 2 > other && git branch other")
    status, branches = git.status(path), git.branches(path)
    assert (status.current_branch, [one.name for one in status.file_status]) == ("main", ["other"])
    assert (sorted(branches.branches), branches.current_branch) == (["main", "other"], "main")
    assert git.remote_get(path, "origin") == f"../{path}.git" and not git.remote_get(path, "none")
    assert git.get_config("user.email", scope="local", path=path) == "e@example.org"
    git.clone(f"file://{here.says('pwd').strip()}/{path}.git", f"{path}-cloned")
    assert here.says(f"cat {path}-cloned/file") == "1\n"


# -- templates ------------------------------------------------------------------------------------------------------


@check("Template.build")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().from_image("python:3.12"), "team/built:1", cpu_count=2, memory_mb=256, **here.control)
    sandbox = here.new(template="team/built:1")
    info = sandbox.get_info()
    assert (info.template_id, info.cpu_count, info.memory_mb) == ("team/built:1", 2, 256)
    rows = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    here.served.live.until(lambda: here.served.live.rows(rows) == [("python:3.12",)])
    assert sandbox.commands.run("echo $TANGRAM_DOP_MAX").stdout == "2\n" and sandbox.kill()
    for stepped in (
        e2b.Template().from_image("python:3.12").run_cmd("true"),
        e2b.Template().from_image("python:3.12").copy("e2b_git.py", "/"),
    ):
        refused(partial(e2b.Template.build, stepped, "stepped", **here.control), "build an image that has them", e2b.BuildException)
    refused(lambda: here.new(template="stepped"), "has not been built")
    for name, wanted in (("tagged", "tagged:1"), ("localhost:5000/tagged", "localhost:5000/tagged:1")):
        tagged = partial(e2b.Template.build, e2b.Template().from_image("python:3.12"), name, tags=["1"], **here.control)
        refused(tagged, f"name the template {wanted}", e2b.BuildException)


@check("Template.build_in_background", "Template.get_build_status")
def _(here: Here) -> None:
    built = e2b.Template.build_in_background(e2b.Template().from_image("python:3.12"), "behind:1", **here.control)
    assert e2b.Template.get_build_status(built, **here.control).status.value == "ready"


def _known(here: Here, name: str) -> None:
    known = getattr(e2b.Template, name)
    assert not known(f"known-{name}:1", **here.control)
    e2b.Template.build(e2b.Template().from_image("python:3.12"), f"known-{name}:1", **here.control)
    assert known(f"known-{name}:1", **here.control)


def _not_there(here: Here, name: str, arguments: tuple[str, ...], says: str) -> None:
    refused(lambda: getattr(e2b.Template, name)(*arguments, **here.control), says, Exception)


CHECKS |= {f"Template.{name}": partial(_known, name=name) for name in ("alias_exists", "exists")}
_TAGS = (
    ("assign_tags", ("known", "tag"), "405: POST /templates/tags is not served"),
    ("get_tags", ("team/known",), "404: tags of templates are not served"),
    ("remove_tags", ("known", "tag"), "404: tags of templates are not served"),
)
CHECKS |= {f"Template.{name}": partial(_not_there, name=name, arguments=given, says=says) for name, given, says in _TAGS}


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


def _made(here: Here, name: str, arguments: tuple[str, ...], image: str) -> None:
    template = getattr(e2b.Template(), name)(*arguments)
    assert _image_of(template).startswith(image)
    e2b.Template.build(template, f"{name}:1", **here.control)


CHECKS |= {f"Template.{name}": partial(_made, name=name, arguments=given, image=image) for name, (given, image) in _IMAGES.items()}


@check("Template.from_template")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().from_image("python:3.12"), "first:1", **here.control)
    e2b.Template.build(e2b.Template().from_template("first:1"), "second:1", **here.control)
    assert here.new(template="second:1").kill()


@check("Template.skip_cache")
def _(here: Here) -> None:
    e2b.Template.build(e2b.Template().skip_cache().from_image("python:3.12"), "uncached:1", **here.control)
    assert here.new(template="uncached:1").kill()


@check("Template.to_json", "Template.to_dockerfile")
def _(here: Here) -> None:
    template = e2b.Template().from_image("python:3.12")
    assert _image_of(template) == "python:3.12" and e2b.Template.to_dockerfile(template).startswith("FROM python:3.12")


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "from_dockerfile": (("FROM python:3.12\nRUN true\n",), "build an image that has them"),
    "from_aws_registry": (("1.dkr.ecr.example.org/it:1", "id", "secret", "region"), "credentials of registries"),
    "from_gcp_registry": (("gcr.example.org/it:1", {"type": "service_account"}), "credentials of registries"),
}


def _not_built(here: Here, name: str, arguments: tuple[Any, ...], says: str) -> None:
    template = getattr(e2b.Template(), name)(*arguments)
    refused(lambda: e2b.Template.build(template, "refused", **here.control), says, e2b.BuildException)


CHECKS |= {f"Template.{name}": partial(_not_built, name=name, arguments=given, says=says) for name, (given, says) in _REFUSED.items()}
