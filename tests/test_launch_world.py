"""Owns the checks of launch/world.py: which launcher is believed, what its variables mean, what is refused."""

import pytest

from ringflash.launch.world import World, expand_hosts, find_world, launcher, torchrun_variables

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURMD_NODENAME": "node10",
}
# What `sbatch -n 4` gives to the batch script itself.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}


def changed(env: dict[str, str], **changes: str | None) -> dict[str, str]:
    """`env` with some variables set, or removed where None."""
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


def test_nothing_set_is_a_world_of_one() -> None:
    world = find_world({})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.source) == (0, 1, 0, 1, "single")
    assert world.master_port == 0


def test_torchrun() -> None:
    world = find_world(TORCHRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.master_addr, world.master_port, world.source) == ("gpu1", 29500, "torchrun")
    assert torchrun_variables(world) == TORCHRUN


def test_srun() -> None:
    world = find_world(SRUN)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (4, 5, 0, 1)
    assert (world.host, world.master_addr, world.source) == ("node10", "node08", "slurm")
    assert 10000 <= world.master_port < 30000


def test_srun_tasks_agree_on_the_port_and_steps_do_not_share_it() -> None:
    other_task = changed(SRUN, SLURM_PROCID="0", SLURM_NODEID="0")
    assert find_world(other_task).master_port == find_world(SRUN).master_port
    assert find_world(changed(SRUN, SLURM_STEP_ID="1")).master_port != find_world(SRUN).master_port


def test_srun_takes_an_exported_address() -> None:
    world = find_world(changed(SRUN, MASTER_ADDR="10.0.0.1", MASTER_PORT="4000"))
    assert (world.master_addr, world.master_port) == ("10.0.0.1", 4000)


def test_srun_counts_the_step_not_the_allocation() -> None:
    step = {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    world = find_world(changed(SRUN, SLURM_PROCID="1", SLURM_LOCALID="1", **step))
    assert (world.size, world.local_size, world.master_addr) == (2, 2, "127.0.0.1")


def test_srun_falls_back_to_ntasks_per_node() -> None:
    env = changed(SRUN, SLURM_STEP_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE="2")
    assert find_world(env).local_size == 2


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["batch script", "batch step", "interactive step"],
)
def test_an_allocation_without_srun_is_no_ring(extra: dict[str, str]) -> None:
    assert find_world({**BATCH, **extra}).source == "single"


def test_an_allocation_shell_is_no_ring() -> None:
    assert launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[1-2]"}) == "single"


def test_srun_pty_shell_is_a_world_of_one() -> None:
    shell = changed(BATCH, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1")
    assert find_world(shell).size == 1


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({**SRUN, **TORCHRUN}, "torchrun"),
        ({"PMI_RANK": "0", "MPI_LOCALRANKID": "0", **TORCHRUN}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", **SRUN}, "mpi"),
        ({"MPI_LOCALRANKID": "0", "PMI_RANK": "0", **SRUN}, "mpi"),
        ({"PMI_RANK": "4", "PMI_SIZE": "5", **SRUN}, "slurm"),
        ({"PMIX_RANK": "4", **SRUN}, "slurm"),
        ({"PMIX_RANK": "0"}, "mpi"),
        ({"PMI_RANK": "0", **BATCH}, "mpi"),
        ({"MASTER_ADDR": "gpu1", "MASTER_PORT": "1"}, "single"),
    ],
)
def test_which_launcher_is_believed(env: dict[str, str], expected: str) -> None:
    assert launcher(env) == expected


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_half_set_torchrun_variables_name_the_missing_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is not set though .*export {name} too"):
        find_world(changed(TORCHRUN, **{name: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, r"RANK must lie between 0 and WORLD_SIZE - 1: RANK=8, WORLD_SIZE=8"),
        ({"RANK": "-1"}, r"RANK must be an integer >= 0: RANK='-1'"),
        ({"RANK": "two"}, r"RANK must be an integer >= 0: RANK='two'"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE must be an integer >= 1: WORLD_SIZE='0'"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK must lie between 0 and LOCAL_WORLD_SIZE - 1"),
        ({"LOCAL_WORLD_SIZE": "9"}, r"one host cannot hold more ranks than the job: local_size=9, size=8"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT must be a port between 1 and 65535: MASTER_PORT=70000"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT must be an integer >= 1"),
        ({"MASTER_ADDR": ""}, r"MASTER_ADDR is not set"),
    ],
)
def test_contradictory_torchrun_variables(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_world({**TORCHRUN, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "5"}, r"SLURM_PROCID must lie between 0 and SLURM_NTASKS - 1"),
        ({"SLURM_LOCALID": None}, r"SLURM_LOCALID is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, r"SLURM_STEP_TASKS_PER_NODE is not set .* --ntasks-per-node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, r"SLURM_STEP_TASKS_PER_NODE='two' is not a list of task counts"),
        ({"SLURM_NODEID": "3"}, r"SLURM_NODEID must lie between"),
        ({"SLURM_STEP_NODELIST": None}, r"SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, r"is not a host list"),
        ({"SLURM_JOB_ID": None}, r"SLURM_JOBID is not set"),
    ],
)
def test_contradictory_slurm_variables(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_world(changed(SRUN, **changes))


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("node[8-11]-ib", ["node8-ib", "node9-ib", "node10-ib", "node11-ib"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("node[099-101].cluster.org", ["node099.cluster.org", "node100.cluster.org", "node101.cluster.org"]),
    ],
)
def test_expand_hosts(nodelist: str, hosts: list[str]) -> None:
    assert list(expand_hosts(nodelist)) == hosts


@pytest.mark.parametrize(
    "nodelist", ["", ",a", "a,", "a,,b", "n[", "n[]", "n[1-2", "n]1", "n[a-b]", "n[3-1]", "n[1-2-3]", "a b"]
)
def test_expand_hosts_refuses(nodelist: str) -> None:
    with pytest.raises(ValueError, match="host"):
        expand_hosts(nodelist)


def test_a_world_checks_itself() -> None:
    places = {"rank": 2, "size": 2, "local_rank": 0, "local_size": 1}
    with pytest.raises(ValueError, match="rank must lie between 0 and size - 1: rank=2, size=2"):
        World(**places, host="h", master_addr="h", master_port=1, source="single")
