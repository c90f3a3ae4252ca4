"""Where the stack is, and how a trainer connects to it: the broker for messages, Redis for results and blobs.

Addresses come from the settings, or else from the file in which `tangram up` notes what it started. Everything here
ends within `connect_timeout_s` or says in one line that the stack is unreachable. Only opening connections lives here:
no message, no thread, no retry beyond the first contact.
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from string import digits
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from celery import Celery
from pydantic import BaseModel, ValidationError
from redis import BlockingConnectionPool, Redis, ResponseError
from redis.backoff import NoBackoff
from redis.retry import Retry

from tangram.errors import StackUnreachable
from tangram.settings import Settings

STORE_CONNECTIONS = 5
"""Redis connections of one client: one listens, one reads the output of commands and one interrupts it, two fetch and put blobs."""

_POOL_WAIT_S = 60.0
_HEALTH_CHECK_S = 2
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}
"""Options of TCP by which the kernel finds a host that is gone without a word: within 5 s, whether anything is sent or not."""

KEEPALIVE: dict[str, Any] = {
    "socket_keepalive": True,
    "socket_keepalive_options": {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)},
}
"""The same, as redis-py and kombu take it for connections over TCP."""

LEAVE_REPLICAS: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "retry_on_error": [ResponseError]}
"""Options of redis-py that close a connection once its server answers with an error. The next one finds the new primary after a failover.

A server that only reads by then need not close it. Of a script, Redis 6 says this as an error that has no class of its own.
redis-py closes a connection before it tries a command again. Here it makes no further try, so no command is sent twice.
"""

M = TypeVar("M", bound=BaseModel)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
REDIS_SCHEMES = ("redis", "rediss", "redis+socket")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Celery URLs of the broker and of the result store."""

    broker_url: str
    result_url: str


class _StackFile(BaseModel):
    """What a client reads of `stack.json`."""

    broker_url: str
    result_url: str


def find_addresses(settings: Settings) -> Addresses:
    """Return the addresses in `settings`, else those of the stack that runs in its state folder.

    With TLS certificates are checked, unless an address says otherwise. Raises `StackUnreachable` when there are none, or only one of the
    two. It does so, too, when one cannot be read or has a wrong word for TLS, and when the result store is not Redis.
    """
    given = {"TANGRAM_BROKER_URL": settings.broker_url, "TANGRAM_RESULT_URL": settings.result_url}
    missing = [name for name, url in given.items() if not url]
    if settings.broker_url and settings.result_url:
        addresses = Addresses(settings.broker_url, settings.result_url)
    elif len(missing) == 1:
        raise StackUnreachable(f"{missing[0]} is not set, though the other of TANGRAM_BROKER_URL and TANGRAM_RESULT_URL is")
    else:
        found = read_stack_file(settings.stack_file, _StackFile)
        addresses = Addresses(found.broker_url, found.result_url)
    urls = zip(given, (addresses.broker_url, addresses.result_url), strict=True)
    addresses = Addresses(*(";".join(_checked(name, part) for part in url.split(";")) for name, url in urls))
    redis_url(addresses.result_url)
    return addresses


def _checked(name: str, url: str) -> str:
    """Return the address `url` of the setting `name`; with TLS it says how certificates are checked. Raises `StackUnreachable`.

    By default redis-py checks them, kombu does not, and Celery ends. A connection that lacks a file of certificates would not name it.
    """
    problem = f"{name} is no address: port and database are numbers; / @ # in a password are %2F %40 %23"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # which may have a part of the password
        raise StackUnreachable(problem) from None
    is_redis = parts.scheme in ("redis", "rediss")
    # What looks like a path may be the rest of a password.
    if parts.scheme != "redis+socket" and ("@" in parts.path or parts.fragment or (is_redis and parts.path.strip("/").strip(digits))):
        raise StackUnreachable(problem)
    if parts.scheme not in ("rediss", "amqps"):
        return url
    query = {"ssl_cert_reqs": "required", **dict(parse_qsl(parts.query))}
    query["ssl_cert_reqs"] = word = query["ssl_cert_reqs"].lower().removeprefix("cert_")
    if word not in ("required", "optional", "none"):
        raise StackUnreachable(f"{name} has ssl_cert_reqs={word}, which is none of required, optional, none")
    unknown = [word for word in query if word.startswith("ssl_") and word not in ("ssl_cert_reqs", *_TLS_FILES)]
    if parts.scheme == "amqps" and unknown:
        raise StackUnreachable(f"{name} has {min(unknown)}, which there is not for amqps://")
    for file in _TLS_FILES:
        try:
            if file in query:
                Path(query[file]).open("rb").close()
        except OSError as error:
            raise StackUnreachable(f"{name} has {file}={query[file]}, which cannot be read: {error.strerror}") from None
    return parts._replace(query=urlencode(query)).geturl()


