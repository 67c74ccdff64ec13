"""A task over a corpus, exactly once: on this machine, Ray, Spark or Dask.

    job = regard.jobs.Job("s3://corpus/zh/", "s3://corpus/en/", regard.batch.Translate("zh-en"), rows_per_shard=10_000)
    job.run("ray")
    job.verify()

The source is divided into shards, ranges of rows of a file. A shard becomes one file of the sink, whose name follows from the shard and whose
bytes follow from its rows, the task, the model and the instruction set. An engine decides only where a shard is computed. A file appears in
the sink whole or not at all (renamed on a local disk, one PUT in an object store), and a shard whose file is there is not computed again:
after any failure, run the job again. `_regard.json` in the sink holds all settings, and another job into the same sink is refused.
`_SUCCESS` is written last.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import json
import os
import pickle
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import batch

# batch says what is missing, and comes first.
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

__all__ = ["Job", "JobError", "Plan", "Report", "Shard", "Verification"]

_FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_OBJECT_STORES = ("s3", "gcs", "abfs")
_MANIFEST, _SUCCESS = "_regard.json", "_SUCCESS"
_DEATHS = 3
"""A shard whose process has died so often is not tried again."""
_FAILURES = 64
"""A run with so many failed shards stops: the next ones will fail, too."""


class JobError(RuntimeError):
    """A job that cannot begin, or that has not finished. What is in the sink stays, and is not computed again."""


class Shard(NamedTuple):
    """A range of rows of a source file."""

    name: str
    """The file of the sink."""
    source: str
    format: str
    start: int
    rows: int
    offset: int
    """First byte and number of bytes, of JSON lines."""
    length: int


@dataclass(frozen=True)
class Plan:
    """What a job consists of: `Job.plan`."""

    shards: List[Shard]
    left: List[Shard]
    """Those without a file in the sink."""
    unreadable: Dict[str, str]
    """Source files that cannot be read, and why."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def rows_left(self) -> int:
        return sum(shard.rows for shard in self.left)

    def __str__(self) -> str:
        bad = f"; {len(self.unreadable)} unreadable source files" if self.unreadable else ""
        return f"{len(self.left):,} of {len(self.shards):,} shards left, {self.rows_left:,} of {self.rows:,} rows{bad}"


@dataclass(frozen=True)
class Report:
    """What a run did: `Job.run`."""

    shards: int
    rows: int
    """Needed: those of the shards without a file when the run began."""
    rows_computed: int
    """By processes that reported so; fewer if another run has computed some, or a process died after it wrote a shard and before it reported."""
    rows_failed: int
    """Rows computed that have a reason in the column `error`."""
    deaths: int
    """Worker processes of the local engine that died and were replaced."""
    seconds: float

    def __str__(self) -> str:
        rate = self.rows_computed / self.seconds if self.seconds else 0.0
        return (
            f"{self.shards:,} shards, {self.rows:,} rows needed, {self.rows_computed:,} computed in {self.seconds:.1f} s "
            f"({rate:,.0f} rows/s), {self.rows_failed:,} rows without an answer"
        )


@dataclass(frozen=True)
class Verification:
    """What is in the sink: `Job.verify`."""

    shards: int
    missing: List[str]
    wrong: Dict[str, str]
    """Files that are not what the shard should be, and why."""
    foreign: List[str]
    """Files of the sink that belong to no shard."""
    rows_in: int
    rows_out: int
    rows_failed: int
    reasons: Dict[str, int]
    """Of the rows without an answer."""
    finished: bool
    """Whether `_SUCCESS` is there, with the files that it lists."""
    sha256: str
    """Of the names and contents of all shards."""

    @property
    def clean(self) -> bool:
        return self.finished and not (self.missing or self.wrong or self.foreign) and self.rows_in == self.rows_out

    def __str__(self) -> str:
        lines = [f"{'clean' if self.clean else 'NOT CLEAN'}: {self.shards:,} shards, {self.rows_in:,} rows in, {self.rows_out:,} out, sha256 {self.sha256}"]
        lines += [f"{count:,} rows without an answer: {reason}" for reason, count in self.reasons.items()]
        lines += [f"missing: {name}" for name in self.missing] + [f"foreign: {name}" for name in self.foreign]
        lines += [f"wrong: {name}: {why}" for name, why in self.wrong.items()]
        return "\n".join(lines if self.finished else [*lines, "not finished: run the job again"])


