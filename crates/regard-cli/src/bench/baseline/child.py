"""A baseline of `regard bench`, asked for one sample at a time. The script of an engine follows this text and ends with `serve`.

Reads a case as one line of JSON and answers {"ready": what is known of it} or {"error": why}; then, for each line `go` (or `ours`, of Regard
in this process), makes one call that does not count, which brings keys and values near as ours are, and some that do, and answers
{"seconds": of one}.

An engine offers all its forms of a case, functions that return the same; the fastest of them is the baseline.
"""
import json
import math
import os
import signal
import sys
import time
import warnings

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just stops
warnings.filterwarnings("ignore")
# What libraries print must not come between the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# How far forms may be apart, of the largest number: they are as exact as their type.
NEAR = {"f64": 1e-9, "f32": 1e-3, "f16": 2e-2, "bf16": 5e-2, "q4": 1.0}


def answer(**what):
    print(json.dumps(what), file=ANSWERS, flush=True)


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def extra(call):
    """MiB that a call takes beyond what was there before and what it returns, where Linux tells."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS:")
    except OSError:
        return None
    returned = call()
    peak = status("VmHWM:")
    return max(0.0, peak - before - sum(one.nbytes for one in parts(returned)) / 2**20)


def refuse(case, options, dtypes, **others):
    """Refuses a case that has one of these options, another type, gradients, or what `others` name and say whether it is asked for."""
    missing = [name for name in options if case[name]]
    missing += ["gradients"] if case["pass"] != "forward" else []
    missing += [case["dtype"]] if case["dtype"] not in dtypes else []
    missing += [name.replace("_", " ") for name, asked in others.items() if asked]
    if missing:
        raise ValueError("not compared: what is measured of it has not " + ", ".join(missing))


def parts(returned):
    return returned if isinstance(returned, (tuple, list)) else (returned,)


def timed(call, repetitions):
    if hasattr(call, "seconds"):  # a program of its own, which tells its time without that of its start
        return call.seconds()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - start) / repetitions


def apart(numbers, others):
    """The largest difference, of the largest number."""
    import numpy as np

    worst = 0.0
    for one, other in zip(numbers, others):
        one, other = (np.asarray(x, dtype=np.float64) for x in (one, other))
        difference = float(np.abs(one - other.reshape(one.shape)).max()) / max(1e-30, float(np.abs(other).max()))
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


class Contest:
    """The forms of a case, of which the fastest stays. One that is called `regard` is ours, where both run in this process."""

    def __init__(self, case, forms, read):
        self.forms_ms, self.refused, self.setup = {}, {}, {}
        first, best = None, math.inf
        repetitions = lambda seconds: max(1, math.ceil(case["sample"] / max(seconds, 1e-7)))
        self.sides = {}  # what is run, and how often, by the line that asks for it
        if ours := forms.pop("regard", None):
            first = [read(one) for one in parts(ours())] if not case["dropout"] else None
            self.sides["ours"] = ours, repetitions(min(timed(ours, 1), timed(ours, 1)))
        for name, call in forms.items():
            try:
                start = time.perf_counter()
                returned = call()
                self.setup[name] = time.perf_counter() - start
                if not case["dropout"]:  # which each form draws for itself
                    numbers = [read(one) for one in parts(returned)]
                    if first is None:
                        first = numbers
                    elif (far := apart(numbers, first)) > NEAR[case["dtype"]]:
                        raise ValueError(f"it returns something else: {far:.1e} apart")
                del returned
                once = timed(call, 1)
                again = 0 if once > 1 else 3 if once > 0.1 else 9
                # The least: what disturbs a form only makes it slower.
                seconds = min(once, *(timed(call, 1) for _ in range(again)), math.inf)
                self.forms_ms[name] = round(1e3 * seconds, 4)
                if seconds < best:
                    best, self.form, self.call = seconds, name, call
            except Exception as why:
                self.refused[name] = (str(why) or type(why).__name__).splitlines()[0][:200]
        if not self.forms_ms:
            raise ValueError("; ".join(f"{name}: {why}" for name, why in self.refused.items()) or "it has no form of this")
        self.sides["go"] = self.call, repetitions(best)
        self.warm = best < case["long"] and not hasattr(self.call, "seconds")

    def ready(self):
        return {
            "form": self.form,
            "forms_ms": self.forms_ms,
            "refused": self.refused,
            "setup_s": round(self.setup[self.form], 3),
            "extra_rss_mb": extra(self.call),
        }

    def sample(self, side):
        call, repetitions = self.sides[side]
        if self.warm:
            call()
        return timed(call, repetitions)


def serve(start):
    """`start()` imports the engine and returns its name with version, its forms of a case and how what they return is read."""
    try:
        name, forms, read = start()
    except Exception as why:
        return answer(error=f"{type(why).__name__}: {why}".splitlines()[0])
    answer(ready={"name": name})
    contest = None
    for line in sys.stdin:
        try:
            if line.strip() in ("go", "ours"):
                answer(seconds=contest.sample(line.strip()))
                continue
            contest = None  # the last case's memory goes first
            case = json.loads(line)
            contest = Contest(case, forms(case), read)
            answer(ready=contest.ready())
        except Exception as why:
            answer(error=(str(why) or type(why).__name__).splitlines()[0][:300])
