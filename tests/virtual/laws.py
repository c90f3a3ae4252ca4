"""The laws: what holds whatever happens, after each step and at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import inf
from typing import TYPE_CHECKING

from app.broker.stored_ends import stored_end
from scheduler.model.lifecycle import MOST_TRIES
from scheduler.quotas.answers import MOST_REFUSALS
from tangram.ends import fault_of
from tangram.errors import ActionError, StackUnreachable
from tangram.results import ExecResult
from tangram.shards import FIRST, shard_of
from tangram.wire import RESULT_KEY_PREFIX, SCHEDULER_KEY, node_label, of_shard
from tests.virtual.api import LIMITS, RETRY_AFTER_S
from tests.virtual.clock import EPOCH, MONOTONIC
from tests.virtual.gpu import SERVICES
from tests.virtual.trainer import Told, Trainer
from workers.api.requests import MOST_SENT

if TYPE_CHECKING:
    from tests.virtual.run import Run

Condition = Callable[[], bool]

CANCELLED_S = 20.0
"""Within which a cancelled action has ended once nothing is broken any more."""

ASKED_S = 120.0
"""The same where only the client still knows of the cancel. It asks again after 30 s, and then after 60 s."""

LEASED_S = 40.0
"""The same for an environment whose lease is over. Clocks may be wrong by 20 s."""

LEAST_GAP_S = 0.2
"""How close two calls come of the quota of four a second in `quotas.toml`: a grant may be written late, and the next one at once."""

LATE_CALL_S = 0.1
"""How long after its time a request has come that was held up on its way."""

HEARD_S = 0.5
"""How long after a refusal of the API requests still come that were granted before."""

MOST_CALLS = MOST_SENT * (MOST_TRIES + MOST_REFUSALS)
"""How often an idempotent request is made at most: each try of its action repeats it."""

CALM_S = 30.0
"""How long after the last fault all shards have a scheduler that knows of everything."""

AGREED_S = 5.0
"""For how long nothing has changed when shards have heard of each other."""

ROUNDED_S = 1e-3
"""By how much the parts of an ACT may differ from the whole."""

UNCOUNTED_S, UNCOUNTED = 4.0, 0.05
"""By how many unit-seconds, and by which part of them, an action may hold more or less than is counted: four units are written 1 s late.

