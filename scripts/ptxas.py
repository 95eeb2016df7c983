#!/usr/bin/env python3
"""Registers, stack, spills, shared memory and computed occupancy of every CUDA kernel, without a GPU.

usage: NVCC=nvcc BUILD=build scripts/ptxas.py CAPABILITY...     such as 80 90

Compiles every source of kernels with -Xptxas -v in both precisions and fails on any spill, and where a kernel needs
more than dev/ptxas_budget.txt allows. Dynamic shared memory and threads per block are chosen at launch, so that file
also names them where the occupancy depends on them.
"""
import fnmatch
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

BUDGET = "dev/ptxas_budget.txt"
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228}  # KiB of a multiprocessor
SOURCES = [(source, precision) for source in ("llmc/attention/attention.cu", "train_gpt.cu") for precision in ("bf16", "fp32")]


def compile_verbose(source, precision, capability):
    """What ptxas says about one translation unit."""
    nvcc, build = os.environ.get("NVCC", "nvcc"), os.environ.get("BUILD", "build")
    out = os.path.join(build, "ptxas", f"{os.path.basename(source)}.{precision}.{capability}.cubin")
    os.makedirs(os.path.dirname(out), exist_ok=True)
    define = ["-DPRECISION_FP32"] if precision == "fp32" else []
    done = subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", f"-arch=sm_{capability}", *define, "-x", "cu", "-cubin", "-o", out, source],
        capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr + f"error: {source} does not compile for sm_{capability}")
    return done.stderr


def short_names(mangled):
    """Demangled, without namespaces, return types and arguments: kernel<48,1,0>."""
    text = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = {}
    for raw, name in zip(mangled, text.splitlines()):
        name = re.sub(r"\((int|unsigned long|unsigned int|bool)\)", "", name).replace("(anonymous namespace)::", "")
        name = re.sub(r"^void ", "", name)
        name = re.sub(r"\(.*", "", name).replace("true", "1").replace("false", "0").replace(", ", ",")
        names[raw] = name.replace("__nv_bfloat16", "bf16")
    return names


def parse(text):
    """[{mangled, registers, stack, spill, shared}] from the output of ptxas -v."""
    kernels, current = {}, None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            current = kernels.setdefault(match[1], {"mangled": match[1], "shared": 0, "registers": 0})
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if current is not None:
                current.update(stack=int(match[1]), spill=int(match[2]) + int(match[3]))
        elif match := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current["shared"] = int(shared[1]) if shared else 0
            current = None
    return list(kernels.values())


def read_budgets():
    """[(pattern, registers, stack, threads, dynamic bytes)], first match counts."""
    budgets = []
    with open(BUDGET, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            fields = line.split("#")[0].split()
            if not fields:
                continue
            if len(fields) != 5 or not all(f.isdigit() for f in fields[1:]):
                sys.exit(f"error: {BUDGET}:{number}: expected: kernel registers stack threads dynamic_bytes")
            budgets.append((fields[0], *map(int, fields[1:])))
    return budgets


def occupancy(registers, threads, shared, capability):
    """Resident threads of a multiprocessor over the most possible: registers are given out in steps of 8 a thread."""
    granted = -(-registers // 8) * 8
    blocks = min(REGISTERS // (granted * threads), SHARED.get(capability, 228) * 1024 // (shared + 1024),
                 THREADS // threads, BLOCKS)
    return blocks * threads / THREADS


def check(kernel, budgets):
    """The kernel's budget and what is wrong with it."""
    for budget in budgets:
        if fnmatch.fnmatchcase(kernel["name"], budget[0]):
            break
    else:
        return None, [f"has no line in {BUDGET}"]
    faults = []
    if kernel["spill"]:
        faults.append(f"spills {kernel['spill']} bytes")
    if kernel["registers"] > budget[1]:
        faults.append(f"uses {kernel['registers']} registers, allowed {budget[1]}")
    if kernel["stack"] > budget[2]:
        faults.append(f"uses {kernel['stack']} bytes of stack, allowed {budget[2]}")
    return budget, faults


def main():
    capabilities = [int(a) for a in sys.argv[1:]] or [80, 90, 100]
    budgets, failures, seen = read_budgets(), [], set()
    jobs = [(source, precision, c) for source, precision in SOURCES for c in capabilities]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = list(pool.map(lambda job: compile_verbose(*job), jobs))
    print(f"{'kernel':58} {'type':4} {'sm':>4} {'regs':>4} {'stack':>5} {'spill':>5} {'static':>6} {'dynamic':>7} "
          f"{'threads':>7} {'occupancy':>9}")
    for (_, precision, capability), text in zip(jobs, outputs):
        kernels = parse(text)
        names = short_names([k["mangled"] for k in kernels])
        for kernel in sorted(kernels, key=lambda k: names[k["mangled"]]):
            kernel["name"] = names[kernel["mangled"]]
            if (key := (kernel["name"], precision, capability)) in seen:
                continue
            seen.add(key)
            budget, faults = check(kernel, budgets)
            failures += [f"{kernel['name']} ({precision}, sm_{capability}) {fault}" for fault in faults]
            threads, dynamic = (budget[3], budget[4]) if budget else (256, 0)
            share = occupancy(kernel["registers"], threads, kernel["shared"] + dynamic, capability)
            print(f"{kernel['name']:58} {precision:4} {capability:4} {kernel['registers']:4} {kernel['stack']:5} "
                  f"{kernel['spill']:5} {kernel['shared']:6} {dynamic:7} {threads:7} {share:9.0%}")
    for failure in failures:
        print(f"error: {failure}")
    if not seen:
        sys.exit("error: ptxas named no kernel")
    print(f"{len(seen)} kernels, {len(failures)} over budget")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
