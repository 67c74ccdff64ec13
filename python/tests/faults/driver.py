"""A run of a job on one engine, in a process of its own: driver.py ENGINE TASK SOURCE SINK LOG SECONDS [ADDRESS]"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from regard import batch, jobs
from support import Logged

TASKS = {
    "translate": lambda folder: batch.Translate("zh-en", score="score"),
    "embed": lambda folder: batch.Embed("minilm", dtype="float16"),
    "classify": lambda folder: batch.Classify(str(folder / "classes")),
    "attention_stats": lambda folder: batch.AttentionStats("zh-en"),
}


def job_of(task: str, source: str, sink: str, log: str, seconds: float = 0.0) -> jobs.Job:
    return jobs.Job(source, sink, Logged(TASKS[task](Path(source).parent), log, seconds), rows_per_shard=25)


def spark_session() -> None:
    """Two executors, each a process of its own, as in a cluster."""
    import pyspark
    from pyspark.sql import SparkSession

    os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local-cluster[2,1,700]").config("spark.ui.enabled", "false").config("spark.executor.memory", "600m")
    session = session.config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]).config("spark.driver.memory", "700m")
    session.getOrCreate().sparkContext.setLogLevel("OFF")


def main() -> None:
    engine, task, source, sink, log, seconds = sys.argv[1:7]
    if engine == "ray":
        import ray

        ray.init(address=sys.argv[7], log_to_driver=False, logging_level="error")
    if engine == "spark":
        spark_session()
    report = job_of(task, source, sink, log, float(seconds)).run(engine, workers=2 if engine in ("local", "dask") else None)
    print(report, flush=True)


if __name__ == "__main__":
    main()
