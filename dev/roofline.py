#!/usr/bin/env python3
"""Counted bytes and FLOPs of a training step against a GPU's limits, as Markdown; docs/roofline.md explains the numbers.

usage: dev/roofline.py [--kernels SIZE] [--T 512] [--tokens 65536] [--matrix 790] [--bandwidth 4.3] [--mma 585]
Without --kernels: predicted tokens/s of every size. --matrix and --mma in TFLOP/s, --bandwidth in TB/s.
"""
import argparse

VOCABULARY, PEAK = 32768, 989e12  # FLOP/s: the dense bf16 rate of the data sheet, of which MFU is a share
SIZES = {"l6": (512, 6, 16), "l8": (768, 8, 16), "l12": (768, 12, 16), "l15": (1152, 15, 24), "l18": (1536, 18, 32),
         "l24": (2048, 24, 64)}  # C, L, NH
# Share of its bound that a kernel reaches: (pessimistic, expected). Products: cuBLAS at these sizes against 4096^3;
# attention: mma.sync with softmax in between; memory: published rates of such kernels.
REACHED = {"product": (0.75, 0.88), "attention": (0.35, 0.60), "memory": (0.60, 0.80)}


def kernels(size, T, tokens):
    """[(name, kind, FLOP, bytes, times)] of one training step in bf16: FLOP and bytes of one call."""
    C, L, NH = SIZES[size]
    N, F, V = tokens, 2 * C, VOCABULARY
    parameters = 10 * C * C * L + 2 * V * C

    def product(name, inputs, outputs, times, passes=3):
        """Forward, and for 3 passes both gradients: operands once in bf16, weight gradients fp32 read and written."""
        flops = 2 * N * inputs * outputs * passes
        moved = 2 * (N * inputs + N * outputs + inputs * outputs) * passes + (passes == 3) * 6 * inputs * outputs
        return (name, "product", flops, moved, times)

    pairs = N * NH * (T + 1) / 2
    head = 4 * (C // NH) * pairs  # FLOP of a forward
    return [
        ("embedding_forward", "memory", 0, N * (4 * C + 4), 1),
        ("embedding_backward", "memory", 0, N * 10 * C, 1),
        ("residual + rmsnorm forward", "memory", 0, N * (8 * C + 4), 2 * L + 1),
        ("rmsnorm_backward", "memory", 0, N * (8 * C + 4), 2 * L + 1),
        product("matmul qkv", C, 3 * C, L),
        ("attention_forward", "attention", head * 1.123, N * (8 * C + 4 * NH), L),
        ("attention_backward", "attention", 2.5 * head * 1.06, N * (24 * C + 36 * NH), L),
        product("matmul out", C, C, L),
        product("matmul gate and up", C, 2 * F, L),
        ("swiglu_forward", "memory", 0, N * 6 * F, L),
        ("swiglu_backward", "memory", 0, N * 10 * F, L),
        product("matmul down", F, C, L),
        product("output head", C, V, 1),
        ("softmax and loss, in place", "memory", 0, N * 6 * V, 1),
        ("gradients to zero", "memory", 0, 4 * parameters, 1),
        ("global norm", "memory", 0, 4 * parameters, 1),
        ("radam_update", "memory", 0, 30 * parameters, 1),
    ]


def bound(kernel, a):
    """Seconds of one call at the limits, and the limit that binds."""
    _, kind, flops, moved, _ = kernel
    rate = (a.mma if kind == "attention" else a.matrix) * 1e12
    arithmetic, memory = flops / rate, moved / (a.bandwidth * 1e12)
    return max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory"


def model_flops(size, T):
    C, L, _ = SIZES[size]
    return 6 * (10 * C * C * L + VOCABULARY * C) + 6 * L * C * (T + 1)


def print_kernels(size, a):
    print(f"{size}, T {a.T}, {a.tokens} tokens a step, bf16\n")
    print("| kernel | times | GFLOP | MB | at the limit, us | limited by | of the step |\n|---|---|---|---|---|---|---|")
    listed = kernels(size, a.T, a.tokens)
    total = sum(bound(k, a)[0] * k[4] for k in listed)
    for k in listed:
        seconds, limit = bound(k, a)
        print(f"| {k[0]} | {k[4]} | {k[2] / 1e9:.0f} | {k[3] / 1e6:.0f} | {seconds * 1e6:.0f} | {limit} | "
              f"{seconds * k[4] / total:.1%} |")
    print(f"\nWhole step at the limits: {total * 1e3:.1f} ms.")


def print_sizes(a):
    print("| size | GFLOP/token | ceiling, tokens/s | MFU | expected | MFU | pessimistic | MFU |\n"
          "|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        flops = model_flops(size, a.T)
        line = f"| {size} | {flops / 1e9:.3f} |"
        for which in (None, 1, 0):
            seconds = sum(bound(k, a)[0] * k[4] / (1 if which is None else REACHED[k[1]][which])
                          for k in kernels(size, a.T, a.tokens))
            speed = a.tokens / seconds
            line += f" {speed / 1e3:.0f}k | {speed * flops / PEAK:.0%} |"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=SIZES)
    parser.add_argument("--T", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--matrix", type=float, default=790)
    parser.add_argument("--bandwidth", type=float, default=4.3)
    parser.add_argument("--mma", type=float, default=585)
    a = parser.parse_args()
    if a.kernels:
        print_kernels(a.kernels, a)
    else:
        print_sizes(a)


if __name__ == "__main__":
    main()
