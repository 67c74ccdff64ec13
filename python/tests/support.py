"""What tests of models and jobs share: a corpus, a small model, a task that writes down what it computes. Workers import it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def sentences(count: int) -> List[Optional[str]]:
    """Chinese sentences of Tatoeba."""
    with gzip.open(ROOT / "data/tatoeba-zh-en/test.zh-en.tsv.gz", "rt", encoding="utf-8") as file:
        return [line.split("\t")[0] for line, _ in zip(file, range(count))]


def corpus(folder: Path, rows: int) -> Path:
    """Three Parquet files, two of them in row groups that are no multiple of a shard, one in a folder; with a null and a text that is too long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = sentences(rows)
    texts[7], texts[rows - 89] = None, "好" * 20_000
    (folder / "more").mkdir(parents=True)
    for name, start, stop, group in (("a", 0, rows // 2 - 10, 60), ("b", rows // 2 - 10, rows // 2, 100), ("more/c", rows // 2, rows, 33)):
        table = pa.table({"id": range(start, stop), "text": pa.array(texts[start:stop], pa.string())})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=group)
    return folder


def cache() -> Path:
    """Where `regard models get` puts models."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("REGARD_CACHE") or Path(home) / "regard")


def small_classifier(folder: Path) -> Path:
    """A small BERT with random weights that tells three classes apart, and the vocabulary of minilm."""
    d, wide, layers, vocab, places = 32, 64, 2, 30522, 512
    shapes = {"embeddings.word_embeddings.weight": (vocab, d), "embeddings.position_embeddings.weight": (places, d)}
    shapes["embeddings.token_type_embeddings.weight"] = (2, d)
    for i in range(layers):
        for name, shape in {
            "attention.self.query": (d, d), "attention.self.key": (d, d), "attention.self.value": (d, d), "attention.output.dense": (d, d),
            "intermediate.dense": (wide, d), "output.dense": (d, wide),
        }.items():
            shapes |= {f"encoder.layer.{i}.{name}.weight": shape, f"encoder.layer.{i}.{name}.bias": shape[:1]}
    shapes |= {"pooler.dense.weight": (d, d), "pooler.dense.bias": (d,)}
    shapes = {f"bert.{name}": shape for name, shape in shapes.items()} | {"classifier.weight": (3, d), "classifier.bias": (3,)}
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    for norm in ["embeddings", *(f"encoder.layer.{i}.{part}output" for i in range(layers) for part in ("attention.", ""))]:
        tensors |= {f"bert.{norm}.LayerNorm.weight": np.ones(d, np.float32), f"bert.{norm}.LayerNorm.bias": np.zeros(d, np.float32)}
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    head = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": vocab, "hidden_size": d, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": wide, "max_position_embeddings": places, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2},
    }))
    shutil.copy(cache() / "minilm/tokenizer.json", folder)
    return folder


@dataclass(frozen=True)
class Logged:
    """A task with a line in a file for each call that begins, and one for each that ends. `seconds`: how long a call takes at least."""

    task: Any
    log: str
    seconds: float = 0.0

    @property
    def column(self) -> str:
        return self.task.column

    @property
    def error(self) -> str:
        return self.task.error

    @property
    def threads(self) -> Optional[int]:
        return self.task.threads

    def settings(self) -> Dict[str, Any]:
        return self.task.settings()

    def fingerprint(self) -> str:
        return self.task.fingerprint()

    def __call__(self, table: Any) -> Any:
        self._line("begin", len(table))
        start = time.monotonic()
        result = self.task(table)
        time.sleep(max(0.0, self.seconds - (time.monotonic() - start)))
        self._line("end", len(table))
        return result

    def _line(self, what: str, rows: int) -> None:
        with open(self.log, "a") as file:
            file.write(f"{what} {os.getpid()} {rows}\n")


def lines(log: Any) -> List[Tuple[str, int, int]]:
    """What, process and rows of each line."""
    if not os.path.exists(log):
        return []
    with open(log) as file:
        parts = (line.split() for line in file if line.endswith("\n"))
        return [(what, int(process), int(rows)) for what, process, rows in parts]


def rows_computed(log: Any) -> int:
    return sum(rows for what, _, rows in lines(log) if what == "end")