def redis_url(url: str) -> str:
    """Return the Celery result URL `url` as redis-py writes it; the two differ for Unix sockets.

    Raises `StackUnreachable` when it names something other than Redis: results are pushed over Redis, nothing else can do it.
    """
    parts = urlsplit(url)
    if parts.scheme not in REDIS_SCHEMES:
        raise StackUnreachable(f"the result store must be Redis ({', '.join(f'{s}://' for s in REDIS_SCHEMES)}), not {show(url)}")
    query = dict(parse_qsl(parts.query))
    if parts.scheme != "redis+socket":
        return parts._replace(query=urlencode(query)).geturl()
    query["db"] = query.pop("virtual_host", "0").strip("/") or "0"
    login = f"{quote(parts.username or '', safe='%')}:{quote(parts.password, safe='%')}@" if parts.password else ""
    return f"unix://{login}{parts.path}?{urlencode(query)}"


def broker_tls(broker_url: str) -> tuple[str, dict[str, Any] | None]:
    """Return an `amqps://` address without its words for TLS, and these as Celery's `broker_use_ssl`; another address as it is, and None.

    The address comes from `find_addresses`. kombu would hand the words on under names that connections to RabbitMQ do not know. The name
    of the host is checked. Of several addresses, the words and the name of the first count.
    """
    addresses = [urlsplit(one) for one in broker_url.split(";")]
    if addresses[0].scheme != "amqps":
        return broker_url, None
    words = dict(parse_qsl(addresses[0].query))
    tls: dict[str, Any] = {name.removeprefix("ssl_"): value for name, value in words.items() if name.startswith("ssl_")}
    tls["cert_reqs"] = ssl.VerifyMode[f"CERT_{tls['cert_reqs'].upper()}"]
    if tls["cert_reqs"] != ssl.CERT_NONE:
        tls["server_hostname"] = addresses[0].hostname
    others = [urlencode([pair for pair in parse_qsl(one.query) if not pair[0].startswith("ssl_")]) for one in addresses]
    return ";".join(one._replace(query=query).geturl() for one, query in zip(addresses, others, strict=True)), tls


def open_store(result_url: str, connect_timeout_s: float, connections: int = STORE_CONNECTIONS) -> Redis:
    """Return a Redis client of at most `connections` connections, none of them open yet.

    A caller waits its turn when all are in use; no command waits longer than `connect_timeout_s` for an answer.
    """
    url = redis_url(result_url)
    keepalive = {} if url.startswith("unix:") else {**KEEPALIVE, "socket_connect_timeout": connect_timeout_s}
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=_POOL_WAIT_S,
        socket_timeout=connect_timeout_s,
        health_check_interval=_HEALTH_CHECK_S,
        **LEAVE_REPLICAS,
        **keepalive,
    )
    return Redis(connection_pool=pool)


def make_app(addresses: Addresses, connect_timeout_s: float) -> Celery:
    """Return the private Celery app that a client publishes with: JSON only, and no result backend.

    Celery's own Redis backend would subscribe to every single result, on a connection more; a client has one
    subscription for all (`tangram.feed`).
    """
    broker_url, tls = broker_tls(addresses.broker_url)
    app = Celery("tangram.client", broker=broker_url, backend="disabled://", set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        broker_connection_timeout=connect_timeout_s,
        broker_transport_options=_client_options(broker_url, connect_timeout_s),
        broker_use_ssl=tls,
    )
    return app


@dataclass(frozen=True, slots=True)
class Link:
    """A client's way to a stack: the Celery app that it publishes with, and the result store, with its address for error messages."""

    app: Celery
    store: Redis
    store_name: str


def find_link(settings: Settings) -> Link:
    """Return the way to the stack of `settings`, without a connection yet. Raises `StackUnreachable`."""
    addresses = find_addresses(settings)
    app = make_app(addresses, settings.connect_timeout_s)
    return Link(app, open_store(addresses.result_url, settings.connect_timeout_s), show(addresses.result_url))


def show(url: str) -> str:
    """Return `url` for people: without its password."""
    return re.sub("(?s)://([^:@/]*):.*@", r"://\1:**@", url)


def read_stack_file(path: Path, kind: type[M]) -> M:
    """Return what is read of `stack.json`. Raises `StackUnreachable` when there is none that can be read."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StackUnreachable(
            f"no stack is running in {path.parent}: start one with `tangram up`, or set TANGRAM_STATE_DIR to the folder of one that runs, "
            "or TANGRAM_BROKER_URL and TANGRAM_RESULT_URL to a deployment's"
        ) from None
    except OSError as error:
        raise StackUnreachable(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise StackUnreachable(f"{path} is no stack file: {error.errors()[0]['msg']}") from None


def transport_options(broker_url: str, connect_timeout_s: float) -> dict[str, Any]:
    """Return what makes a dead broker show itself: time limits for answers, and options of TCP."""
    scheme = urlsplit(broker_url).scheme
    if scheme in ("redis", "rediss"):
        limits = {"socket_timeout": connect_timeout_s, "socket_connect_timeout": connect_timeout_s}
        return {**limits, **KEEPALIVE, "health_check_interval": _HEALTH_CHECK_S}
    if scheme == "redis+socket":
        return {"socket_timeout": connect_timeout_s}
    if scheme in ("amqp", "amqps", "pyamqp"):
        return {"socket_settings": dict(KEEPALIVE["socket_keepalive_options"])}
    return {}


def _client_options(broker_url: str, connect_timeout_s: float) -> dict[str, Any]:
    """Return the same for a client, whose publishes AMQP confirms."""
    options = transport_options(broker_url, connect_timeout_s)
    return {**options, "confirm_publish": True} if "socket_settings" in options else options
