"""The Docker engine, as far as containers of environments need it.

Only this file, `keeper_container.py` and `app/own_container.py` know the `docker` SDK.

What the engine answers is checked and typed here. Every request has a time limit: an engine that does not answer in time fails only
the action that asked. Pulls are made in `pull.py`.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import docker
import requests
from docker.auth import get_config_header, resolve_repository_name
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount, Ulimit
from docker.utils import convert_filters, parse_host

from workers.cpu.docker.init import INSIDE, SCRIPT, STATES, STATES_INSIDE, TEMPORARY, WORK
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.pull import PullRequest
from workers.cpu.errors import ContainerFailed, EngineUnavailable, ImageMissing

MEMORY_FULL = "its memory was full"
"""How a container ended of which the kernel has ended process 1 for want of memory."""

FULL_BEFORE_END_NS = 10_000_000_000
"""The longest time between full memory and the end of a container that ended for it. An earlier `oom` event concerns a command alone."""
KILLED = "137"
"""The exit code of a container whose process 1 was killed."""
HEARS_WITHIN_S = 0.2
"""How long after the kernel the engine usually hears of the end of a container."""
NODE_LABEL = "tangram.node"
SNAPSHOT_LABEL = "tangram.snapshot"
FILTERS_VSOCK = 23
"""The engine's first version whose default filter refuses vsock sockets, by its release notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is here. `reference` is what it was asked for by, `bytes` what it takes on disk with all of its layers."""

    reference: str
    id: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """What a container is made of. `control` is its control folder on the host; `disk_hard` has the storage hold it to its disk limit."""

    name: str
    node: str
    image: str
    control: Path
    memory_mb: int
    disk_hard: bool
    options: ContainerOptions


BEFORE_OURS = 900
"""By what the kernel ends programs first where the memory of the machine is full; within a container they can choose among themselves."""


