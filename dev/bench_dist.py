#!/usr/bin/env python3
"""Time of a training step on this machine with 1 and 2 processes, communication hidden and not hidden.

usage: dev/bench_dist.py BUILD [--size l6] [--steps 6]    (make bench-dist)

Trains a few steps of ./train_gpt on random tokens, the processes sharing the machine's cores, and takes the median of
train.log's exec_time without the first step. Bytes are those that every rank must send at least (a ring). Writes
BUILD/bench_dist.json.
"""

import argparse
import array
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

CORES = len(os.sched_getaffinity(0))
VOCABULARY = 32768

# name, ranks, flags
CASES = (
    ("1 process, all cores", 1, ""),
    ("2 ranks", 2, ""),
    ("2 ranks, not hidden", 2, "--overlap_communication 0"),
    ("2 ranks, ZeRO-1", 2, "--zero_stage 1"),
    ("2 ranks, ZeRO-1, not hidden", 2, "--zero_stage 1 --overlap_communication 0"),
)


def write_shard(path, tokens):
    """Random tokens behind a header of 256 int32: magic, version, count, vocabulary, BOS, EOS."""
    header = array.array("i", [20240520, 1, tokens, VOCABULARY, 1, 2] + [0] * 250)
    generator = random.Random(1)
    ids = array.array("H", (generator.randrange(3, VOCABULARY) for _ in range(tokens)))
    with open(path, "wb") as file:
        file.write(header.tobytes() + ids.tobytes())


def run(case, args, folder):
    name, ranks, flags = case
    logs = os.path.join(folder, re.sub(r"\W+", "_", name))
    command = ["./train_gpt", "--data_dir", folder, "--dataset", "data", "--log_dir", logs, "--model_size", args.size]
    command += ["--sequence_length", "512", "--batch_size", "2", "--tokens_per_step", str(args.tokens)]
    command += ["--num_iterations", str(args.steps), "--checkpoint_every", "0", "--val_tokens", "0"]
    command += ["--dtype", args.dtype, *flags.split()]
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] + command
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        sys.exit(f"error: {name} ended with status {result.returncode}:\n{result.stderr.strip()}")
    log = next(os.path.join(d, "train.log") for d, _, files in os.walk(logs) if "train.log" in files)
    with open(log, encoding="utf-8") as file:
        rows = [line.strip().split(",") for line in file][1:]
    shutil.rmtree(logs)
    sent = re.search(r"sends at least ([\d.]+ [MG]B)", result.stdout)
    seconds = statistics.median(float(row[5]) for row in rows[1:])
    return {"case": name, "ranks": ranks, "seconds": seconds, "sent": sent.group(1) if sent else "0",
            "loss": float(rows[-1][2])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--size", default="l6")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "data"))
        write_shard(os.path.join(folder, "data", "random.bin"), 2 * args.tokens + 1)
        print(f"{args.size} {args.dtype}, {args.tokens} tokens a step, {CORES} cores\n")
        print(f"{'':30} {'s/step':>8} {'tokens/s':>9} {'sent/rank':>10} {'efficiency':>11}")
        for case in CASES:
            r = run(case, args, folder)
            results.append(r)
            r["tokens_per_second"] = args.tokens / r["seconds"]
            r["efficiency"] = results[0]["seconds"] / r["seconds"]  # of the same cores
            print(f"{r['case']:30} {r['seconds']:8.3f} {r['tokens_per_second']:9.0f} {r['sent']:>10} "
                  f"{r['efficiency']:10.1%}", flush=True)
    path = os.path.join(args.build, "bench_dist.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"size": args.size, "dtype": args.dtype, "tokens": args.tokens, "cores": CORES, "results": results},
                  file, indent=1)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