@dataclass(frozen=True)
class _Outcome:
    """What became of a shard."""

    shard: Shard
    computed: bool = False
    failed: int = 0
    """Rows without an answer."""
    error: Optional[str] = None
    fatal: bool = False
    """The next shard would fail in the same way."""
    deaths: int = 0


@functools.lru_cache(maxsize=64)
def _at(uri: str) -> Tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path in it. Workers make their own."""
    if "://" in uri:
        system, path = pafs.FileSystem.from_uri(uri)
    else:
        system, path = pafs.LocalFileSystem(), os.path.abspath(uri)
    if system.type_name not in ("local", *_OBJECT_STORES):
        raise ValueError(f"{uri}: file system {system.type_name!r} is not supported; give a local path, s3://, gs:// or abfs://")
    return system, path.rstrip("/")


def _child(uri: str, name: str) -> str:
    """The URI of a file in a directory: parameters of the URI stay at its end."""
    path, mark, parameters = uri.partition("?") if "://" in uri else (uri, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{parameters}"


def _files(uri: str) -> Dict[str, pafs.FileInfo]:
    """All files under a directory, by their path relative to it."""
    system, path = _at(uri)
    infos = system.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True))
    return {info.path[len(path) :].lstrip("/"): info for info in infos if info.type == pafs.FileType.File}


def _get(uri: str, offset: int = 0, length: Optional[int] = None) -> bytes:
    system, path = _at(uri)
    with system.open_input_file(path) as file:
        return file.read_at(file.size() if length is None else length, offset)


def _put(uri: str, data: Any) -> None:
    """Writes a file that is there whole or not at all."""
    system, path = _at(uri)
    if system.type_name in _OBJECT_STORES:
        # An object appears when its upload is complete.
        with system.open_output_stream(path) as file:
            file.write(data)
        return
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    beside = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(beside, path)
        except FileNotFoundError:
            # Another run has finished in the meantime, and removed what it found unfinished.
            if not os.path.exists(path):
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    if hasattr(os, "O_DIRECTORY"):
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _is_temporary(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.startswith(".") and base.endswith(".tmp")


def _read(shard: Shard, column: str) -> Tuple[pa.Table, Dict[int, str]]:
    """The rows of a shard, and those of JSON lines that cannot be read, with the reason. `column` is there even if no line has it."""
    if shard.format == "jsonl":
        return _json_rows(_get(shard.source, shard.offset, shard.length), shard, column)
    system, path = _at(shard.source)
    with pq.ParquetFile(path, filesystem=system) as file:
        groups, first, start = [], None, 0
        for i in range(file.num_row_groups):
            rows = file.metadata.row_group(i).num_rows
            if start < shard.start + shard.rows and start + rows > shard.start:
                first = start if first is None else first
                groups.append(i)
            start += rows
        table = file.read_row_groups(groups).slice(shard.start - (first or 0), shard.rows)
    if table.num_rows != shard.rows:
        raise JobError(f"{shard.source}: {table.num_rows} rows from row {shard.start} on, {shard.rows} when the job was planned; it has changed")
    return table, {}


def _json_rows(data: bytes, shard: Shard, column: str) -> Tuple[pa.Table, Dict[int, str]]:
    rows: List[Dict[str, Any]] = []
    reasons: Dict[int, str] = {}
    for i, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("expected an object")
        except ValueError as error:
            row, reasons[i] = {}, f"line {shard.start + i + 1} is not JSON: {error}"
        rows.append(row)
    if len(rows) != shard.rows:
        raise JobError(f"{shard.source}: {len(rows)} lines from line {shard.start + 1} on, {shard.rows} when the job was planned; it has changed")
    names = dict.fromkeys([*(name for row in rows for name in row), column])
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names}), reasons


def _bytes(table: pa.Table, form: str) -> Any:
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table.to_pylist()).encode()
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


@dataclass(frozen=True)
class _Work:
    """All that a worker needs."""

    sink: str
    task: Any
    fingerprint: str
    writer: str
    format: str

    def run(self, shard: Shard) -> _Outcome:
        """Computes a shard, unless its file is there. Never raises: engines retry what raises."""
        try:
            target = _child(self.sink, shard.name)
            system, path = _at(target)
            if system.get_file_info(path).type == pafs.FileType.File:
                return _Outcome(shard)
            self._check()
        except Exception as error:
            return _Outcome(shard, error=_told(error), fatal=True)
        try:
            table, reasons = _read(shard, self.task.column)
            result = self.task(table)
            if reasons:
                result = _with_reasons(result, self.task.error, reasons)
            failed = len(result) - result.column(self.task.error).null_count
            _put(target, _bytes(result, self.format))
            return _Outcome(shard, computed=True, failed=failed)
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in _FULL
            return _Outcome(shard, error=_told(error), fatal=full)

    def _check(self) -> None:
        """Refuses to compute with another model, version, instruction set or writer than the driver's."""
        for what, own, theirs in (("model", self.task.fingerprint(), self.fingerprint), ("writer", _writer(), self.writer)):
            if own != theirs:
                raise JobError(
                    f"{what}: {own} on {socket.gethostname()}, {theirs} in {_MANIFEST}; all workers need the same files of the model, "
                    "version of regard, pyarrow and instruction set"
                )


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _with_reasons(table: pa.Table, column: str, reasons: Dict[int, str]) -> pa.Table:
    """The reasons why lines could not be read, in the place of those of the task."""
    errors = table.column(column).to_pylist()
    for i, reason in reasons.items():
        errors[i] = reason
    return table.set_column(table.schema.get_field_index(column), column, pa.array(errors, pa.string()))