What a scheduler decides counts at once. While it does not reach the broker, four units may be written later by all that time.
"""

LATE_S = 6.0
"""How long a message to a node is under way at most, with the time until it is looked at."""


def at_once(run: Run) -> list[str]:
    """Laws that are looked at after each error of a thread."""
    return [f"no thread ends by an error: {where}: {type(error).__name__}: {error}" for where, error in run.world.failures]


def now_and_then(run: Run) -> list[str]:
    """Laws that hold after every step, looked at every virtual second.

    A command that loses a core may hold it beside the one that gets it, for as long as the message that says so is under way. While
    messages are lost it is sent again at beats, after twice the time each.
    """
    runs = Counter(one.action for one in run.ledger.runs)
    idempotent = {told.action: told.idempotent for trainer in run.trainers for told in trainer.told}
    broken = []
    for action, count in runs.items():
        if count > (MOST_TRIES if idempotent.get(action) else 1):
            broken.append(f"nothing runs twice: {action} ran {count} times: {[one for one in run.ledger.runs if one.action == action]}")
    broken += _requests(run, idempotent)
    newest: dict[str, int] = {}
    for claim in run.ledger.claims:
        newest[claim.node] = max(claim.epoch, newest.get(claim.node, 0))
        if claim.epoch < newest[claim.node]:
            broken.append(f"no grant of a replaced scheduler is taken up: {claim} after one of epoch {newest[claim.node]}")
    for trainer in run.trainers:
        for told in trainer.told:
            if told.times > 1:
                broken.append(f"each action ends once: {told.action} was told {told.times} times")
    frozen = {f"{node.name}/{node.starts}" for node in run.nodes if node.process is None or node.process.frozen}
    shared = {one for one in run.ledger.shared() if one[0] not in frozen}
    run.shared = {pair: run.shared.get(pair, run.world.now) for pair in shared}
    lossy = [fault.at_s + fault.lasts_s for fault in run.scenario.faults if fault.kind == "messages lost" and fault.at_s < run.world.now]
    for (worker, one, other), since in run.shared.items():
        if run.world.now > LATE_S + max([since, *(2 * end - since for end in lossy if end > since)]):
            broken.append(f"no core is held twice: {one} and {other} on {worker}: {run.ledger.cores[worker]}")
    if run.world.now > run.scenario.calm_from_s + LEASED_S:
        # One that has waited for room has a lease that counts from when it was wanted, until it is open.
        over = "select id, state from environments where ended_at is null and state != 'waiting' and max(ends_at, changed_at) < ?"
        for name, state in run.database.execute(over, (EPOCH + run.world.now - LEASED_S,)):
            broken.append(f"a lease ends: environment {name} is {state} though its lease was over {LEASED_S:.0f} s ago")
    standing = dict(run.database.execute("select id, node from environments where ended_at is null").fetchall())
    for crowd in run.ledger.crowds:
        # A node that counted as lost may hold environments that are given up, until it is asked to close them.
        allowed = {name: allowed_mb for name, allowed_mb in crowd.allowed.items() if standing.get(name) == crowd.worker.partition("/")[0]}
        if sum(allowed.values()) > crowd.memory_mb:
            broken.append(f"what environments may use is there: {allowed} of {crowd.memory_mb} MB on {crowd.worker}")
    run.ledger.crowds.clear()
    return broken + (_shares(run) if run.scenario.shards > 1 else [])


def _requests(run: Run, idempotent: dict[str, bool]) -> list[str]:
    """Laws of what the outside API has seen. A request that was late, or was repeated, could not be foreseen: others go out beside it."""
    api = run.network.api
    # A store that has lost its data does not know which tries were given up. A node then takes up a late message of such a try.
    late_after_loss = min(_last(run, "messages late"), _last(run, "broker comes back empty")) >= 0
    broken = [f"no quota is exceeded: {crowd}" for crowd in api.crowds if not late_after_loss]
    calls = [one for one in api.arrivals if one.quota == "web"]
    for action, count in Counter(one.action for one in calls).items():
        if count > (MOST_CALLS if idempotent.get(action, True) else 1):  # the trainer may be about to note what it has just sent
            broken.append(f"nothing runs twice: {action} was asked for {count} times: {[one for one in calls if one.action == action]}")
    on_time = [one.at for one in calls if one.late_s < LATE_CALL_S and not one.is_repeat]
    most = LIMITS["web"]["rate_per_s"]
    if not run.scenario.starved and _last(run, "clock steps", "slow network") < 0:
        broken += [
            f"no quota is exceeded: {most + 1} requests from {first:.4f} to {last:.4f}"
            for first, last in zip(on_time, on_time[most:], strict=False)
            if last - first < 1.0
        ]
    first_fault_s = min((fault.at_s for fault in run.scenario.faults), default=inf)  # then a refusal may be told late, or not be remembered
    if not run.scenario.starved:
        broken += [
            f"a refusal is heeded: a request came at {at:.4f}, there was one at {refused_at:.4f}"
            for at, refused_at in product(on_time, api.refused_at)
            if HEARD_S < at - refused_at < RETRY_AFTER_S and at < first_fault_s
        ]
    return broken


def _shares(run: Run) -> list[str]:
    """Once nothing is broken, and nothing has changed for a moment, schedulers show the same shares: those over all shards."""
    leaders = run.leaders_now()
    lead = len(leaders) == run.scenario.shards and all(one.alive and not one.frozen for one in leaders)
    raws = [run.network.broker.value(of_shard(SCHEDULER_KEY, shard)) for shard in range(run.scenario.shards)]
    shown = [(one["epoch"], one["jobs"]) for one in map(json.loads, filter(None, raws))]
    if shown != run.shown or not lead or run.world.now < run.scenario.calm_from_s + CALM_S:
        run.shown, run.shown_at = shown, run.world.now
    if run.world.now - run.shown_at < AGREED_S or all(jobs == shown[0][1] for _, jobs in shown):
        return []
    return [f"shards agree on shares: they say {shown}"]


def after_a_write(run: Run) -> list[str]:
    """Laws about the journal, looked at after each write."""
    broken = []
    by_core: dict[tuple[str, int, int], str] = {}  # by shard, too: one that a node has left hears of that when it counts as lost
    by_cell: dict[tuple[str, int], list[str]] = {}
    holding: dict[str, int] = {}
    granted: set[tuple[str, int]] = set()
    draining = {name for (name,) in run.database.execute("select name from nodes where draining")}
    for node, shard, core_ids, cell_ids, action, attempt, service, units, background, header, may_begin in run.database.execute(
        "select g.node, a.shard, g.core_ids, g.cell_ids, g.action, g.attempt, a.service, g.units, g.background, a.header,"
        " a.environment is not null and a.kind != 'cpu.open'"
        " from grants g join actions a on a.id = g.action where g.released_at is null and a.ended_at is null and g.attempt = a.attempts"
    ):
        held, header = json.loads(core_ids) + json.loads(cell_ids), json.loads(header)
        cost = header.get("cost", {})
        amounts = cost.get("cores", cost.get("cells", [0]))
        if (held or background) and (units not in amounts or len(held) != (0 if background else units)):
            broken.append(f"a grant is one of the amounts: {action} holds {held} as {units} of {amounts} on {node}")
        if not {node_label(node)}.issuperset(header.get("requires", ())):
            broken.append(f"an environment is where it may be: {action} requires {header['requires']} and was granted to {node}")
        granted.add((action, attempt))
        if node in draining & run.draining and not may_begin and (action, attempt) not in run.granted:
            broken.append(f"nothing begins on a draining node: {action} was granted to {node}")
        holding[action] = len(held)
        for core in json.loads(core_ids):
            if by_core.setdefault((node, shard, core), action) != action:
                broken.append(f"no unit is granted twice: core {core} of {node} to {action} and {by_core[node, shard, core]}")
        for cell in json.loads(cell_ids) if service is not None else ():
            by_cell.setdefault((node, cell), []).append(service)
    run.accounts.note(run.world.now, holding)
    run.granted, run.draining = granted, draining
    for where, services in by_cell.items():
        if len(set(services)) > 1 or len(services) > SERVICES[services[0]]["max_concurrency"]:
            broken.append(f"no unit is granted twice: cell {where} to calls of {services}")
    begun = (
        "select g.action, g.node from grants g join nodes n on n.name = g.node join actions a on a.id = g.action"
        " where n.state = 'silent' and n.shard = a.shard and g.granted_at > n.changed_at and a.kind != 'cpu.close'"
    )
    if _last(run, "clock steps") < 0:  # else what was granted before may have the later time
        broken += [f"nothing begins on a silent node: {action} was granted to {node}" for action, node in run.database.execute(begun)]
    opening = [name for (name,) in run.database.execute("select id from actions where kind = 'cpu.open' and status = 'running'")]
    if len(opening) > run.scenario.starting_limit:
        broken.append(f"no more opens at once than may: {opening}")
    broken += _limits(run)
    drawing = {name for (name,) in run.database.execute("select id from actions where quota is not null and kind = 'virtual.work'")}
    times = [at for at, name in run.network.granted if name in drawing]
    is_on_time = not run.scenario.starved and _last(run, "clock steps", "freeze scheduler", "slow network") < 0
    if is_on_time and len(times) > 1 and times[-1] - times[-2] < LEAST_GAP_S:
        broken.append(f"no quota is exceeded: grants at {times[-2]:.3f} and {times[-1]:.3f}")
    return broken


def _limits(run: Run) -> list[str]:
    """Laws of what the fleet, its nodes and its jobs may have."""
    limits, broken = run.scenario, []
    if limits.environments_max is not None:
        standing = "select node, count(*) from environments where state in ('opening', 'open', 'closing')"
        crowds = run.database.execute(f"{standing} group by node, shard having count(*) > ?", (limits.environments_max,))
        broken += [f"no more environments of a node than may: {node} has {count}" for node, count in crowds]
    waiting = "select job, shard, count(*) from actions where status = 'waiting' and attempts = 0 and kind != 'cpu.close'"
    queues = run.database.execute(f"{waiting} group by job, shard having count(*) > ?", (limits.queue_limit,))
    broken += [f"no more of a job wait than may: {count} of {job} in shard {shard}" for job, shard, count in queues]
    restarts = "kill scheduler", "freeze scheduler", "cut scheduler", "journal away", "clock steps", "broker away"
    if _last(run, *restarts) < 0:  # a scheduler that takes over may start one at once
        by_shard: dict[int, float] = {}
        for shard, at in run.database.execute("select shard, granted_at from actions where kind = 'cpu.open' order by granted_at"):
            if at is not None and at - by_shard.get(shard, 0.0) < limits.shards / limits.starts_per_s - ROUNDED_S:
                broken.append(f"no more starts a second than may: in shard {shard} at {by_shard[shard] - EPOCH:.3f} and {at - EPOCH:.3f}")
            by_shard[shard] = at or 0.0
    return broken


def left(run: Run) -> list[str]:
    """Return what is left where nothing should be."""
    found = [
        f"environment {one.spec.id} on {node.name}"
        for node in run.nodes
        if node.sandbox and _lives(node)
        for one in node.sandbox.environments()
    ]
    for name, kind, status in run.database.execute("select id, kind, status from actions where ended_at is null"):
        found.append(f"action {name}, {kind}, is {status} in the journal")
    for name, state in run.database.execute("select id, state from environments where ended_at is null"):
        found.append(f"environment {name} is {state} in the journal")
    for (name,) in run.database.execute("select id from actions join messages on action = id where ended_at is not null"):
        found.append(f"the end of {name} is not published")
    for shard in range(run.scenario.shards):
        document = json.loads(run.network.broker.value(of_shard(SCHEDULER_KEY, shard)) or "{}")
        found += [f"{one['running']} places of quota {name}" for name, one in document.get("quotas", {}).items() if one["running"]]
        found += [f"{one['waiting']} in a queue: {one}" for one in document.get("queues", [])]
        starting = document.get("starting", {})
        found += [f"{starting[what]} opens in the figures" for what in ("now", "waiting") if starting.get(what)]
        found += [f"a share of job {name}: {one}" for name, one in document.get("jobs", {}).items() if one["share"]]
        memory = {name: one["memory"] for name, one in document.get("nodes", {}).items() if one["memory"]}
        found += [f"memory of {name}: {one}" for name, one in memory.items() if one["granted_mb"] or one["paused_count"]]
    for node in run.nodes:
        if _lives(node) and run.ledger.cores.get(f"{node.name}/{node.starts}"):
            found.append(f"{node.name} still runs {run.ledger.cores[f'{node.name}/{node.starts}']}")
    return found


def _lives(node: object) -> bool:
    process = getattr(node, "process", None)
    return process is not None and process.alive


def at_the_end(run: Run) -> list[str]:
    """Laws about what everybody knows in the end."""
    broken = [f"nothing is left anywhere: {what}" for what in left(run)] + (_shards(run) if run.scenario.shards > 1 else [])
    broken += _accounts(run)
    journal = {row[0]: row for row in run.database.execute("select id, status, cause, reason, kind from actions")}
    emptied_at = _last(run, "broker comes back empty")
    told_at = {told.action: told.told_at or 0.0 for trainer in run.trainers for told in trainer.told}
    for name, (_, status, cause, _, kind) in journal.items():
        if told_at.get(name, 0.0) <= emptied_at:  # the store has forgotten this end since, and may have got another one
            continue
        stored = stored_end(name, kind, run.network.broker.value(RESULT_KEY_PREFIX + name))
        if stored is not None and stored.cause != "result_lost" and stored.status != status:
            broken.append(f"the journal agrees: {name}, {kind} is stored as {stored}, the journal says {status} by {cause}")
    for trainer in run.trainers:
        lives = trainer.process is not None and (trainer.process.alive or trainer.closed)
        for told in trainer.told if lives else ():
            broken += _told(run, trainer, told, journal.get(told.action))
        broken += _in_order(run, trainer)
    return broken


def _accounts(run: Run) -> list[str]:
    """Laws of what the journal says an action took and held. Times of several clocks compare only where none of them was set."""
    parts, times = ("queue_s", "background_s", "overhead_s", "execution_s", "unit_s", "cpu_s"), ("received_at", "granted_at", "started_at")
    columns, broken = ("act_s", "submitted_at", "ended_at", *parts, *times), []
    unreached = [fault for fault in run.scenario.faults if fault.kind in ("broker away", "cut scheduler")]
    ended = f"select id || ', ' || kind || ', ' || status, id, {', '.join(columns)} from actions where ended_at is not null"
    for name, action, *figures in run.database.execute(ended):
        of = dict(zip(columns, figures, strict=True))
        if min(of[part] for part in parts) < 0.0:
            broken.append(f"accounts are right: {name} took a negative time: {of}")
        if _last(run, "clock steps") >= 0:
            continue
        known = [of[one] for one in ("submitted_at", *times, "ended_at") if of[one] is not None]
        if known != sorted(known) or abs(of["act_s"] - (of["ended_at"] - of["submitted_at"])) > ROUNDED_S:
            broken.append(f"accounts are right: {name} has times that do not go together: {of}")
        held, counted = run.accounts.unit_s.get(action, 0.0), of["unit_s"]
        from_s, to_s = of["submitted_at"] - EPOCH, of["ended_at"] - EPOCH
        unreached_s = sum(max(0.0, min(to_s, one.at_s + one.lasts_s) - max(from_s, one.at_s)) for one in unreached)
        if abs(counted - held) > UNCOUNTED_S * (1.0 + unreached_s) + UNCOUNTED * held:
            broken.append(f"accounts are right: {name} held {held:.3f} unit-seconds, {counted:.3f} are counted: {of}")
    return broken


def _in_order(run: Run, trainer: Trainer) -> list[str]:
    """Laws of the commands that share a session, where the broker neither loses submissions nor delivers them in another order."""
    if _last(run, "messages late", "submissions lost", "broker comes back empty") >= 0:
        return []
    begins: dict[str, int] = {}
    for number, one in enumerate(run.ledger.runs):
        begins.setdefault(one.action, number)
    last: dict[str, tuple[int, str]] = {}
    broken = []
    for told in trainer.told:
        if told.session and told.action in begins:
            begun = begins[told.action], told.action
            latest = max(begun, last.get(told.session, begun))
            if begun < latest:
                broken.append(f"commands of a session run in order: {told.action} ran before {latest[1]}, which was submitted first")
            last[told.session] = latest
    return broken


def _shards(run: Run) -> list[str]:
    """Laws of several shards: what the journal says of where everything is, and of shards that no fault may have touched."""
    shards, of_node, broken = run.scenario.shards, {node.name: node.shards for node in run.nodes}, []
    of_action = "select a.id, a.shard, a.environment, a.kind = 'virtual.score' or a.quota is not null, g.node"
    for name, shard, environment, is_first, node in run.database.execute(
        f"{of_action} from actions a left join grants g on g.action = a.id"
    ):
        of = shard_of(environment, shards) if environment is not None else FIRST if is_first else shard_of(name, shards)
        if shard != of or (node is not None and of not in of_node[node]):
            broken.append(f"each action is in one shard: {name} of {environment} is of shard {of}, in {shard} and on {node}")
    lost = "select 'environment ' || id, shard, state from environments where state = 'lost' union all"
    lost += " select 'node ' || name, shard, state from nodes where state != 'up' union all"
    lost += " select 'action ' || id, shard, attempts || ' tries, ' || status from actions"
    lost += " where attempts > 1 and kind != 'api.call' or status = 'lost'"  # an API that refuses a call has it wait again
    for name, shard, what in run.database.execute(lost):
        if shard not in run.harmed:
            broken.append(f"what breaks one shard leaves the others alone: {name} of shard {shard} is {what}, only {run.harmed} had faults")
    return broken


def _last(run: Run, *kinds: str) -> float:
    """Return when the last fault of these kinds began, on the clock of `Told`; a negative number if there was none."""
    return max((MONOTONIC + fault.at_s for fault in run.scenario.faults if fault.kind in kinds), default=-1.0)


def _told(run: Run, trainer: Trainer, told: Told, row: tuple[str, str, str, str, str] | None) -> list[str]:
    """The laws of one action whose trainer lives."""
    name = f"{told.action}, {told.kind}"
    if told.times == 0:
        return [f"each action ends: {name} of {trainer.job} has no end; the journal says {row}"]
    lost = isinstance(told.error, ActionError) and told.error.cause == "result_lost" and row is not None
    if isinstance(told.error, StackUnreachable) and row is not None:
        return [f"what is told as not done is not done: {name} was told as unreachable, the journal says {row}"]
    if told.status == "unreachable" or lost:  # it was told of an outage, and not of an end
        return []
    if row is None:
        return [f"the journal agrees: {name} ended as {told.status} ({told.error}), and the journal does not know it"]
    broken = []
    if told.cancelled_at is not None and told.told_at is not None:
        waited_s = told.told_at - max(told.cancelled_at, run.world.monotonic() - run.world.now + run.scenario.calm_from_s)
        # The message that stops the action may be lost, and so may the only scheduler that knew of the cancel.
        with_both = min(_last(run, "messages lost"), _last(run, "kill scheduler", "freeze scheduler", "cut scheduler"))
        if waited_s > (CANCELLED_S if max(_last(run, "submissions lost"), with_both) < 0 else ASKED_S):
            broken.append(f"a cancel is heeded: {name} ended as {told.status} {waited_s:.0f} s after it was cancelled and all was calm")
    # The worker and the store knew this end. Where both have lost it before a scheduler read it, only the client knows.
    gone_at = min(_last(run, "broker comes back empty"), _last(run, "kill node", "stop node", "restart node", "replace node"))
    forgotten = row[1] == "lost" and gone_at > told.submitted_at
    if row[1] != told.status and not forgotten:
        broken.append(f"the journal agrees: {name} ended as {told.status} ({told.error or told.value}), the journal says {row}")
    runs = [one for one in run.ledger.runs if one.action == told.action]
    if runs and isinstance(told.error, ActionError) and told.error.cause in ("queue_full", "queue_timeout", "impossible"):
        broken.append(f"what is refused does not run: {name} ended by {told.error.cause}, it ran {runs}")
    if isinstance(told.error, ActionError) and fault_of(told.error.cause) == "program":
        broken.append(f"no failure of ours is a score: {name} ended as {told.status} by {told.error.cause}: {told.error}")
    if isinstance(told.value, ExecResult):
        wanted = {"succeeded": told.asked.get("exit", 0), "timed_out": None}[told.status]
        if not any(one.outcome == told.status and one.exit_code == wanted for one in runs) or told.value.exit_code != wanted:
            broken.append(f"a result is what ran: {name} ended as {told.value}, it ran {runs}")
        if told.value.stdout != str(told.asked["print"]):
            broken.append(f"a result is what ran: {name} printed {told.value.stdout}, not {told.asked['print']}")
    if told.kind == "virtual.score" and told.status == "failed":
        broken.append(f"a decision can be carried out: {name} failed: {told.error}")
    if told.kind.startswith("virtual.") and told.status == "succeeded" and not any(one.outcome for one in runs):
        broken.append(f"a result is what ran: {name} never ran")
    return broken
