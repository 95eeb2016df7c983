#!/usr/bin/env python3
"""Predicted speed of data-parallel training on many GPUs, as the tables of docs/scaling.md, which explains the numbers.

usage: dev/scaling.py [--part SIZE RANKS]   without --part: all tables; with it: what one step consists of
"""
import argparse
import math

import roofline

VOCABULARY, GPUS, T = roofline.VOCABULARY, 8, 512  # GPUs of a node
RANKS = (8, 16, 32, 64, 128, 256, 512)
MULTIPROCESSORS, LAUNCHES, LAUNCH = 132, 30, 3e-6  # launches of a layer and micro-step, seconds of each
CONTENTION = 16 / MULTIPROCESSORS  # NCCL's blocks take multiprocessors from the backward pass they hide behind
GROUP = 64 << 20  # bytes, GROUP_BYTES of llmc/ranks/dist.cuh
HOST = 10e-6  # of the ranks' agreement, for every doubling of the ranks
MiB = 1 << 20
# Bus bandwidth in GB/s of an all-reduce by bytes, from 1 MiB on, each twice the one before.
NODE = (74.6, 96.3, 145.1, 196.6, 255.9, 301.3, 368.9, 414.5, 441.9, 456.2, 465.9, 471.1, 474.1)  # 8 H200
NODES = (12.5, 20.8, 31.6, 50.6, 71.8, 142.9, 197.8, 260.5, 283.2, 309.9, 366.0, 371.3, 374.7)  # 4 nodes, 8 x 400 Gb/s
# Share of the rates above between nodes: all-reduce; reduce-scatter and all-gather. Or the rate of the only card.
NETWORKS = {
    "InfiniBand": {"all": 1.0, "half": 1.0, "most": math.inf},
    "InfiniBand, pessimistic": {"all": 0.75, "half": 0.5, "most": math.inf},
    "100 GbE, RDMA": {"all": 1.0, "half": 1.0, "most": 12.2},
    "100 GbE, TCP": {"all": 1.0, "half": 1.0, "most": 5.0},
}
# Training memory in GiB of one GPU at B 128, T 512, README.md.
PLANNED = {"l6": 7.1, "l8": 13.5, "l12": 19.1, "l15": 35.9, "l18": 58.2, "l24": 106.0}


def rate(table, size):
    """Bytes/s, linear between the sizes of the table in the logarithm of the size."""
    at = min(max(math.log2(size / MiB), 0), len(table) - 1)
    low = min(int(at), len(table) - 2)
    return 1e9 * (table[low] + (at - low) * (table[low + 1] - table[low]))


def all_reduce(size, n, network):
    if n == 1:
        return 0
    moved, nodes = 2 * (n - 1) / n * size, n / GPUS
    if nodes <= 1:
        return moved / rate(NODE, size)
    share = NETWORKS[network]
    tree = 2 * 8.5e-6 * max(0, math.log2(nodes / 4))  # what the table of 4 nodes lacks
    return moved / min(rate(NODES, size) * share["all"], share["most"] * 1e9) + tree


def half(size, n, network):
    """A reduce-scatter or all-gather of `size` bytes in all: rings only, whose latency grows with the ranks."""
    if n == 1:
        return 0
    moved, nodes = (n - 1) / n * size, n / GPUS
    if nodes <= 1:
        return 18e-6 + moved / 355e9
    share = NETWORKS[network]
    ring = (n - nodes) * 1.9e-6 + (nodes - 1) * 4e-6
    return moved / min(rate(NODES, size) * share["half"], share["most"] * 1e9) + ring


def segments(size):
    """Parameters of the embedding, the output head and each layer, as they lie in memory."""
    C, L, _ = roofline.SIZES[size]
    return [VOCABULARY * C] * 2 + [10 * C * C] * L


def groups(segments_bytes, least):
    """[(bytes, segments queued so far)] of the operations of segments in this order, as llmc/ranks/dist.cuh collects them: a
    group goes when `least` bytes are waiting, and at the end."""
    together, waiting = [], 0
    for i, size in enumerate(segments_bytes, 1):
        waiting += size
        if waiting >= least or i == len(segments_bytes):
            together.append((waiting, i))
            waiting = 0
    return together


def parameters(size):
    return sum(segments(size))