def _writer() -> str:
    return f"pyarrow {pa.__version__}"


def _run(work: _Work, shard: Shard) -> _Outcome:
    return work.run(shard)


class Job:
    """A task over all rows of a source, into a sink.

    `source`: a path or URI of a file or directory, or several, of `.parquet`, `.jsonl` or `.ndjson`; directories are searched with all below them,
    without names that begin with `_` or `.`. `sink`: a directory or a prefix of an object store (`s3://`, `gs://`, `abfs://`, as in `pyarrow.fs`).
    `task`: a callable of `regard.batch`, or any with `settings`, `fingerprint`, `column`, `error` and `__call__` as those. `rows_per_shard`: some ten
    seconds of work; what a failure can lose. `format`: of the sink, `parquet` or `jsonl`.
    """

    def __init__(
        self, source: Union[str, Sequence[str]], sink: str, task: Any, *, rows_per_shard: int = 10_000, format: str = "parquet"
    ) -> None:
        self.source = [source] if isinstance(source, str) else list(source)
        self.sink, self.task, self.rows_per_shard, self.format = sink, task, rows_per_shard, format
        if rows_per_shard < 1:
            raise ValueError(f"rows_per_shard: {rows_per_shard} is out of range; give 1 or more")
        if format not in ("parquet", "jsonl"):
            raise ValueError(f"format: expected parquet or jsonl, found {format!r}")
        for name in ("settings", "fingerprint", "column", "error"):
            if not hasattr(task, name):
                raise TypeError(f"task: {type(task).__name__} has no {name}; give a callable of regard.batch")
        for uri in self.source:
            (_, inside), (_, path) = _at(sink), _at(uri)
            if f"{inside}/".startswith(f"{path}/"):
                raise ValueError(f"sink: {sink} is in the source {uri}; its files would become rows of the source")

    def plan(self) -> Plan:
        """What there is to do. Reads the source when the job is new, and the list of its files later. Writes nothing."""
        return self._plan(self._manifest())

    def run(self, on: str = "local", *, workers: Optional[int] = None, progress: Optional[Callable[[str], None]] = None) -> Report:
        """Computes all shards that are left, and writes `_SUCCESS`.

        `on`: `local` (processes of this machine), `ray` (the cluster of `ray.init` or RAY_ADDRESS), `spark` (the active session), `dask` (the current
        client); the last three start a cluster on this machine if there is none. `workers`: shards at once; all cores if None. `progress` is
        given a line now and then, by default for stderr.

        Raises `JobError` if a shard failed, after all others are computed. After any error, and after any crash, run it again.
        """
        if on not in _ENGINES:
            raise ValueError(f"on: expected one of {', '.join(_ENGINES)}; found {on!r}")
        if workers is not None and workers < 1:
            raise ValueError(f"workers: {workers} is out of range; give 1 or more, or None for all cores")
        manifest = self._manifest()
        _put(_child(self.sink, _MANIFEST), _json(manifest))
        plan = self._plan(manifest)
        work = _Work(self.sink, self.task, manifest["fingerprint"], manifest["writer"], self.format)
        run, start = _Progress(plan, progress or _print), time.monotonic()
        with contextlib.closing(_ENGINES[on](work, plan.left, workers)) if plan.left else contextlib.nullcontext(()) as outcomes:
            for outcome in outcomes:
                run.add(outcome)
        failed = {**run.errors, **plan.unreadable}
        if failed:
            raise JobError(_failed(failed))
        self._finish(plan)
        return Report(len(plan.left), plan.rows_left, run.computed, run.failed, run.deaths, time.monotonic() - start)

    def verify(self) -> Verification:
        """Compares the sink with the source, row by row: each shard is there once, with the rows of the source unchanged. Reads all files."""
        manifest = self._manifest()
        plan, there = self._plan(manifest), _files(self.sink)
        known = {shard.name for shard in plan.shards} | {_MANIFEST, _SUCCESS}
        with ThreadPoolExecutor() as pool:
            checked = list(pool.map(self._checked, [shard for shard in plan.shards if shard.name in there]))
        digest = hashlib.sha256()
        for shard, _, _, sha256, _ in checked:
            digest.update(f"{shard.name} {sha256}\n".encode())
        wrong = {shard.name: why for shard, _, _, _, why in checked if why}
        wrong.update(plan.unreadable)
        reasons: collections.Counter[str] = collections.Counter()
        for _, _, found, _, _ in checked:
            reasons.update(found)
        finished = _SUCCESS in there and _get(_child(self.sink, _SUCCESS)) == self._success(plan, there)
        return Verification(
            shards=len(plan.shards), missing=[shard.name for shard in plan.shards if shard.name not in there], wrong=wrong,
            foreign=sorted(set(there) - known), rows_in=plan.rows, rows_out=sum(rows for _, rows, _, _, _ in checked),
            rows_failed=sum(reasons.values()), reasons=dict(reasons), finished=finished, sha256=digest.hexdigest(),
        )

    def _checked(self, shard: Shard) -> Tuple[Shard, int, Dict[str, int], str, Optional[str]]:
        """Rows of a file of the sink, reasons, its hash, and what is wrong with it."""
        reasons: Dict[str, int] = {}
        try:
            data = _get(_child(self.sink, shard.name))
        except OSError as error:
            return shard, 0, reasons, "", _told(error)
        sha256 = hashlib.sha256(data).hexdigest()
        try:
            if self.format == "parquet":
                result = pq.read_table(io.BytesIO(data))
            else:
                result = pa.Table.from_pylist([json.loads(line) for line in data.splitlines()])
            source, _ = _read(shard, self.task.column)
            rows = result.num_rows
            if rows != shard.rows:
                return shard, rows, reasons, sha256, f"{rows} rows, {shard.rows} in the source"
            for name in source.column_names:
                own, theirs = result.column(name), source.column(name)
                if not (own.equals(theirs) if self.format == "parquet" else _plain(own) == _plain(theirs)):
                    return shard, rows, reasons, sha256, f"column {name!r} differs from the source"
            found = collections.Counter(reason for reason in result.column(self.task.error).to_pylist() if reason is not None)
            return shard, rows, dict(found), sha256, None
        except (pa.ArrowException, OSError, ValueError, KeyError, JobError) as error:
            return shard, 0, reasons, sha256, _told(error)

    def _settings(self) -> Dict[str, Any]:
        """What the bytes of shards depend on, beside the source."""
        return {
            "regard": 1, "task": self.task.settings(), "fingerprint": self.task.fingerprint(), "rows_per_shard": self.rows_per_shard,
            "format": self.format, "writer": _writer(),
        }

    def _manifest(self) -> Dict[str, Any]:
        """That of the sink, if it is one of this job; else a new one."""
        settings, sources = self._settings(), self._sources()
        system, path = _at(_child(self.sink, _MANIFEST))
        if system.get_file_info(path).type == pafs.FileType.File:
            old = json.loads(_get(_child(self.sink, _MANIFEST)))
            for name, value in settings.items():
                if old.get(name) != value:
                    raise JobError(f"{self.sink}: {name} is {json.dumps(old.get(name))} in {_MANIFEST}, {json.dumps(value)} now; give another sink")
            known = {file["name"]: file for file in old["files"]}
            for name in sorted(set(known) ^ set(sources)):
                where = f"in {_MANIFEST}, not in the source" if name in known else f"in the source, not in {_MANIFEST}"
                raise JobError(f"{self.sink}: {name} is {where}; give another sink, or the same files")
            for name, (_, size) in sources.items():
                # A file that could not be read may be replaced.
                if known[name]["size"] != size and "error" not in known[name]:
                    raise JobError(f"{self.sink}: {name} has {size} bytes, {known[name]['size']} in {_MANIFEST}; give another sink")
        else:
            known = {}
        files = []
        for name, (uri, size) in sorted(sources.items()):
            old_file = known.get(name)
            files.append(self._described(name, uri, size) if old_file is None or "error" in old_file else {**old_file, "uri": uri})
        return {**settings, "files": files}

    def _sources(self) -> Dict[str, Tuple[str, int]]:
        """URI and size of each source file, by its name."""
        found: Dict[str, Tuple[str, int]] = {}
        for uri in self.source:
            system, path = _at(uri)
            info = system.get_file_info(path)
            if info.type == pafs.FileType.NotFound:
                raise FileNotFoundError(f"source: {uri} is not there")
            if info.type == pafs.FileType.File:
                files = {path.rpartition("/")[2]: (uri, info.size)}
            else:
                files = {name: (_child(uri, name), info.size) for name, info in _files(uri).items()}
            for name, file in files.items():
                hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
                if hidden or os.path.splitext(name)[1] not in _FORMATS:
                    continue
                if name in found:
                    raise ValueError(f"source: {name} is in two of the sources; give a directory that has both in different folders")
                found[name] = file
        if not found:
            raise FileNotFoundError(f"source: no {', '.join(_FORMATS)} in {', '.join(self.source)}")
        stems = collections.Counter(os.path.splitext(name)[0] for name in found)
        for stem, count in stems.items():
            if count > 1:
                raise ValueError(f"source: {count} files are called {stem} but for their ending; rename one")
        return found

    def _described(self, name: str, uri: str, size: int) -> Dict[str, Any]:
        """A source file for the manifest: its rows, and where shards of JSON lines begin."""
        file: Dict[str, Any] = {"name": name, "uri": uri, "size": size}
        try:
            system, path = _at(uri)
            if _FORMATS[os.path.splitext(name)[1]] == "parquet":
                with pq.ParquetFile(path, filesystem=system) as parquet:
                    return {**file, "rows": parquet.metadata.num_rows}
            rows, position, offsets = 0, 0, []
            with system.open_input_stream(path) as stream:
                for line in io.BufferedReader(stream, 1 << 20):
                    if rows % self.rows_per_shard == 0:
                        offsets.append(position)
                    rows, position = rows + 1, position + len(line)
            return {**file, "rows": rows, "offsets": offsets}
        except (OSError, pa.ArrowException) as error:
            return {**file, "error": _told(error)}

    def _plan(self, manifest: Dict[str, Any]) -> Plan:
        shards, unreadable = [], {}
        for file in manifest["files"]:
            if "error" in file:
                unreadable[file["name"]] = file["error"]
                continue
            stem, ending = os.path.splitext(file["name"])
            ends = [*file.get("offsets", [])[1:], file["size"]]
            for i, start in enumerate(range(0, file["rows"], self.rows_per_shard)):
                offset, end = (file["offsets"][i], ends[i]) if "offsets" in file else (0, 0)
                rows = min(self.rows_per_shard, file["rows"] - start)
                shards.append(Shard(f"{stem}-{i:06d}.{self.format}", file["uri"], _FORMATS[ending], start, rows, offset, end - offset))
        there = _files(self.sink)
        return Plan(shards, [shard for shard in shards if shard.name not in there], unreadable)

    def _success(self, plan: Plan, there: Dict[str, pafs.FileInfo]) -> bytes:
        """The content of `_SUCCESS`: counts, and a hash of the names and sizes of all shards."""
        digest = hashlib.sha256()
        for shard in plan.shards:
            size = there[shard.name].size if shard.name in there else -1
            digest.update(f"{shard.name} {size}\n".encode())
        return _json({"shards": len(plan.shards), "rows": plan.rows, "sizes": digest.hexdigest()})

    def _finish(self, plan: Plan) -> None:
        there = _files(self.sink)
        missing = [shard.name for shard in plan.shards if shard.name not in there]
        if missing:
            raise JobError(_failed({name: "was computed, and is not in the sink; does every worker have this directory?" for name in missing}))
        system, path = _at(self.sink)
        for name in filter(_is_temporary, there):
            # Left by processes that were killed: all shards are there.
            with contextlib.suppress(OSError):
                system.delete_file(f"{path}/{name}")
        _put(_child(self.sink, _SUCCESS), self._success(plan, there))


