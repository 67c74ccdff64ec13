"""Jobs over a corpus (`regard.jobs`) beside the command: rows a core-second, what Ray costs, memory of a worker.

    PYTHONPATH=python target/python/bin/python bench/corpus.py rates  target/release/regard
    PYTHONPATH=python target/python/bin/python bench/corpus.py ray
    PYTHONPATH=python target/python/bin/python bench/corpus.py memory

`rates`: the same sentences through `regard translate` and `regard embed`, one process of 1 or 2 threads, and through a job of 1 or 2 worker
processes; wall time of all but opening the model (a run with one sentence is subtracted), in turns, medians. `ray`: a job of shards of 20 s on
two workers, local and on a Ray cluster that is up, in turns. `memory`: the resident memory of each worker of a job over a million rows.
"""

import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
from regard import batch, jobs

ROOT = pathlib.Path(__file__).parent.parent
ROUNDS = 3


def sentences(count):
    """Chinese sentences of Tatoeba; again from the first one where there are fewer."""
    with gzip.open(ROOT / "data/tatoeba-zh-en/train.zh-en.tsv.gz", "rt", encoding="utf-8") as file:
        found = [line.split("\t")[0] for line, _ in zip(file, range(count))]
    return [found[i % len(found)] for i in range(count)]


def table(folder, texts, name="a.parquet"):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), folder / name)
    return str(folder)


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rates(folder, command):
    texts = sentences(4000)
    tasks = {
        "translate": (["translate", "zh-en", *"--num-beams 1 --max-tokens 128".split()], batch.Translate("zh-en", num_beams=1), texts),
        "embed": (["embed", "minilm"], batch.Embed("minilm"), texts[:2000]),
    }
    for name, (verb, task, rows) in tasks.items():
        sources = [table(folder / name / part, some) for part, some in (("all", rows), ("one", rows[:1]))]
        for cores in (1, 2):

            def by_command(texts):
                run = [command, *verb, "--threads", str(cores), "--format", "json", "--", *texts]
                return timed(lambda: subprocess.run(run, check=True, stdout=subprocess.DEVNULL))

            def by_job(source, count=[0]):
                count[0] += 1
                job = jobs.Job(source, str(folder / f"{name}.{cores}.{count[0]}"), task, rows_per_shard=500)
                return timed(lambda: job.run("local", workers=cores, progress=lambda line: None))

            found = []
            for _ in range(ROUNDS):
                ours = by_job(sources[0]) - by_job(sources[1])
                theirs = by_command(rows) - by_command(rows[:1])
                found.append((len(rows) / ours / cores, len(rows) / theirs / cores))
            ratio = [job / command for job, command in found]
            of = {"job": statistics.median(job for job, _ in found), "command": statistics.median(command for _, command in found)}
            print(
                f"{name:10} {cores} cores: job {of['job']:6.0f} rows a core-second, command {of['command']:6.0f}, "
                f"ratio {statistics.median(ratio):.2f} ({min(ratio):.2f}-{max(ratio):.2f})",
                flush=True,
            )


def ray(folder):
    import ray as cluster

    cluster.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    task = batch.Translate("zh-en", num_beams=1)
    texts = sentences(20000)
    task(pa.table({"text": texts[:10]}))
    seconds = timed(lambda: task(pa.table({"text": texts[:2000]})))
    rows = int(2000 * 20 / seconds)
    # The same rows in each shard: two workers finish together on both engines.
    source = folder / "in"
    for i in range(4):
        table(source, (texts * (rows // len(texts) + 1))[:rows], f"{i}.parquet")
    found = {"local": [], "ray": []}
    for i in range(3):
        for engine in found:
            job = jobs.Job(str(source), str(folder / f"{engine}{i}"), task, rows_per_shard=rows)
            found[engine].append(timed(lambda: job.run(engine, workers=2, progress=lambda line: None)))
            print(f"{engine:6} 4 shards of {rows} rows, 2 workers: {found[engine][-1]:.1f} s", flush=True)
    ratio = [of_ray / local for of_ray, local in zip(found["ray"], found["local"])]
    print(f"ray / local: {statistics.median(ratio):.3f} ({min(ratio):.3f}-{max(ratio):.3f})")


def resident(process):
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def children():
    own = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    own.append(int(process))
        except OSError:
            pass
    return own


def memory(folder, rows=1_000_000):
    short = [text[:4] for text in sentences(10_000)]
    for i in range(10):
        table(folder / "in", short * (rows // 100_000), f"{i}.parquet")
    job = jobs.Job(str(folder / "in"), str(folder / "out"), batch.Translate("zh-en", num_beams=1, max_tokens=4), rows_per_shard=10_000)
    done, peaks = threading.Event(), {}

    def watch():
        while not done.wait(1.0):
            files = len(list((folder / "out").glob("*.parquet"))) if (folder / "out").exists() else 0
            for process in children():
                try:
                    peaks.setdefault(process, []).append((files, resident(process)))
                except (OSError, StopIteration):
                    pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    print(job.run("local", workers=2, progress=lambda line: None))
    done.set()
    watcher.join()
    for process, samples in peaks.items():
        tenth = [[mb for files, mb in samples if 10 * i <= files < 10 * (i + 1)] for i in range(10)]
        print(json.dumps({"worker": process, "MB, medians of tenths of the job": [round(statistics.median(own)) for own in tenth if own]}))


if __name__ == "__main__":
    verbs = {"rates": rates, "ray": ray, "memory": memory}
    if len(sys.argv) < 2 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        verbs[sys.argv[1]](pathlib.Path(scratch), *sys.argv[2:])
