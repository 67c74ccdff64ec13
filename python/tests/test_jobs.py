"""`regard.jobs`: a corpus exactly once, whatever dies. The whole suite of failures, on all engines, is in `faults/`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

import regard  # noqa: E402
from support import ROOT, Logged, corpus, lines, rows_computed, sentences  # noqa: E402
from regard import batch, jobs  # noqa: E402

ROWS = 400


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("source") / "in", ROWS)


def job_of(source, sink, log=None, seconds=0.0, **options):
    task = batch.Translate("zh-en", score="score")
    return jobs.Job(str(source), str(sink), task if log is None else Logged(task, str(log), seconds), rows_per_shard=25, **options)


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """What every run must give: `verify` of one that nothing has disturbed."""
    job = job_of(source, tmp_path_factory.mktemp("sink") / "out")
    report = job.run(workers=2, progress=lambda line: None)
    assert (report.shards, report.rows, report.rows_computed, report.rows_failed, report.deaths) == (17, ROWS, ROWS, 2, 0)
    found = job.verify()
    assert found.clean and (found.rows_in, found.rows_out, found.rows_failed) == (ROWS, ROWS, 2), str(found)
    assert "the text is null" in found.reasons
    return found


def await_lines(log, count):
    """Waits until a task has written so many lines."""
    while len(lines(log)) < count:
        time.sleep(0.02)


def test_rows_are_those_of_the_task_itself(source, tmp_path, undisturbed):
    job = job_of(source, tmp_path / "out")
    job.run(workers=1)
    assert job.verify().sha256 == undisturbed.sha256
    whole = batch.Translate("zh-en", score="score")(pq.read_table(source / "a.parquet"))
    shards = sorted((tmp_path / "out").glob("a-*.parquet"))
    assert pa.concat_tables([pq.read_table(shard) for shard in shards]).equals(whole) and len(shards) == 8
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("_")) == ["_SUCCESS", "_regard.json"]


def test_processes_that_are_killed_are_replaced(source, tmp_path, undisturbed):
    log, rng = tmp_path / "log", random.Random(5)
    job = job_of(source, tmp_path / "out", log, seconds=0.2)
    killed = []

    def kill():
        for kills in range(4):
            await_lines(log, 3 + 5 * kills)
            time.sleep(rng.random() * 0.3)
            process = lines(log)[-1][1]
            try:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
            except ProcessLookupError:
                pass

    thread = threading.Thread(target=kill)
    thread.start()
    report = job.run(workers=2)
    thread.join()
    found = job.verify()
    assert found.clean and found.sha256 == undisturbed.sha256, str(found)
    assert len(killed) >= 2 and 1 <= report.deaths <= len(killed)
    # A process that is killed between the file of a shard and its report has computed rows that the run does not count.
    assert ROWS - 25 * report.deaths <= report.rows_computed <= ROWS
    assert ROWS <= rows_computed(log) <= ROWS + 25 * len(killed)


DRIVER = """
import sys; from test_jobs import job_of
print(job_of(*sys.argv[1:4], seconds=0.1).run(sys.argv[4], workers=2), flush=True)
"""


def driver(source, sink, log, engine="local"):
    """A run in a process of its own."""
    path = [str(Path(regard.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", DRIVER, str(source), str(sink), str(log), engine]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_driver_that_is_killed_is_run_again(source, tmp_path, undisturbed):
    log, sink, rng = tmp_path / "log", tmp_path / "out", random.Random(7)
    for _ in range(3):
        before, process = len(lines(log)), driver(source, sink, log)
        await_lines(log, before + rng.randrange(1, 6))
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.communicate()
        # Its processes end with it, after the shard that they are at.
        for worker in {worker for _, worker, _ in lines(log)}:
            while is_alive(worker):
                time.sleep(0.02)
    job = job_of(source, sink)
    assert not (sink / "_SUCCESS").exists() and not job.verify().clean and "not finished" in str(job.verify())
    process = driver(source, sink, log)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    found = job.verify()
    assert found.clean and found.sha256 == undisturbed.sha256, str(found)
    assert ROWS <= rows_computed(log) <= ROWS + 3 * 2 * 25


def test_two_drivers_at_once_give_the_same(source, tmp_path, undisturbed):
    log, sink = tmp_path / "log", tmp_path / "out"
    both = [driver(source, sink, log) for _ in range(2)]
    for process in both:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    found = job_of(source, sink).verify()
    assert found.clean and found.sha256 == undisturbed.sha256, str(found)


def test_a_worker_of_ray_that_is_killed_costs_nothing_but_its_shard(source, tmp_path, undisturbed):
    import ray

    log = tmp_path / "log"
    path = os.pathsep.join([str(Path(regard.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="error", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        job = job_of(source, tmp_path / "out", log, seconds=0.2)

        def kill():
            await_lines(log, 6)
            os.kill(lines(log)[-1][1], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        report = job.run("ray")
        thread.join()
        # Shards of a task that no node can take would wait without a word.
        large = jobs.Job(str(source), str(tmp_path / "large"), batch.Translate("zh-en", threads=3), rows_per_shard=25)
        with warnings.catch_warnings(), pytest.raises(UserWarning, match="threads=3, and the largest node of the cluster 2 CPUs.*give the task threads=2"):
            warnings.simplefilter("error")
            large.run("ray")
    finally:
        ray.shutdown()
    found = job.verify()
    assert found.clean and found.sha256 == undisturbed.sha256, str(found)
    assert report.rows == ROWS <= rows_computed(log) <= ROWS + 2 * 25
    # The one that was killed, and the ones that went on.
    assert len({process for _, process, _ in lines(log)}) >= 2


@pytest.fixture(scope="module")
def bucket():
    """An S3 server on this machine, and the parameters of URIs that lead to it."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true&allow_delayed_open=true"
    server.stop()


