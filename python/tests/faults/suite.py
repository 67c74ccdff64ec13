"""Jobs on four engines while processes die: every run must end with one and the same SHA-256. Minutes; as root, for the full disk.

    just faults                      PYTHONPATH=python target/faults/bin/python python/tests/faults/suite.py
    just faults ray,disk             only the cases whose names have one of these in them

Prints a line for each case: rows needed, rows computed (more where work was lost), the hash. Fails if one differs, or if `verify` is not clean.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "faults"), str(TESTS), str(TESTS.parent)])
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil  # noqa: E402
from driver import TASKS, job_of  # noqa: E402
from support import corpus, lines, rows_computed, small_classifier  # noqa: E402

ROWS, SECONDS = 600, "0.3"


class Suite:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.source = corpus(folder / "in", ROWS)
        small_classifier(folder / "classes")
        self.hashes: Dict[str, str] = {}
        self.failed: List[str] = []
        self.drivers: List[subprocess.Popen] = []

    def start(self, engine: str, task: str, sink: Path, *address: str) -> subprocess.Popen:
        out = open(f"{sink}.out", "a")
        command = [sys.executable, str(TESTS / "faults/driver.py"), engine, task, str(self.source), str(sink), f"{sink}.log", SECONDS, *address]
        self.drivers.append(subprocess.Popen(command, stdout=out, stderr=out))
        return self.drivers[-1]

    def case(self, name: str, task: str, work: Callable[[Path], None]) -> None:
        """Runs a case in a sink of its own, and compares what is in it."""
        self.count += 1
        sink, start = self.folder / f"{self.count:02d}", time.monotonic()
        try:
            work(sink)
            found = job_of(task, str(self.source), str(sink), f"{sink}.log").verify()
            expected = self.hashes.setdefault(task, found.sha256)
            verdict = "ok" if found.clean and found.sha256 == expected else f"FAILED: {found}"
            digest, needed = found.sha256[:16], found.rows_in
        except Exception as error:
            verdict, digest, needed = f"FAILED: {type(error).__name__}: {error}", "", 0
        print(f"{name:34} {task:16} {needed:5} needed {rows_computed(f'{sink}.log'):5} computed  {digest}  {time.monotonic() - start:5.0f} s  {verdict}", flush=True)
        for process in self.drivers:
            process.kill()  # one that hangs
            process.wait()
        self.drivers.clear()
        if verdict != "ok":
            self.failed.append(name)
            print(Path(f"{sink}.out").read_text()[-3000:] if Path(f"{sink}.out").exists() else "", flush=True)


def finished(process: subprocess.Popen) -> None:
    if process.wait(timeout=600) != 0:
        raise RuntimeError(f"the driver ended with {process.returncode}")


def await_lines(sink: Path, count: int) -> List[Tuple[str, int, int]]:
    while len(found := lines(f"{sink}.log")) < count:
        time.sleep(0.05)
    return found


def kill_worker(sink: Path, count: int) -> None:
    """Kills the process of the last line, when there are so many lines."""
    os.kill(await_lines(sink, count)[-1][1], signal.SIGKILL)


def with_ray(suite: Suite, selected: Callable[[str], bool]) -> None:
    """A cluster of three nodes, as `ray.cluster_utils` makes it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    address = cluster.address

    def run(sink: Path, task: str = "translate", disturb: Callable[[Path], None] = lambda sink: None) -> None:
        process = suite.start("ray", task, sink, address)
        disturb(sink)
        finished(process)

    def remove_node(sink: Path) -> None:
        await_lines(sink, 8)
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    def kill_driver(sink: Path) -> None:
        for count in (8, 20):
            process = suite.start("ray", "translate", sink, address)
            await_lines(sink, count)
            process.kill()
            process.wait()
        run(sink)

    def two_drivers(sink: Path) -> None:
        for process in [suite.start("ray", "translate", sink, address) for _ in range(2)]:
            finished(process)

    def kill_two(sink: Path) -> None:
        kill_worker(sink, 7)
        kill_worker(sink, 17)

    try:
        for task in TASKS:
            if selected("ray"):
                suite.case("ray, 3 nodes", task, lambda sink: run(sink, task))
        for name, work in {
            "ray, worker killed": lambda sink: run(sink, disturb=kill_two),
            "ray, driver killed twice": kill_driver,
            "ray, two drivers": two_drivers,
            "ray, node removed": lambda sink: run(sink, disturb=remove_node),
        }.items():
            if selected(name):
                suite.case(name, "translate", work)
    finally:
        cluster.shutdown()


