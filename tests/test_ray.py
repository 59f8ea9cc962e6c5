"""The Ray engine on a cluster of two nodes: the same numbers, the same verdicts, also when a node is lost."""

import json
import os
import sys
from pathlib import Path

import pytest
from test_campaign import cases_of, counts, plan_of, run

ray = pytest.importorskip("ray", reason="needs ray, which is an extra")

from ray.cluster_utils import Cluster  # noqa: E402

from oracles.exits import WorkersError  # noqa: E402
from oracles.ray_engine import RayEngine  # noqa: E402
from oracles.worker import DONE, Limits, Task  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Ray's own: sockets and files of the processes that it leaves to the system.
    pytest.mark.filterwarnings("ignore"),
]

NUM_CASES = 150


@pytest.fixture
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    path = os.pathsep.join([*sys.path, os.path.dirname(__file__)])  # noqa: PTH120
    ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def engine():
    return RayEngine(ray, 2, "cpu", Limits(60.0))


def test_two_nodes_judge_what_one_process_does(cluster, tmp_path):
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    far, _ = run(plan_of(NUM_CASES), tmp_path / "far", engine())
    near, _ = run(plan_of(NUM_CASES), tmp_path / "near")
    assert counts(far) == counts(near)
    assert cases_of(tmp_path / "far") == cases_of(tmp_path / "near")


def test_a_node_that_dies_costs_no_verdict(cluster, tmp_path):
    class Losing(RayEngine):
        def outcomes(self, source):
            for number, outcome in enumerate(super().outcomes(source)):
                if outcome is not None and number and not self.lost:
                    self.lost = True
                    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
                yield outcome

    losing = Losing(ray, 2, "cpu", Limits(60.0))
    losing.lost = False
    tally, _ = run(plan_of(NUM_CASES), tmp_path / "run", losing)
    assert losing.lost
    assert tally.total("held") == NUM_CASES
    assert sorted(cases_of(tmp_path / "run")) == list(range(NUM_CASES))


def test_a_task_whose_actor_dies_twice_is_told(cluster, monkeypatch):
    tasks = [Task("x:y")]
    monkeypatch.setattr("oracles.ray_engine.Judge", Dying)
    found = engine().outcomes(lambda _: tasks.pop() if tasks else None)
    [outcome] = [outcome for outcome in found if outcome is not None]
    assert outcome.end == "crashed"
    assert outcome.why.startswith("its Ray actor died twice: ")


def test_an_actor_without_workers_is_no_crash_of_the_task(cluster, monkeypatch, tmp_path):
    tasks = [Task("x:y", str(tmp_path))]
    monkeypatch.setattr("oracles.ray_engine.Judge", TwiceWithoutWorkers)
    found = engine().outcomes(lambda _: tasks.pop() if tasks else None)
    [outcome] = [outcome for outcome in found if outcome is not None]
    assert (outcome.end, outcome.why) == (DONE, "")


def test_a_cluster_without_workers_is_an_error_with_its_message(cluster, monkeypatch):
    tasks = [Task("x:y")]
    monkeypatch.setattr("oracles.ray_engine.Judge", NeverWithWorkers)
    with pytest.raises(WorkersError, match="Ray actors do not work: workers do not start: no such library"):
        list(engine().outcomes(lambda _: tasks.pop() if tasks else None))


class TwiceWithoutWorkers:
    """Actors of which the first two that are given a task cannot start their workers."""

    def __init__(self, device, limits):
        pass

    def ready(self):
        return None

    def run(self, handler, argument):
        failed = Path(json.loads(argument))
        if len(list(failed.iterdir())) == 2:
            return json.dumps([[], DONE, ""])
        (failed / str(os.getpid())).touch()
        raise WorkersError("workers do not start: no such library")


class NeverWithWorkers(TwiceWithoutWorkers):
    def run(self, handler, argument):
        raise WorkersError("workers do not start: no such library")


class Dying:
    """An actor that does not survive its task."""

    def __init__(self, device, limits):
        pass

    def ready(self):
        return None

    def run(self, handler, argument):
        os._exit(1)