def test_an_object_store_is_source_and_sink(source, tmp_path, undisturbed, bucket):
    import pyarrow.fs as pafs

    store, _ = pafs.FileSystem.from_uri(f"s3://corpus{bucket}")
    store.create_dir("corpus")
    pafs.copy_files(str(source), "corpus/in", destination_filesystem=store)
    log = tmp_path / "log"
    job = job_of(f"s3://corpus/in{bucket}", f"s3://corpus/out{bucket}", log, seconds=0.1)
    assert len(job.plan().left) == 17

    def kill():
        await_lines(log, 4)
        os.kill(lines(log)[-1][1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    report = job.run(workers=2)
    thread.join()
    found = job.verify()
    assert found.clean and found.sha256 == undisturbed.sha256, str(found)
    # As above: killed after the upload, before its report.
    assert ROWS - 25 * report.deaths <= report.rows_computed <= ROWS and job.run().rows == 0
    store.delete_file("corpus/out/more/c-000003.parquet")
    assert job.verify().missing == ["more/c-000003.parquet"] and job.plan().rows_left == 25
    assert job.run(workers=1).rows_computed == 25 and job.verify().sha256 == undisturbed.sha256


def test_json_lines_are_source_and_sink(tmp_path):
    texts = sentences(60)
    rows = [json.dumps({"id": i, "text": text}, ensure_ascii=False) for i, text in enumerate(texts)]
    rows[13], rows[40] = "{oops", '{"id": 40}'
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n".join(rows), encoding="utf-8")  # without a newline at its end
    (tmp_path / "in/_note.jsonl").write_text("{}\n")
    job = job_of(tmp_path / "in", tmp_path / "out", format="jsonl")
    assert [shard.rows for shard in job.plan().shards] == [25, 25, 10]
    job.run(workers=1)
    found = job.verify()
    assert found.clean and found.rows_failed == 2, str(found)
    assert sorted(found.reasons)[0].startswith("line 14 is not JSON") and sorted(found.reasons)[1] == "the text is null"
    written = [json.loads(line) for path in sorted((tmp_path / "out").glob("a-*")) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = regard.Model("zh-en").translate(texts)
    for i, row in enumerate(written):
        if i not in (13, 40):
            assert row == {"id": i, "text": texts[i], "translation": expected[i].text, "score": expected[i].score, "error": None}


def test_another_job_into_the_same_sink_is_refused(source, tmp_path):
    sink = tmp_path / "out"
    job_of(source, sink).run(workers=2)
    for other, what in [
        (jobs.Job(str(source), str(sink), batch.Translate("zh-en", score="score"), rows_per_shard=30), "rows_per_shard is 25 in _regard.json, 30 now"),
        (jobs.Job(str(source), str(sink), batch.Translate("zh-en", num_beams=2), rows_per_shard=25), "task is .*num_beams"),
        (jobs.Job(str(source), str(sink), batch.Translate(str(ROOT / "crates/regard-cli/zh-en")), rows_per_shard=25), "task is "),
        (jobs.Job(str(source / "more"), str(sink), batch.Translate("zh-en", score="score"), rows_per_shard=25), "a.parquet is in _regard.json, not in the source"),
        (job_of(source, sink, format="jsonl"), "format is"),
    ]:
        for verb in (other.run, other.plan, other.verify):
            with pytest.raises(jobs.JobError, match=what):
                verb()


def test_verify_names_what_is_wrong(source, tmp_path, undisturbed):
    job = job_of(source, tmp_path / "out")
    job.run(workers=2)
    names = sorted(path.name for path in (tmp_path / "out").glob("a-*"))
    (tmp_path / "out" / names[0]).unlink()
    (tmp_path / "out" / names[1]).write_bytes((tmp_path / "out" / names[2]).read_bytes())
    (tmp_path / "out" / names[3]).write_bytes(b"PAR1 and no more")
    pq.write_table(pq.read_table(tmp_path / "out" / names[4]).slice(1), tmp_path / "out" / names[4])
    (tmp_path / "out/mine.txt").write_text("")
    found = job.verify()
    assert not found.clean and not found.finished
    assert found.missing == [names[0]] and found.foreign == ["mine.txt"]
    assert list(found.wrong) == [names[1], names[3], names[4]]
    assert found.wrong[names[1]] == "column 'id' differs from the source" and found.wrong[names[4]] == "24 rows, 25 in the source"
    assert str(found).startswith("NOT CLEAN") and f"missing: {names[0]}" in str(found)


def test_one_corrupt_file_stops_nothing_else(source, tmp_path, undisturbed):
    own = tmp_path / "in"
    shutil.copytree(source, own)
    whole = (own / "b.parquet").read_bytes(), (own / "more/c.parquet").read_bytes()
    (own / "b.parquet").write_bytes(whole[0][: len(whole[0]) // 2])
    middle = bytearray(whole[1])
    middle[40:400] = bytes(360)
    (own / "more/c.parquet").write_bytes(middle)
    job = job_of(own, tmp_path / "out")
    assert list(job.plan().unreadable) == ["b.parquet"]
    with pytest.raises(jobs.JobError, match="more/c-000000.parquet(.|\n)*b.parquet"):
        job.run(workers=2)
    found = job.verify()
    assert "b.parquet" in found.wrong and not found.finished and found.rows_out < 390
    assert len(list((tmp_path / "out").glob("a-*"))) == 8
    (own / "b.parquet").write_bytes(whole[0])
    (own / "more/c.parquet").write_bytes(whole[1])
    report = job.run(workers=2)
    assert report.rows_computed == ROWS - found.rows_out
    assert job.verify().clean and job.verify().sha256 == undisturbed.sha256


def test_a_shard_that_kills_its_process_is_named(source, tmp_path):
    task = Killer("zh-en", column="text")
    job = jobs.Job(str(source / "b.parquet"), str(tmp_path / "out"), task, rows_per_shard=25)
    with pytest.raises(jobs.JobError, match=r"b-000000.parquet: its process died 4 times \(status -9\)"):
        job.run(workers=1)


class Killer(batch.Translate):
    """Dies."""

    def _answer(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_makes_no_sense_is_an_error(source, tmp_path):
    task = batch.Translate("zh-en")
    for make, error, message in [
        (lambda: jobs.Job(str(source), str(tmp_path), task, rows_per_shard=0), ValueError, "rows_per_shard: 0 is out of range"),
        (lambda: jobs.Job(str(source), str(tmp_path), task, format="csv"), ValueError, "format: expected parquet or jsonl"),
        (lambda: jobs.Job(str(source), str(source / "out"), task), ValueError, "is in the source"),
        (lambda: jobs.Job(str(source), str(tmp_path), len), TypeError, "task: builtin_function_or_method has no settings"),
        (lambda: jobs.Job(str(tmp_path / "none"), str(tmp_path / "out"), task).plan(), FileNotFoundError, "none is not there"),
        (lambda: jobs.Job(str(source), str(tmp_path / "out"), task).run("flink"), ValueError, "on: expected one of local, ray, spark, dask"),
        (lambda: jobs.Job(str(source), str(tmp_path / "out"), task).run(workers=0), ValueError, "workers: 0 is out of range"),
        (lambda: jobs.Job(str(source), str(tmp_path / "out"), batch.Translate("none")).plan(), FileNotFoundError, "known models"),
    ]:
        with pytest.raises(error, match=message):
            make()
    assert not (tmp_path / "out").exists()
    with pytest.raises(jobs.JobError, match="no 'missing' in the table"):
        jobs.Job(str(source), str(tmp_path / "out"), batch.Translate("zh-en", column="missing")).run(workers=1)


def test_the_command_plans_runs_and_verifies(source, tmp_path, undisturbed):
    settings = {"source": str(source), "sink": str(tmp_path / "out"), "rows_per_shard": 25}
    task = {"kind": "translate", "model": "zh-en", "score": "score"}
    (tmp_path / "job.json").write_text(json.dumps({**settings, "task": task}))
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (tmp_path / "job.toml").write_text(toml + "[task]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in task.items()))

    def command(*arguments, file="job.toml"):
        path = [str(Path(regard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        arguments = [sys.executable, "-m", "regard", "jobs", arguments[0], str(tmp_path / file), *arguments[1:]]
        return subprocess.run(arguments, env=environment, capture_output=True, text=True)

    file = "job.toml" if sys.version_info >= (3, 11) else "job.json"
    assert command("plan", file=file).stdout == "17 of 17 shards left, 400 of 400 rows\n"
    assert command("verify", file=file).returncode == 1
    run = command("run", "--workers", "2", file=file)
    assert run.returncode == 0 and run.stdout.startswith("17 shards, 400 rows needed, 400 computed") and "17/17 shards" in run.stderr, run.stderr
    assert command("plan", file="job.json").stdout == "0 of 17 shards left, 0 of 400 rows\n"
    verified = command("verify", file=file)
    assert verified.returncode == 0 and undisturbed.sha256 in verified.stdout
    (tmp_path / "job.json").write_text(json.dumps({**settings, "task": {**task, "kind": "summarize"}}))
    wrong = command("plan", file="job.json")
    assert wrong.returncode == 1 and "task.kind: expected one of translate, embed, classify, attention_stats; found 'summarize'" in wrong.stderr