def _plain(column: Any) -> Any:
    return json.loads(json.dumps(column.to_pylist(), default=str))


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _failed(failed: Dict[str, str]) -> str:
    some = [f"{name}: {why}" for name, why in list(failed.items())[:8]]
    more = [f"and {len(failed) - 8} more"] if len(failed) > 8 else []
    return "\n".join([f"{len(failed)} shards or files failed; all others are computed, run the job again when the cause is removed", *some, *more])


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@dataclass
class _Progress:
    """Counts outcomes, and reports them every ten seconds."""

    plan: Plan
    report: Callable[[str], None]
    errors: Dict[str, str] = field(default_factory=dict)
    done: int = 0
    rows: int = 0
    computed: int = 0
    failed: int = 0
    deaths: int = 0
    start: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    def add(self, outcome: _Outcome) -> None:
        self.deaths += outcome.deaths
        if outcome.error is not None:
            self.errors[outcome.shard.name] = outcome.error
            if outcome.fatal or len(self.errors) >= _FAILURES:
                raise JobError(f"{outcome.shard.name}: {outcome.error}; stopped, as other shards would fail too. Run the job again when the cause is removed")
            return
        self.done, self.rows = self.done + 1, self.rows + outcome.shard.rows
        self.computed += outcome.shard.rows if outcome.computed else 0
        self.failed += outcome.failed
        now = time.monotonic()
        if now - self.reported >= 10 or self.done == len(self.plan.left):
            self.reported = now
            self.report(self.line(now - self.start))

    def line(self, seconds: float) -> str:
        rate = self.rows / max(seconds, 1e-9)
        left = (self.plan.rows_left - self.rows) / rate if rate else 0
        minutes, whole = divmod(round(left), 60)
        return f"{self.done:,}/{len(self.plan.left):,} shards, {self.rows:,}/{self.plan.rows_left:,} rows, {rate:,.0f} rows/s, {minutes // 60}:{minutes % 60:02d}:{whole:02d} left"