class DockerEngine:
    """A connection to the engine at `url`, by default its Unix socket. Any thread may ask.

    It has `timeout_s` for an answer, and while it fetches an image, `stall_s` for the next word on it. Raises `EngineUnavailable` when it
    does not answer.
    """

    def __init__(self, url: str | None = None, timeout_s: float = 60.0, stall_s: float = 300.0) -> None:
        self._stall_s = stall_s
        scheme, _, path = parse_host(url).partition("://")
        self._socket = path if scheme == "http+unix" else None
        try:
            self.api = docker.APIClient(base_url=url, timeout=timeout_s, version="auto", max_pool_size=32, num_pools=32)
            self._info = self.api.info()
        except (DockerException, requests.RequestException) as error:
            raise EngineUnavailable(f"no Docker engine answers: {error}") from error

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the engine lacks that protects the host, in words for a person."""
        options = " ".join(self._info.get("SecurityOptions") or ())
        found = [] if "seccomp" in options else ["the engine filters no system calls (no seccomp)"]
        if "seccomp" in options and _major(self._info.get("ServerVersion", "")) < FILTERS_VSOCK:
            found.append(
                f"this engine's filter of system calls is that of a version before {FILTERS_VSOCK}: containers can open vsock sockets, "
                "which reach the hypervisor of a virtual machine, whatever their network"
            )
        lacks = {"MemoryLimit": "memory", "PidsLimit": "the number of processes", "CpuCfsQuota": "quotas of cores", "CPUSet": "cores"}
        found += [f"the engine cannot limit {what}" for key, what in lacks.items() if self._info.get(key) is False]
        return tuple(found)

    @property
    def root(self) -> str:
        """The folder on the engine's host in which containers and volumes are; empty where the engine does not tell."""
        return str(self._info.get("DockerRootDir") or "")

    def can_limit_disk(self, image: str, node: str) -> bool:
        """Say whether the engine's storage can hold a container to an amount of disk, by trying it."""
        host = self.api.create_host_config(storage_opt={"size": "64m"})
        try:
            made = self.api.create_container(image, ["true"], host_config=host, labels={NODE_LABEL: node})
        except APIError:
            return False
        self.remove(made["Id"])
        return True

    # -- containers ----------------------------------------------------------------------------------------------

    def create(self, spec: ContainerSpec) -> str:
        """Make a container and return its id; nothing runs in it yet.

        Raises `ContainerFailed` when the engine refuses; `ImageMissing` when the image has gone.
        """
        options, limits, memory = spec.options, spec.options.limits, spec.memory_mb << 20
        host = self.api.create_host_config(
            auto_remove=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            network_mode=options.network,
            ipc_mode="private",
            pids_limit=limits.processes,
            mem_limit=memory,
            memswap_limit=memory,
            oom_score_adj=BEFORE_OURS,
            read_only=options.read_only,
            runtime=options.runtime,
            shm_size=min(memory, 64 << 20),
            tmpfs=_in_memory(options) if options.read_only else None,
            storage_opt={"size": f"{limits.disk_mb}m"} if spec.disk_hard else None,
            mounts=[
                Mount(INSIDE, str(spec.control), type="bind", read_only=True),
                Mount(STATES_INSIDE, str(spec.control / STATES), type="bind"),
            ],
            log_config=LogConfig(type="none"),
            ulimits=[
                Ulimit(name="core", soft=0, hard=0),
                Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
                Ulimit(name="fsize", soft=limits.disk_mb << 20, hard=limits.disk_mb << 20),
            ],
        )
        with refusals(f"container for image {spec.image!r}"):
            made = self.api.create_container(
                spec.image,
                entrypoint=["/bin/sh"],
                command=["-c", SCRIPT],
                name=spec.name,
                hostname="sandbox",
                user=options.user,
                working_dir="/",
                environment={"HOME": WORK, "TMPDIR": TEMPORARY, "LANG": "C.UTF-8", "TERM": "dumb"},
                labels={NODE_LABEL: spec.node},
                healthcheck={"test": ["NONE"]},
                host_config=host,
            )
        container_id: str = made["Id"]
        return container_id

    def put_folders(self, container_id: str, folders: Sequence[tuple[str, int, int, int]], link: tuple[str, str]) -> None:
        """Make folders in a container: path, owner, group, mode each. `link` is a path, and where it leads unless a folder is there."""
        entries = []
        for path, uid, gid, mode in folders:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.uid, entry.gid, entry.mode = tarfile.DIRTYPE, uid, gid, mode
            entries.append(entry)
        linked = tarfile.TarInfo(link[0].lstrip("/"))
        linked.type, linked.linkname = tarfile.SYMTYPE, link[1]
        with refusals("folders of a container"):
            try:
                url = self.api._url("/containers/{0}/archive", container_id)
                params = {"path": "/", "noOverwriteDirNonDir": "true"}
                self.api._raise_for_status(self.api._put(url, params=params, data=_packed([*entries, linked])))
            except APIError:
                self.api.put_archive(container_id, "/", _packed(entries))

    def start(self, container_id: str) -> None:
        """Start a container. Raises `ContainerFailed` when it cannot be started."""
        with refusals("a container"):
            self.api.start(container_id)

    def running(self, container_id: str) -> tuple[int, str, tuple[str, ...]]:
        """Return process 1 of a container, the folder of its own layer and those of its volumes, as the engine's host sees them.

        The layer's folder is empty where the engine does not tell; volumes are those that the image asks for. Raises `ContainerFailed` when
        it has ended.
        """
        with refusals("a container"):
            found = self.api.inspect_container(container_id)
        pid: int = found["State"]["Pid"]
        if pid <= 0:
            raise ContainerFailed("a container has ended, maybe as soon as it was started: has its image a /bin/sh?")
        layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""
        volumes = tuple(mount["Source"] for mount in found.get("Mounts") or () if mount.get("Type") == "volume")
        return pid, layer, volumes

    def state(self, container_id: str, *, may_be_full: bool = True) -> str:
        """Return how a container ended, for a person; nothing where there is no telling, also as the engine has not heard of it yet.

        A container that is killed within `FULL_BEFORE_END_NS` of full memory has ended for that, unless the caller knows better and denies
        `may_be_full`. Otherwise a kill by somebody is not told apart that comes so soon after a command alone was ended for memory.
        """
        try:
            state = self.api.inspect_container(container_id)["State"]
            if state.get("Running"):
                time.sleep(HEARS_WITHIN_S)
                state = self.api.inspect_container(container_id)["State"]
        except NotFound:
            state = {}
        except (DockerException, requests.RequestException):
            return ""
        if state.get("Running"):
            return ""
        code, is_full = self._last_events(container_id) or (str(state.get("ExitCode", "")), bool(state.get("OOMKilled")))
        if is_full and may_be_full and code == KILLED:
            return MEMORY_FULL
        return f"exit code {code}" if code.isdigit() else ""

    def _last_events(self, container_id: str) -> tuple[str, bool] | None:
        """Return the exit code of a container and whether its memory was full, as long as its end is among the engine's latest events."""
        wanted = convert_filters({"container": container_id, "event": ["oom", "die"]})
        # Without `until` the engine would go on to send what happens next. The SDK's own `events` has no time limit.
        params = {"since": 1, "until": f"{time.time():.9f}", "filters": wanted}
        try:
            said = self.api._result(self.api._get(self.api._url("/events"), params=params), binary=True)
            events = [json.loads(line) for line in said.splitlines()]
            end = next(event for event in events if event["Action"] == "die")
            # Labels of the image may stand in the place of an attribute.
            code = str(end["Actor"]["Attributes"]["exitCode"])
            is_full = any(event["Action"] == "oom" and end["timeNano"] - event["timeNano"] <= FULL_BEFORE_END_NS for event in events)
        except (DockerException, requests.RequestException):
            return None
        except (StopIteration, LookupError, TypeError, ValueError):  # There is no end, or events have another form.
            return None
        return code, is_full

    def run(self, container_id: str, argv: Sequence[str]) -> tuple[str, int]:
        """Start a program in a container, attached to nothing; return the engine's id for it and its process id."""
        with refusals("a program in a container"):
            started: str = self.api.exec_create(container_id, list(argv), stdout=False, stderr=False)["Id"]
            self.api.exec_start(started, detach=True)
            pid: int = self.api.exec_inspect(started)["Pid"]
        return started, pid

    def exit_code(self, started: str) -> int | None:
        """Return the exit code of a program that `run` started; None while the engine takes it for running.

        An engine forgets programs some minutes after they have ended: then it is the code of one that was killed.
        """
        try:
            code: int | None = self.api.exec_inspect(started)["ExitCode"]
        except NotFound:
            return int(KILLED)
        except (DockerException, requests.RequestException):
            return None
        return code

    def update_memory(self, container_id: str, memory_mb: int) -> None:
        """Hold a container to another amount of memory."""
        with refusals("the memory of a container"):
            self.api.update_container(container_id, mem_limit=memory_mb << 20, memswap_limit=memory_mb << 20)

    def written_bytes(self, container_id: str) -> int:
        """Return what a container has written to its own layer; 0 where it has gone."""
        try:
            answer = self.api._result(self.api._get(self.api._url("/containers/{0}/json", container_id), params={"size": 1}), True)
        except (DockerException, requests.RequestException):
            return 0
        return int(answer.get("SizeRw") or 0)

    def remove(self, container_id: str) -> None:
        """Remove a container, running or not; nothing where it has gone or is going."""
        with refusals("the removal of a container"):
            try:
                self.api.remove_container(container_id, force=True, v=True)
            except NotFound:
                return
            except APIError as error:
                if error.response is None or error.response.status_code != requests.codes.conflict:
                    raise

    def left_by(self, node: str) -> list[str]:
        """Return the containers that an earlier worker of this node has left."""
        return self.labelled(NODE_LABEL, node)

    def labelled(self, label: str, value: str) -> list[str]:
        """Return the containers that have a label with this value."""
        with refusals("the list of containers"):
            return [each["Id"] for each in self.api.containers(all=True, filters={"label": f"{label}={value}"})]

    def has_network(self, name: str) -> bool:
        """Say whether there is a network of that name; `none` is one."""
        with refusals("the list of networks"):
            return any(each["Name"] == name for each in self.api.networks(names=[name]))

    # -- images --------------------------------------------------------------------------------------------------

    def image(self, reference: str) -> Image | None:
        """Return an image that is here; None where it is not."""
        with refusals(f"image {reference!r}"):
            try:
                found = self.api.inspect_image(reference)
            except ImageNotFound:
                return None
        return Image(reference=reference, id=found["Id"], bytes=int(found["Size"]))

    def pull_request(self, reference: str) -> PullRequest:
        """Return the request that fetches an image with the credentials of Docker's own configuration."""
        name, tag = split_reference(reference)
        # Credentials may be short-lived ones that somebody renews.
        self.api.reload_config()
        login = get_config_header(self.api, resolve_repository_name(name)[0])
        return PullRequest(
            url=f"{'http://docker' if self._socket else self.api.base_url}/v{self.api.api_version}/images/create",
            socket=self._socket,
            params={"fromImage": name, "tag": tag},
            headers={"X-Registry-Auth": login.decode()} if login else {},
            stall_s=self._stall_s,
        )

    def commit(self, container_id: str, repository: str, tag: str, node: str) -> str:
        """Make an image of a container's files, and return its reference. Raises `ContainerFailed`."""
        with refusals("a snapshot"):
            self.api.commit(container_id, repository=repository, tag=tag, conf={"Labels": {SNAPSHOT_LABEL: node}}, pause=False)
        return f"{repository}:{tag}"

    def remove_snapshots(self, node: str) -> None:
        """Remove the snapshots of a node's environments that no container uses."""
        with refusals("the list of images"):
            found = self.api.images(filters={"label": f"{SNAPSHOT_LABEL}={node}"})
        for each in found:
            with suppress(APIError):
                self.api.remove_image(each["Id"], force=True)

    def remove_image(self, reference: str) -> bool:
        """Remove an image; False where it is in use, be it by a container of somebody else that does not run."""
        try:
            self.api.remove_image(reference)
        except ImageNotFound:
            return True
        except APIError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self.api.close()