def local_cases(suite: Suite) -> Dict[str, Callable[[Path], None]]:
    def worker(sink: Path) -> None:
        process = suite.start("local", "translate", sink)
        for count in (3, 9, 16):
            kill_worker(sink, count)
        finished(process)

    def driver(sink: Path) -> None:
        for count in (3, 12, 25, 33):
            process = suite.start("local", "translate", sink)
            await_lines(sink, count)
            process.kill()
            process.wait()
            while any(psutil.pid_exists(own) and psutil.Process(own).status() != psutil.STATUS_ZOMBIE for _, own, _ in lines(f"{sink}.log")):
                time.sleep(0.05)
        finished(suite.start("local", "translate", sink))

    def two(sink: Path) -> None:
        for process in [suite.start("local", "translate", sink) for _ in range(2)]:
            finished(process)

    def full_disk(sink: Path) -> None:
        sink.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(sink)], check=True)
        try:
            process = suite.start("local", "translate", sink)
            if process.wait() == 0 or "No space left" not in Path(f"{sink}.out").read_text():
                raise RuntimeError("the disk was not full")
            subprocess.run(["mount", "-o", "remount,size=16m", str(sink)], check=True)
            finished(suite.start("local", "translate", sink))
            shutil.copytree(sink, f"{sink}.copy")
        finally:
            subprocess.run(["umount", str(sink)], check=True)
        sink.rmdir()
        Path(f"{sink}.copy").rename(sink)

    def corrupt(sink: Path) -> None:
        file = suite.source / "b.parquet"
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        try:
            process = suite.start("local", "translate", sink)
            if process.wait() == 0 or "b.parquet" not in Path(f"{sink}.out").read_text():
                raise RuntimeError("the corrupt file was not named")
        finally:
            file.write_bytes(whole)
        finished(suite.start("local", "translate", sink))

    return {"local, 3 workers killed": worker, "local, driver killed 4 times": driver, "local, two drivers": two, "local, disk full": full_disk, "local, corrupt file": corrupt}


def engine_cases(suite: Suite) -> Dict[str, Callable[[Path], None]]:
    def executor(sink: Path) -> None:
        process = suite.start("spark", "translate", sink)
        await_lines(sink, 8)
        family = psutil.Process(process.pid).children(recursive=True)
        executors = [one for one in family if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline())]
        executors[0].kill()
        finished(process)

    def python_worker(sink: Path) -> None:
        process = suite.start("spark", "translate", sink)
        kill_worker(sink, 7)
        finished(process)

    def dask_worker(sink: Path) -> None:
        process = suite.start("dask", "translate", sink)
        kill_worker(sink, 7)
        finished(process)

    return {"spark, executor killed": executor, "spark, Python worker killed": python_worker, "dask, worker killed": dask_worker}


def main() -> int:
    wanted = [part for argument in sys.argv[1:] for part in argument.split(",")]

    def selected(name: str) -> bool:
        return not wanted or any(part in name for part in wanted)

    folder = Path(tempfile.mkdtemp(prefix="regard-faults-"))
    suite = Suite(folder)

    def run(engine: str, task: str) -> Callable[[Path], Any]:
        return lambda sink: finished(suite.start(engine, task, sink))

    for engine in ("local", "spark", "dask"):
        for task in TASKS:
            if selected(engine) or engine == "local":
                suite.case(f"{engine}, undisturbed", task, run(engine, task))
    for name, work in {**local_cases(suite), **engine_cases(suite)}.items():
        if selected(name):
            suite.case(name, "translate", work)
    if any(selected(name) for name in ("ray", "ray, worker killed", "ray, node removed")):
        with_ray(suite, selected)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{suite.count - len(suite.failed)} of {suite.count} cases ended with the same bits" + (f"; FAILED: {', '.join(suite.failed)}" if suite.failed else ""))
    return bool(suite.failed)


if __name__ == "__main__":
    sys.exit(main())
