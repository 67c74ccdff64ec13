# /// script
# requires-python = ">=3.11"
# ///
"""What a run of `regard train` was and how it went, as one JSON object: summary.py RUN COMMAND [TEST-JSON]

TEST-JSON is what `regard eval --format json` said of the model that the run left behind.
"""

import json
import sys
import tomllib
from pathlib import Path


def main(run: str, command: str, test: str = "null") -> None:
    folder = Path(run)
    settings = tomllib.loads((folder / "settings.toml").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    seconds = {line["step"]: line["seconds"] for line in times}
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "validation_loss" in line]
    best = [line for line in validations if line["best"]][-1:]
    rates = sorted(line["tokens_per_second"] for line in times if "tokens_per_second" in line)
    keys = ["step", "validation_loss", "validation_perplexity", "score", "chrf"]
    brief = lambda line: {key: round(line[key], 4) for key in keys if key in line} | {"seconds": round(seconds[line["step"]], 4)}
    summary = {
        "command": command,
        "seed": settings["seed"],
        "steps": lines[-1]["step"],
        "seconds": round(times[-1]["seconds"]),
        "tokens_per_second": round(rates[len(rates) // 2]),
        "best": brief(best[0]) if best else None,
        "test": json.loads(test),
        "samples": best[0].get("samples", []) if best else [],
        "loss": [[line["step"], round(line["loss"], 3)] for line in steps[:: max(1, len(steps) // 20)]],
        "validations": [brief(line) for line in validations],
    }
    print(json.dumps(summary, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