def micro_step(size, tokens):
    """Seconds of one forward and backward pass, without what happens once a step."""
    C, L, _ = roofline.SIZES[size]
    limits = argparse.Namespace(matrix=790, bandwidth=4.3, mma=585)
    width = {"matmul qkv": 3 * C, "matmul out": C, "matmul gate and up": 4 * C, "matmul down": C,
             "output head": VOCABULARY}
    seconds = 0
    for name, kind, flops, moved, times in roofline.kernels(size, T, tokens):
        if name in ("gradients to zero", "global norm", "radam_update"):
            continue
        # fewer tiles of 128 x 128 than multiprocessors leave some of them idle
        tiles = math.ceil(tokens / 128) * math.ceil(width[name] / 128) if name in width else MULTIPROCESSORS
        reached = roofline.REACHED[kind][1] * min(1, tiles / MULTIPROCESSORS)
        seconds += roofline.bound((name, kind, flops, moved, times), limits)[0] / reached * times
    return max(seconds, L * LAUNCHES * LAUNCH)


def exposed(ready, seconds, end):
    """Communication after `end`, its operations one after the other, each when its data are ready."""
    free = 0
    for at, takes in zip(ready, seconds):
        free = max(free, at) + takes
    return max(0, free - end)


def step(size, n, tokens, network, zero, least=GROUP):
    """Seconds of the parts of a step of `tokens` tokens on each of n ranks."""
    C, L, _ = roofline.SIZES[size]
    parts, total = segments(size), parameters(size)
    batch = min(tokens, 128 * T)
    micro = micro_step(size, batch)
    backward = 2 / 3 * micro * (1 - 6 * VOCABULARY * C / roofline.model_flops(size, T))  # of the layers
    # the backward pass ends with the embedding; its last segments go when it is done
    reduced = groups([4 * count for count in parts[1:] + parts[:1]], least)
    ready = [micro - backward * (1 - min(done - 1, L) / L) for _, done in reduced]
    reduce = [(half if zero else all_reduce)(sent, n, network) for sent, _ in reduced]
    late = exposed(ready, reduce, micro)
    memory = 4.3e12 * roofline.REACHED["memory"][1]
    gathered = [sent for sent, _ in groups([2 * count for count in parts], least)]
    return {
        "compute": micro * (tokens // batch),
        "slower compute": CONTENTION * (sum(reduce) - late),
        "exposed reduction": late,
        "gradients to zero": 4 * total / memory,
        "optimiser": 34 * total / memory / (n if zero else 1),
        "all-gather": sum(half(sent, n, network) for sent in gathered) if zero else 0,
        "agreement": HOST * math.log2(n),
    }


def efficiency(size, n, tokens, *how, **more):
    """Milliseconds of a step, and tokens/s of a GPU as a share of those of one GPU alone at 65,536 tokens a step."""
    seconds = sum(step(size, n, tokens, *how, **more).values())
    alone = sum(step(size, 1, 128 * T, "InfiniBand", 0).values())
    return seconds * 1e3, tokens / seconds / (128 * T / alone)


def head(title, first, columns):
    print(f"\n**{title}**\n\n| {first} | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")


def print_scaling(title, tokens, zero):
    head(f"{title}, `--zero_stage {zero}`", "size", [f"{n} GPUs" for n in RANKS])
    for size in roofline.SIZES:
        cells = ["{:.1f} ms {:.0%}".format(*efficiency(size, n, tokens(n), "InfiniBand", zero)) for n in RANKS]
        print(f"| {size} | " + " | ".join(cells) + " |")


def print_network(title, tokens, networks, ranks, zeros):
    head(title, "size", [f"{n} GPUs" for n in ranks])
    for size in roofline.SIZES:
        cells = [" / ".join(f"{efficiency(size, n, tokens(n), network, zero)[1]:.0%}" for network in networks
                            for zero in zeros) for n in ranks]
        print(f"| {size} | " + " | ".join(cells) + " |")


def print_bytes():
    n, gib = 64, 1 << 30
    head("A GPU's bytes: of a step on the wire (64 GPUs), and of memory", "size",
         ["parameters", "all-reduce, MB", "ZeRO-1, MB", "a layer's segment, MB", "head's, MB", "state, GiB",
          "ZeRO-1 on 8", "on 64", "all at B 128, GiB", "ZeRO-1 on 8"])
    for size in roofline.SIZES:
        total, parts = parameters(size), segments(size)
        print(f"| {size} | {total / 1e6:.0f}M | {2 * (n - 1) / n * 4 * total / 1e6:.0f} | "
              f"{(n - 1) / n * 6 * total / 1e6:.0f} | {4 * parts[-1] / 1e6:.0f} | {4 * parts[1] / 1e6:.0f} | "
              f"{18 * total / gib:.1f} | {(10 + 8 / 8) * total / gib:.1f} | {(10 + 8 / 64) * total / gib:.1f} | "
              f"{PLANNED[size]:.1f} | {PLANNED[size] - 8 * total * 7 / 8 / gib:.1f} |")


def print_groups(tokens):
    """What grouping the operations buys: ms of a step."""
    head("524,288 tokens a step, ms: size of the groups", "size, GPUs, `--zero_stage`",
         ["each segment alone", "16 MiB", "**64 MiB**", "256 MiB", "all at the end"])
    for size, n in (("l6", 64), ("l12", 64), ("l12", 128), ("l24", 64), ("l24", 128), ("l24", 512)):
        for zero in (0, 1):
            cells = [f"{efficiency(size, n, tokens(n), 'InfiniBand', zero, least=least)[0]:.1f}"
                     for least in (0, 16 * MiB, GROUP, 256 * MiB, math.inf)]
            print(f"| {size}, {n}, {zero} | " + " | ".join(cells) + " |")


def print_measured():
    """MPT-1B of MosaicML on H100, one micro-step of 20 x 2048 tokens a GPU; 16 GPUs are the base."""
    measured = {16: 46037, 32: 45130, 64: 44402}  # tokens/s of a GPU
    counts, L = [12 * 2048 ** 2] * 24 + [50368 * 2048], 24  # the embedding is the output head
    micro, times = 20 * 2048 / measured[16], {}
    for n in measured:
        ready = [micro / 3 + 2 / 3 * micro * (i + 1) / L for i in range(L)] + [micro]
        reduce = [all_reduce(4 * count, n, "InfiniBand") for count in counts]
        late = exposed(ready, reduce, micro)
        times[n] = micro + late + CONTENTION * (sum(reduce) - late)
    head("MPT 1B on H100: tokens/s of a GPU relative to 16 GPUs", "GPUs", ["measured", "predicted"])
    for n in measured:
        print(f"| {n} | {measured[n] / measured[16]:.1%} | {times[16] / times[n]:.1%} |")
    print("\nOne all-reduce of the fp32 gradients of 124M parameters: " + ", ".join(
        f"{all_reduce(4 * 124.5e6, n, 'InfiniBand') * 1e3:.1f} ms on {n} GPUs" for n in (16, 64)) + ".")


def print_part(size, n):
    head(f"{size}, {n} GPUs, ms", "tokens, network, `--zero_stage`",
         list(step(size, n, T, "InfiniBand", 0)) + ["sum"])
    for tokens in (524288 // n, 128 * T):
        for network in NETWORKS:
            for zero in (0, 1):
                parts = list(step(size, n, tokens, network, zero).values())
                cells = " | ".join(f"{1e3 * part:.2f}" for part in parts + [sum(parts)])
                print(f"| {tokens}, {network}, {zero} | {cells} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs=2, metavar=("SIZE", "RANKS"))
    a = parser.parse_args()
    if a.part:
        size, ranks = a.part
        if size not in roofline.SIZES or not ranks.isdigit() or int(ranks) not in RANKS:
            parser.error(f"--part {size} {ranks}: expected one of {' '.join(roofline.SIZES)} and of "
                         f"{' '.join(map(str, RANKS))}")
        print_part(size, int(ranks))
        return
    print_bytes()
    scenarios = (("524,288 tokens a step", lambda n: 524288 // n), ("65,536 tokens a step and GPU", lambda n: 128 * T))
    for title, tokens in scenarios:
        for zero in (0, 1):
            print_scaling(title, tokens, zero)
    for title, tokens in scenarios:
        print_network(f"{title}, pessimistic InfiniBand, `--zero_stage 0` / `1`", tokens, ["InfiniBand, pessimistic"],
                      RANKS[1:], (0, 1))
    print_network("65,536 tokens a step and GPU, one 100 GbE card a node, `--zero_stage 0`, RDMA / TCP",
                  scenarios[1][1], ["100 GbE, RDMA", "100 GbE, TCP"], (16, 64, 512), (0,))
    print_groups(scenarios[0][1])
    print_measured()


if __name__ == "__main__":
    main()
