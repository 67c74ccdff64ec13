#!/usr/bin/env python3
"""The inner loops of the engine as they were compiled: a guard of their speed that needs no clock.

    bench/leaves.py             builds the engine, and fails if a loop has got worse than bench/record/leaves.tsv says
    bench/leaves.py --update    writes that record
    bench/leaves.py --of FILE   judges a library or a program that is built already

A leaf is a loop of 12 or more multiply-adds or tile products with at most 3 instructions for each. One that keeps its accumulators on
the stack (stores vectors there) takes half as long again; one that needs more instructions for each product than the record says
has lost something too; and an intrinsic that is a function of its own is called once for each vector, from a closure or a function
that was not inlined. Beside that, a budget for all of the code: what is compiled for each instruction set is leaves, never loops. Names are those of the engine's tasks: the symbols must be mangled in the `v0` way, which keeps types.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "record" / "leaves.tsv"
LEAST = 12
DENSE = 3
# Where code lies in a file changes a few instructions around a loop; a register that is lost changes more.
SLACK = 1.05
# Loops that do store vectors on the stack: how many, and why that stays.
EXCEPTIONS = {
    ("avx512", "AddRows<f32, false, true>"): (1, "gradients of keys under the distance similarity alone: one store for 64 products"),
    ("avx512", "AddValues<f32, true, false>"): (3, "partly visible blocks alone: their 3 stores for 64 products do not wait for each other"),
}

# Functions that are compiled for an instruction set, and bytes of code: both fall or stay. A loop that became part of a leaf, or one more
# type in a leaf's name, shows here first. 12 of the functions, 180 KB, are the products of decoding with int8 and e4m3, which read a vector of
# codes into registers.
ENTRY_POINTS = 191
TEXT_BYTES = 3_345_000

Loop = collections.namedtuple("Loop", "isa leaf products instructions stored")


def build():
    """The library, with its own flags and so in a folder of its own."""
    target = ROOT / "target" / "leaves"
    flags = {"RUSTFLAGS": "-C symbol-mangling-version=v0", "CARGO_TARGET_DIR": str(target)}
    command = ["cargo", "build", "--release", "--locked", "-p", "regard"]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **flags})
    return target / "release" / "libregard.rlib"


def functions(path):
    """Each function of a file: its name, and its lines."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    name, lines = None, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
                if name:
                    yield name, lines
                name, lines = found.group(1), []
            elif line.startswith(" "):
                lines.append(line)
        if name:
            yield name, lines
    if process.returncode:
        sys.exit(f"objdump failed on {path}: install binutils")


def short(name):
    """The task and its types, without their modules."""
    inside = re.search(r"::inside::<(.*)>$", name)
    name = re.sub(r"[a-z_][\w]*(\[[0-9a-f]+\])?::", "", inside.group(1) if inside else name)
    # number, vectors, task
    return name.split(", ", 2)[-1] if inside else name


def leaves(path):
    """The dense innermost loops of all functions."""
    for name, lines in functions(path):
        at = {line.split(":", 1)[0].strip(): i for i, line in enumerate(lines)}
        jumps = ((i, re.search(r"\sj\w+\s+([0-9a-f]+)\b", line)) for i, line in enumerate(lines))
        loops = [(at[to.group(1)], i) for i, to in jumps if to and at.get(to.group(1), i) < i]
        for start, end in loops:
            if any(s >= start and e < end for s, e in loops):
                continue  # not an innermost one
            body = lines[start : end + 1]
            products = sum("vfmadd" in line or "tdpb" in line for line in body)
            if products < LEAST or len(body) > DENSE * products:
                continue
            stored = sum(bool(re.search(r"\s%[xyz]mm\d+,\S*\((%rsp|%rbp)", line)) for line in body)
            widths = {"tmm": "amx", "zmm": "avx512", "ymm": "avx2"}
            isa = next((isa for w, isa in widths.items() if any(w in b for b in body)), "portable")
            yield Loop(isa, short(name), products, len(body), stored)


def called(path):
    """Intrinsics that were not inlined."""
    symbols = subprocess.run(["nm", "--demangle", str(path)], text=True, capture_output=True, check=True).stdout
    return sorted(set(re.findall(r" [tT] core::core_arch::x86::\w+::(_mm\w+)", symbols)))


def size(path):
    """Functions that are compiled for an instruction set, and bytes of code."""
    symbols = subprocess.run(["nm", "--demangle", str(path)], text=True, capture_output=True, check=True).stdout
    total = subprocess.run(["size", "--totals", str(path)], text=True, capture_output=True, check=True).stdout.splitlines()[-1]
    return len(re.findall(r" [tT] .*::inside::<", symbols)), int(total.split()[0])


def toolchain():
    return subprocess.run(["rustc", "--version"], check=True, text=True, capture_output=True).stdout.strip()


def written(loops):
    lines = [f"# {toolchain()}; made by bench/leaves.py --update", "isa\tleaf\tproducts\tinstructions\tstored"]
    return "\n".join(lines + ["\t".join(map(str, loop)) for loop in loops]) + "\n"


def recorded():
    lines = RECORD.read_text().splitlines()
    rows = (line.split("\t") for line in lines[2:])
    return lines[0], [Loop(isa, leaf, *map(int, rest)) for isa, leaf, *rest in rows]


def costs(loops):
    """The most instructions for each product in any loop of a leaf."""
    found = {}
    for loop in loops:
        leaf = (loop.isa, loop.leaf)
        found[leaf] = max(found.get(leaf, 0), loop.instructions / loop.products)
    return found


def judge(loops):
    """What is wrong with the loops."""
    for loop in loops:
        allowed, _ = EXCEPTIONS.get((loop.isa, loop.leaf), (0, ""))
        if loop.stored > allowed:
            yield f"{loop.stored} stores of vectors on the stack: {loop}"
    head, before = recorded()
    if not head.startswith(f"# {toolchain()};"):
        print(f"another compiler than the record's ({head}): instructions are not compared")
        return
    old, new = costs(before), costs(loops)
    for leaf, was in sorted(old.items()):
        # A leaf of which no dense loop is left needs more than that.
        now = new.get(leaf, DENSE)
        if now > was * SLACK:
            yield f"{now:.2f} instructions for each product, {was:.2f} in the record: {leaf}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--of", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    path = options.of or build()
    loops = sorted(leaves(path))
    if not loops:
        sys.exit("no loops found: the engine is not in this file")
    if options.update:
        RECORD.write_text(written(loops))
    wrong = [f"{name} was not inlined: make what calls it a function with #[inline(always)]" for name in called(path)]
    wrong += judge(loops)
    if not options.of:
        entries, text = size(path)
        print(f"{entries} functions for an instruction set (at most {ENTRY_POINTS}), {text} bytes of code (at most {TEXT_BYTES})")
        if entries > ENTRY_POINTS or text > TEXT_BYTES:
            wrong.append("more code than the budget allows: which leaf, or which of its types, is new?")
    print("\n".join(wrong))
    print(f"{len(loops)} dense loops, {sum(loop.stored > 0 for loop in loops)} that store vectors on the stack")
    sys.exit(1 if wrong else 0)


main()