def split_reference(reference: str) -> tuple[str, str]:
    """Return the name of an image, with its registry, and its tag or digest; a digest goes before a tag."""
    named, _, digest = reference.partition("@")
    # A colon before the last slash is that of a port.
    folder, slash, last = named.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}", digest or tag or "latest"


def _packed(entries: Sequence[tarfile.TarInfo]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for entry in entries:
            archive.addfile(entry)
    return packed.getvalue()


def _in_memory(options: ContainerOptions) -> dict[str, str]:
    kept = f"rw,exec,nosuid,nodev,size={options.limits.disk_mb}m"
    return {WORK: f"{kept},uid={options.uid},gid={options.gid},mode=0755", TEMPORARY: f"{kept},mode=1777"}


def _major(version: str) -> int:
    """Return the first number of a version, a large one where there is none."""
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else 1 << 30


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn what the engine says into the project's errors."""
    try:
        yield
    except ImageNotFound as error:
        raise ImageMissing(f"{what}: {error.explanation}") from error
    except APIError as error:
        raise ContainerFailed(f"{what}: the engine says: {error.explanation or error}") from error
    except requests.Timeout as error:
        raise ContainerFailed(f"{what}: the engine did not answer in time") from error
    except (DockerException, requests.RequestException) as error:
        raise EngineUnavailable(f"{what}: the Docker engine cannot be reached: {error}") from error