def _threads(work: _Work) -> int:
    return getattr(work.task, "threads", None) or os.cpu_count() or 1


def _local(work: _Work, shards: List[Shard], workers: Optional[int]) -> Iterator[_Outcome]:
    """Processes of this machine; one that dies is replaced."""
    workers = min(workers or max(1, (os.cpu_count() or 1) // _threads(work)), len(shards))
    left: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[Union[_Outcome, BaseException]] = queue.SimpleQueue()
    stop = threading.Event()
    for shard in shards:
        left.put(shard)

    def serve() -> None:
        worker = None
        try:
            while not stop.is_set():
                shard = left.get_nowait()
                for deaths in range(_DEATHS + 1):
                    worker = worker or _Worker(work)
                    try:
                        outcomes.put(dataclasses.replace(worker.run(shard), deaths=deaths))
                        break
                    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                        status, worker = worker.close(), None
                        if stop.is_set():
                            return
                else:
                    outcomes.put(_Outcome(shard, error=f"its process died {_DEATHS + 1} times (status {status})", deaths=_DEATHS + 1))
        except queue.Empty:
            pass
        except BaseException as error:
            outcomes.put(error)
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for _ in shards:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        stop.set()
        for worker in list(_Worker.alive):
            worker.process.kill()
        for thread in threads:
            thread.join()


class _Worker:
    """A process that computes shards. It ends when its input does, so none outlives the driver by more than a shard."""

    alive: set["_Worker"] = set()

    def __init__(self, work: _Work) -> None:
        # Not by multiprocessing, which would run the caller's main module again.
        code = "from regard.jobs import _serve; _serve()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        _Worker.alive.add(self)
        with contextlib.suppress(BrokenPipeError):
            _send(self.process.stdin, work)

    def run(self, shard: Shard) -> _Outcome:
        _send(self.process.stdin, shard)
        return _receive(self.process.stdout)

    def close(self) -> int:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        _Worker.alive.discard(self)
        return self.process.wait()


def _send(stream: Any, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: Any) -> Any:
    def exactly(n: int) -> bytes:
        data = stream.read(n)
        if len(data) < n:
            raise EOFError
        return data

    return pickle.loads(exactly(struct.unpack("<Q", exactly(8))[0]))


def _serve() -> None:
    """The main function of a worker process."""
    source: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no answer
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        work = _receive(source)
        while True:
            _send(answers, work.run(_receive(source)))


def _ray(work: _Work, shards: List[Shard], workers: Optional[int]) -> Iterator[_Outcome]:
    """Tasks of Ray. No actors: a pool of them that takes all processors would starve other tasks, and each node may leave at any time."""
    import ray

    if not ray.is_initialized():
        ray.init()
    threads, largest = _threads(work), max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if largest < threads:
        # No error: an autoscaler may add such a node.
        message = f"the task has threads={threads}, and the largest node of the cluster {largest:g} CPUs; shards wait for a larger node"
        warnings.warn(f"{message}: give the task threads={max(1, int(largest))}, or add one", stacklevel=3)
    run = ray.remote(num_cpus=threads, max_retries=10, retry_exceptions=False)(_run)
    own, left, pending = ray.put(work), iter(shards), {}
    try:
        while True:
            # Two for each processor that the cluster has now, so that none waits for the driver.
            limit = workers or max(2, 2 * int(ray.cluster_resources().get("CPU", 1)) // threads)
            for shard in left:
                pending[run.remote(own, shard)] = shard
                if len(pending) >= limit:
                    break
            if not pending:
                return
            done, _ = ray.wait(list(pending), num_returns=1)
            for reference in done:
                shard = pending.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    outcome = _Outcome(shard, error=_told(error))
                yield outcome
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)


def _spark(work: _Work, shards: List[Shard], workers: Optional[int]) -> Iterator[_Outcome]:
    """A partition of an RDD for each shard. Spark shows the progress itself."""
    if workers is not None:
        raise ValueError("workers: the session of Spark has its own number; leave it out")
    # Workers of this machine need the packages of this interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    context = SparkSession.builder.getOrCreate().sparkContext
    yield from context.parallelize(shards, len(shards)).map(functools.partial(_run, work)).collect()


def _dask(work: _Work, shards: List[Shard], workers: Optional[int]) -> Iterator[_Outcome]:
    """A future of Dask for each shard."""
    import distributed

    with contextlib.ExitStack() as stack:
        try:
            client = distributed.get_client()
        except ValueError:
            client = None
        if client is not None and workers is not None:
            raise ValueError("workers: the current client of Dask has its own number; leave it out")
        if client is None:
            count = workers or max(1, (os.cpu_count() or 1) // _threads(work))
            client = stack.enter_context(distributed.Client(n_workers=count, threads_per_worker=1, dashboard_address=None))
        futures = dict(zip(client.map(functools.partial(_run, work), shards, pure=False), shards))
        for future in distributed.as_completed(list(futures)):
            error = future.exception()
            yield future.result() if error is None else _Outcome(futures[future], error=_told(error))


_ENGINES: Dict[str, Callable[[_Work, List[Shard], Optional[int]], Any]] = {"local": _local, "ray": _ray, "spark": _spark, "dask": _dask}


def _job(path: str) -> Job:
    """The job of a TOML or JSON file."""
    with open(path, "rb") as file:
        text = file.read().decode()
    if path.endswith(".json"):
        settings = json.loads(text)
    else:
        try:
            import tomllib
        except ModuleNotFoundError as missing:
            raise JobError(f"{path}: Python before 3.11 cannot read TOML; write the job as JSON") from missing
        settings = tomllib.loads(text)
    task = settings.pop("task", None)
    kinds = {"translate": batch.Translate, "embed": batch.Embed, "classify": batch.Classify, "attention_stats": batch.AttentionStats}
    kind = task.pop("kind", None) if isinstance(task, dict) else None
    if kind not in kinds:
        raise JobError(f"{path}: task.kind: expected one of {', '.join(kinds)}; found {kind!r}")
    try:
        own = kinds[kind](**{name: tuple(value) if isinstance(value, list) else value for name, value in task.items()})
        return Job(task=own, **settings)
    except TypeError as error:
        raise JobError(f"{path}: {error}") from error


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """`python -m regard jobs`."""
    parser = argparse.ArgumentParser(prog="regard jobs", description="A task over a corpus, exactly once.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, what in (("run", "Compute what is left"), ("plan", "Show what is left"), ("verify", "Compare the sink with the source")):
        verb = verbs.add_parser(name, help=what, description=what)
        verb.add_argument("job", metavar="JOB", help="a TOML or JSON file: source, sink, rows_per_shard, format, and a table task with its kind")
        if name == "run":
            verb.add_argument("--on", choices=list(_ENGINES), default="local", help="engine (default: local)")
            verb.add_argument("--workers", type=int, help="shards at once (default: all cores)")
    args = parser.parse_args(arguments)
    try:
        job = _job(args.job)
        if args.verb == "run":
            print(job.run(args.on, workers=args.workers))
        elif args.verb == "plan":
            print(job.plan())
        else:
            found = job.verify()
            print(found)
            return 0 if found.clean else 1
    except (JobError, OSError, ValueError, ImportError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
