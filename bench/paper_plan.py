"""What the paper's benchmark simulates: sections of tables of cases.

Only values live here: sizes, policies, and which cases make up which table. How a table looks is
`bench.paper_document`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.paper_cases import Case
from scheduler.policies import PARTS
from scheduler.sim.cluster import Cluster

MISSING = "There was no trace of recorded rollouts; `--rollouts FILE` names one."
NODE_MEMORY_MB = 2_400_000
ABLATED = tuple(part for part in PARTS if part != "memory")
"""Parts that the workloads can measure. They do not say how much memory an action uses."""
POLICIES = ("static:4", "fcfs", "fixed:4", "fixed:16", "paper", "elastic")
WITH_ONE_CORE_PODS = ("static:1", *POLICIES)

Kind = Literal["policies", "matrix", "ablation", "calibration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A case in a table: its row, and its column where the table has columns of cases."""

    row: str
    case: Case
    column: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cases to be compared. `columns` says what the columns of a matrix are; `name` what its plots are called."""

    kind: Kind
    name: str
    heading: str
    entries: tuple[Entry, ...]
    columns: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A chapter of the document; `missing` says why it lacks tables."""

    name: str
    title: str
    text: str
    tables: tuple[Table, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. The clusters are CPU nodes, GPU nodes (for judge and teachers) and nodes with both."""

    coding: int
    batches: tuple[int, ...]
    cpu: Cluster
    cores_per_trajectory: tuple[tuple[str, Cluster], ...]
    search: int
    teachers: int
    more_teachers: int
    gpu: Cluster
    fewer_gpus: tuple[Cluster, ...]
    mixed: int
    both: Cluster
    rollouts: int
    rollout_cores: tuple[int, ...]
    ablation_cores: tuple[int, ...]


def _cpu(nodes: int, cores: int) -> Cluster:
    return Cluster(nodes=nodes, cores=cores, memory_mb=NODE_MEMORY_MB)


def _gpu(nodes: int) -> Cluster:
    return Cluster(nodes=nodes, cores=8, gpus=8, memory_mb=NODE_MEMORY_MB)


FULL = Sizes(
    coding=1280,
    batches=(256, 512, 768, 1024, 1280, 1536),
    cpu=_cpu(5, 256),
    cores_per_trajectory=(("0.75", _cpu(5, 192)), ("1", _cpu(5, 256)), ("3", _cpu(15, 256))),
    search=2048,
    teachers=2048,
    more_teachers=3072,
    gpu=_gpu(5),
    fewer_gpus=(_gpu(4), _gpu(3), _gpu(2)),
    mixed=1280,
    both=Cluster(nodes=5, cores=128, gpus=4, memory_mb=NODE_MEMORY_MB),
    rollouts=256,
    rollout_cores=(8, 16, 32, 48, 64),
    ablation_cores=(8, 32),
)

QUICK = Sizes(
    coding=32,
    batches=(6, 32, 38),
    cpu=_cpu(1, 32),
    cores_per_trajectory=(("0.75", _cpu(1, 24)), ("1", _cpu(1, 32)), ("3", _cpu(2, 48))),
    search=51,
    teachers=51,
    more_teachers=77,
    gpu=_gpu(2),
    fewer_gpus=(_gpu(1),),
    mixed=32,
    both=Cluster(nodes=1, cores=16, gpus=16, memory_mb=NODE_MEMORY_MB),
    rollouts=6,
    rollout_cores=(1, 2),
    ablation_cores=(1, 2),
)
"""A fortieth of the trajectories and cores. GPUs stay at two nodes, as static shares need one for each of nine services."""


def plan(sizes: Sizes, seed: int, rollouts: Path | None) -> list[Section]:
    """Return all sections; `rollouts` is the trace of recorded rollouts, if there is one."""
    made: list[Callable[[Sizes, int], Section]] = [_calibration, _coding, _batch, _per_trajectory, _search, _teachers, _mixed]
    return [*(make(sizes, seed) for make in made), _recorded(sizes, seed, rollouts), _ablation(sizes, seed, rollouts)]


def gpus(cluster: Cluster) -> int:
    """Return the GPUs of all nodes."""
    return cluster.nodes * cluster.gpus


def shape(cluster: Cluster) -> str:
    """Say what a cluster is made of."""
    node = f"{cluster.cores} core{'s' if cluster.cores > 1 else ''}" + (f" and {cluster.gpus} GPUs" if cluster.gpus else "")
    return f"{cluster.nodes} × {node}" if cluster.nodes > 1 else node


def _calibration(sizes: Sizes, seed: int) -> Section:
    roomy = sizes.cores_per_trajectory[-1][1]
    coding = [
        Entry(row=f"ai-coding, {count} trajectories, {shape(roomy)}", case=_case("ai-coding", count, "paper", roomy, seed))
        for count in (sizes.coding, sizes.batches[-1])
    ]
    pods = Entry(row="ai-coding under `static:1`", case=_case("ai-coding", sizes.coding, "static:1", roomy, seed))
    teachers = [
        Entry(row=f"mopd, {count} trajectories, {shape(sizes.gpu)}", case=_case("mopd", count, "paper", sizes.gpu, seed))
        for count in (sizes.teachers, sizes.more_teachers)
    ]
    text = "The workloads are drawn from the distributions of `bench/workloads.py`; this is how near they come to what the paper reports."
    table = Table(kind="calibration", name="calibration", heading="", entries=(*coding, *teachers, pods))
    return Section(name="calibration", title="How near the workloads are to the published ones", text=text, tables=(table,))


def _coding(sizes: Sizes, seed: int) -> Section:
    table = _policies("ai-coding", sizes.coding, WITH_ONE_CORE_PODS, sizes.cpu, seed)
    return Section(name="ai-coding", title="AI coding", text="Sandboxes, short commands, builds, a test run at the end.", tables=(table,))


def _search(sizes: Sizes, seed: int) -> Section:
    text = (
        "API calls under one quota, then a judge on GPUs; no sandbox, so `static:4` only differs in giving the judge its GPUs for good. "
        "A trainer without a shared quota would meet refusals and retries, which are not simulated: every policy here waits in one queue."
    )
    table = _policies("deepsearch", sizes.search, POLICIES, sizes.gpu, seed)
    return Section(name="deepsearch", title="DeepSearch", text=text, tables=(table,))


def _teachers(sizes: Sizes, seed: int) -> Section:
    text = "Nine teachers share the GPUs. Under `static:4` each teacher owns an equal share of them for good and is never restored."
    static = Entry(row="static:4", column=str(gpus(sizes.gpu)), case=_case("mopd", sizes.teachers, "static:4", sizes.gpu, seed))
    shared = [
        Entry(row=policy, column=str(gpus(cluster)), case=_case("mopd", sizes.teachers, policy, cluster, seed))
        for cluster in (sizes.gpu, *sizes.fewer_gpus)
        for policy in ("fcfs", "paper", "elastic")
    ]
    fewer = Table(kind="matrix", name="gpus", heading="With fewer GPUs", columns="GPUs", entries=(static, *shared))
    table = _policies("mopd", sizes.teachers, POLICIES, sizes.gpu, seed)
    return Section(name="mopd", title="MOPD", text=text, tables=(table, fewer))


def _mixed(sizes: Sizes, seed: int) -> Section:
    text = "Half AI coding, a quarter each DeepSearch and MOPD: three jobs at once on one cluster."
    return Section(
        name="mixed", title="Three jobs", text=text, tables=(_policies("mixed", sizes.mixed, WITH_ONE_CORE_PODS, sizes.both, seed),)
    )


def _batch(sizes: Sizes, seed: int) -> Section:
    entries = tuple(
        Entry(row=policy, column=str(count), case=_case("ai-coding", count, policy, sizes.cpu, seed))
        for policy in WITH_ONE_CORE_PODS
        for count in sizes.batches
    )
    table = Table(kind="matrix", name="batch", heading=f"AI coding on {shape(sizes.cpu)}", columns="trajectories", entries=entries)
    return Section(name="batch", title="Batch size", text="The cluster stays, the batch grows.", tables=(table,))


def _per_trajectory(sizes: Sizes, seed: int) -> Section:
    policies = ("static:1", "static:4", "fcfs", *(f"fixed:{units}" for units in (1, 2, 4, 8, 16)), "paper", "elastic")
    entries = tuple(
        Entry(row=policy, column=share, case=_case("ai-coding", sizes.coding, policy, cluster, seed))
        for policy in policies
        for share, cluster in sizes.cores_per_trajectory
    )
    heading = f"AI coding, {sizes.coding} trajectories"
    table = Table(kind="matrix", name="cores", heading=heading, columns="cores per trajectory", entries=entries)
    return Section(name="cores", title="Cores per trajectory", text="The batch stays, the cluster grows.", tables=(table,))


def _recorded(sizes: Sizes, seed: int, file: Path | None) -> Section:
    title = "Recorded rollouts"
    if file is None:
        return Section(name="rollouts", title=title, text="", missing=MISSING)
    wide = sizes.rollouts
    pods = Entry(row="static:1", column=str(wide), case=_case("rollouts", sizes.rollouts, "static:1", _cpu(1, wide), seed, file=file))
    entries = tuple(
        Entry(row=policy, column=str(cores), case=_case("rollouts", sizes.rollouts, policy, _cpu(1, cores), seed, file=file))
        for policy in ("fcfs", "paper", "elastic")
        for cores in sizes.rollout_cores
    )
    text = f"What coding agents really did (`{file.name}`), tiled to {sizes.rollouts} trajectories. Pods of one core need {wide} cores."
    matrix = Table(kind="matrix", name="rollouts", heading="On few cores", columns="cores", entries=(*entries, pods))
    return Section(name="rollouts", title=title, text=text, tables=(matrix, *_recorded_policies(sizes, entries, pods)))


def _recorded_policies(sizes: Sizes, entries: Sequence[Entry], pods: Entry) -> list[Table]:
    tables = []
    for cores in sizes.rollout_cores[-3:]:
        rows = (pods, *(entry for entry in entries if entry.column == str(cores)))
        heading = f"On {cores} cores; `static:1` on {pods.column}"
        tables.append(Table(kind="policies", name=f"rollouts-{cores}", heading=heading, entries=rows))
    return tables


def _ablation(sizes: Sizes, seed: int, file: Path | None) -> Section:
    heading = f"AI coding, {sizes.coding} trajectories, {shape(sizes.cpu)}"
    tables = [_parts("ablation-coding", heading, _case("ai-coding", sizes.coding, "elastic", sizes.cpu, seed))]
    for cores in sizes.ablation_cores if file is not None else ():
        heading = f"Recorded rollouts, {sizes.rollouts} trajectories, {cores} cores"
        case = _case("rollouts", sizes.rollouts, "elastic", _cpu(1, cores), seed, file=file)
        tables.append(_parts(f"ablation-rollouts-{cores}", heading, case))
    fewer = sizes.fewer_gpus[len(sizes.fewer_gpus) // 2]
    heading = f"MOPD, {sizes.teachers} trajectories, {shape(fewer)}"
    tables.append(_parts("ablation-mopd", heading, _case("mopd", sizes.teachers, "elastic", fewer, seed)))
    text = "`elastic` with each of its parts switched off alone."
    return Section(
        name="ablation", title="What each part is worth", text=text, tables=tuple(tables), missing=MISSING if file is None else ""
    )


def _parts(name: str, heading: str, whole: Case) -> Table:
    entries = (Entry(row="all parts", case=whole), *(Entry(row=f"without {one}", case=replace(whole, without=(one,))) for one in ABLATED))
    return Table(kind="ablation", name=name, heading=heading, entries=entries)


def _policies(workload: str, trajectories: int, policies: Sequence[str], cluster: Cluster, seed: int) -> Table:
    entries = tuple(Entry(row=policy, case=_case(workload, trajectories, policy, cluster, seed)) for policy in policies)
    return Table(kind="policies", name=workload, heading=f"{trajectories} trajectories on {shape(cluster)}", entries=entries)


def _case(workload: str, trajectories: int, policy: str, cluster: Cluster, seed: int, *, file: Path | None = None) -> Case:
    return Case(workload=workload, trajectories=trajectories, policy=policy, cluster=cluster, seed=seed, file=file)
