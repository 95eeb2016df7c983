"""Draws runs with gnuplot; started by plot.sh. Reading run folders is in runs.py."""

import argparse
import collections
import math
import os
import re
import sys

sys.dont_write_bytecode = True
from figure import (GREY, Figure, SmallMultiples, colour, legend_width, length_axis, mix, palette, quote, save, tokens,
                    viridis)
from runs import PRIORS, Run, RunError, alibi_slopes, dataset_name, is_joined, printable, run_script

PICTURES = ("loss", "passkey", "depth", "perplexity", "priors")
MEASURES = {"accs": "teacher forced", "greedy": "greedy decoding", "natural": "prompt and answer as one text"}
# Okabe and Ito's colours, told apart with every kind of colour blindness. NAME_ssmax shares the colour of NAME,
# with a full line and filled marks where NAME has a dashed line and open marks.
COLOURS = {"bam": 0xD55E00, "alibi": 0x0072B2, "rotary": 0x009E73, "sinusoidal": 0xCC79A7, "nope": 0x555555}
FILLED, OPEN = (7, 5, 9, 13, 11), (6, 4, 8, 12, 10)  # gnuplot's numbers of circle, square, triangles, diamond
LINE_POINTS = 1000  # of a curve; more only makes files large
HEAT_COLUMNS, HEAT_ROWS = 40, 10


def give_styles(runs):
    """Labels as short as tells the runs apart; one colour per encoding, lighter with another mark where it repeats."""
    parts = [lambda r: r.encoding, lambda r: f"{r.size} {r.encoding}", lambda r: f"{r.size} {r.encoding} {r.version}",
             lambda r: r.name]
    label = next((p for p in parts if len({p(r) for r in runs}) == len({r.name for r in runs})), parts[-1])
    total, seen = collections.Counter(r.encoding for r in runs), collections.Counter()
    for r in runs:
        ssmax = r.encoding.endswith("_ssmax")
        i, n = seen[r.encoding], total[r.encoding]
        seen[r.encoding] += 1
        r.label = label(r) + (f", {printable(r.positions)}" if r.positions else "")
        r.colour = mix(COLOURS.get(r.encoding.removesuffix("_ssmax"), 0), 0.6 * i / n)
        r.line = f"lc {colour(r.colour)} lw 2.5 dt {1 if ssmax else '(10,5)'}"
        r.marks = f"pt {(FILLED if ssmax else OPEN)[i % len(FILLED)]} ps mark"


def describe(runs):
    sizes, lengths = sorted({r.size for r in runs}), sorted({r.train_length for r in runs})
    return f"{', '.join(sizes)}, trained on sequences of {', '.join(map(str, lengths))} tokens"


# ----------------------------------------------------------------------------
# loss


def finite(rows):
    """Without NaN, and without what a picture cannot hold."""
    return [(r["step"], r["loss"]) for r in rows if abs(r["loss"]) < 1e30]


def thin(rows):
    return rows[:: max(1, len(rows) // LINE_POINTS)] + rows[-1:]


def running_mean(rows, half):
    """Mean over up to `half` neighbours on both sides; near the first, where a loss falls steeply, over fewer."""
    sums = [0.0]
    for _, y in rows:
        sums.append(sums[-1] + y)
    smooth = []
    for i, (x, _) in enumerate(rows):
        first, end = i - min(half, i), min(i + min(half, i) + 1, len(rows))
        smooth.append((x, (sums[end] - sums[first]) / (end - first)))
    return smooth


def smooth_loss(rows):
    return running_mean(rows, len(rows) // 100)


def loss_top(curves):
    """Upper end of the loss axis: the first steps, which would flatten everything else, are cut off in long runs."""
    tops = []
    for rows in curves:
        after = rows[len(rows) // 50 :] if len(rows) >= 100 else rows
        tops.append(max(y for _, y in after))
    return max(tops)


def draw_loss(runs, described):
    logs = [(r, finite(r.train_log()), finite(r.eval_log())) for r in runs]
    for r, train, _ in logs:
        if not train:
            print(f"{r.name}: train.log has no rows yet, no loss")
    logs = [(r, t, v) for r, t, v in logs if t]
    if not logs:
        return []
    curves = [smooth_loss(t) for _, t, _ in logs] + [v for _, _, v in logs if v]
    top, bottom = loss_top(curves), min(y for c in curves for _, y in c)
    margin = 0.05 * (top - bottom) or 0.1
    draw = draw_one_loss if len(logs) == 1 else draw_losses
    smoothed = any(len(t) >= 100 for _, t, _ in logs)
    note = f"{described}; training loss " + ("averaged over a fiftieth of the run, single steps faint" if smoothed
                                            else "of every step")
    f = draw(logs, note)
    last = max(x for c in curves for x, _ in c)
    f.blocks.insert(0, f"top = {top + margin:.7g}\nbottom = {bottom - margin:.7g}\nlast = {max(1, last):.7g}\n"
                    f"set xtics ({step_ticks(last)})")
    return [f]


def step_ticks(last):
    """About five ticks at round steps."""
    size = 10 ** math.floor(math.log10(max(last, 5) / 5))
    size = max(1, next(size * k for k in (1, 2, 5, 10) if size * k * 6 >= last))
    label = lambda n: f"{n / 1000:g}k" if last >= 10000 and n else f"{n}"
    return ", ".join(f'"{label(int(n))}" {int(n)}' for n in range(0, int(last) + 1, int(size)))


def loss_axes(f):
    f.add("set yrange [bottom:top]", "set xrange [0:last]", 'set xlabel "training step"')


def draw_one_loss(logs, note):
    r, train, val = logs[0]
    f = Figure("loss", 1000, 620, f"Loss of {r.encoding} while training", note)
    loss_axes(f)
    f.add("set key inside top right Left reverse samplen 3 spacing 1.25")
    f.panel(105, 970, 80, 545, "loss (nats per token)")
    curves = [f"{f.data(thin(train))} with lines lc {colour(r.colour, 0xB0)} lw 1 notitle",
              f"{f.data(thin(smooth_loss(train)))} with lines lc {colour(r.colour)} lw 2.5 "
              f'title "training, last {train[-1][1]:.3f}"']
    if val:
        dots = f"pt 7 ps 0.8 * mark pi {max(1, len(val) // 20)}"
        curves.append(f"{f.data(thin(val))} with linespoints lc {colour(0x222222)} lw 1.5 {dots} "
                      f'title "validation, last {val[-1][1]:.3f}"')
    f.plot(curves)
    return f


def draw_losses(logs, note):
    with_val = any(v for _, _, v in logs)
    logs = sorted(logs, key=lambda log: -(log[2] or smooth_loss(log[1]))[-1][1])
    labels = [f"{r.label}  {(v or smooth_loss(t))[-1][1]:.3f}" for r, t, v in logs]
    width = 1270 + legend_width(labels)
    f = Figure("loss", width, 620, "Loss while training", note + "; the legend gives the last " +
               ("validation loss" if with_val else "training loss"))
    loss_axes(f)
    f.add("unset key")
    right = 640 if with_val else 1240
    f.panel(105, right, 80, 545, "training loss (nats per token)")
    alpha = min(0xF0, 0xC0 + 6 * len(logs))
    faint = [f"{f.data(thin(t))} with lines lc {colour(r.colour, alpha)} lw 1 notitle" for r, t, _ in logs]
    means = [f"{f.data(thin(smooth_loss(t)))} with lines {r.line} title {quote(label)}"
             for (r, t, _), label in zip(logs, labels)]
    if not with_val:
        f.legend(1260, 80)
    f.plot(faint + means)
    if with_val:
        f.panel(770, 1240, 80, 545, "validation loss (nats per token)")
        f.legend(1260, 80)
        f.plot([f"{f.data(thin(v))} with linespoints {r.line} {r.marks} pi {max(1, len(v) // 12)} title {quote(label)}"
                if v else f"NaN with lines {r.line} title {quote(label)}" for (r, _, v), label in zip(logs, labels)])
    return f


# ----------------------------------------------------------------------------
# passkey retrieval


def passkey_of(runs, key):
    """(configuration, [(run, its measurements)]): the one asked for, or the one that most runs share."""
    found = [(r, r.passkey()) for r in runs]
    count = collections.Counter(k for _, p in found for k in p)
    if key is None and count:
        lengths = lambda k: max(len(p[k]["seq_lens"]) for _, p in found if k in p)
        key = max(count, key=lambda k: (count[k], "equidistant" in k, lengths(k)))
    chosen = []
    for r, p in found:
        if key not in p:
            p = {**p, **r.other_passkey()}
        if p.get(key, {}).get("seq_lens"):
            chosen.append((r, p[key]))
        elif p:
            print(f"{r.name}: results.json has no passkey results for {key}, only {printable(', '.join(p))}")
    return key, chosen


def describe_passkey(key):
    parts = [p.strip(" '()") for p in key.split(",")]
    if len(parts) != 4:
        return key
    depth = {"equidistant": "equidistant depths", "random": "random depths"}.get(parts[0], f"key at the {parts[0]}")
    return f"{parts[1]} samples per length, {parts[2]} digits, {depth}"


def accuracy_points(p, measure):
    """[(length, percent)]; prompts below the shortest possible one come out equally long: their mean."""
    at = collections.defaultdict(list)
    for n, accuracy in zip(p["seq_lens"], p.get(measure) or []):
        if n > 0 and accuracy is not None:
            at[n].append(100 * accuracy)
    return [(n, sum(a) / len(a)) for n, a in sorted(at.items())]


def draw_passkey(key, measured, measure, described):
    lines = []
    for r, p in measured:
        points = accuracy_points(p, measure)
        if points:
            lines.append((r, points))
        else:
            print(f"{r.name}: results.json has no '{measure}' for {key}")
    if not lines:
        return []
    lines.sort(key=lambda line: -sum(a for _, a in line[1]) / len(line[1]))
    labels = [r.label for r, _ in lines]
    lengths = [r.train_length for r, _ in lines]
    seen = [n for _, points in lines for n, _ in points] + lengths
    half = max(len(points) for _, points in lines) // 40
    f = Figure("passkey" if measure == "accs" else f"passkey_{measure}", 970 + legend_width(labels), 620,
               "Passkey retrieval: how far beyond the training length?",
               f"{MEASURES[measure]}, {describe_passkey(key)}; {described}" +
               (f"; mean of {2 * half + 1} neighbouring lengths" if half else ""))
    length_axis(f, min(seen) / 1.15, max(seen) * 1.08, "prompt length (tokens)")
    f.add("set yrange [-3:103]", "set ytics 20", "set format y '%g %%'")
    f.panel(110, 940, 95, 545, "accuracy")
    f.legend(960, 95)
    f.training_lengths(lengths)
    faint, curves = [], []
    for r, points in lines:
        marks = f"{r.marks} pi {max(1, len(points) // 20)}"
        curves.append(f"{f.data(running_mean(points, half))} with linespoints {r.line} {marks} title {quote(r.label)}")
        if half and len(lines) <= 4:
            faint.append(f"{f.data(points)} with lines lc {colour(r.colour, 0xC0)} lw 1 notitle")
    f.plot(faint + curves)
    return [f]


def heat_cells(p):
    """[(column, lowest depth, highest depth, percent)], [length of each column]. Neighbouring lengths share a column
    where there are very many."""
    count = len(p["seq_lens"])
    columns = min(count, HEAT_COLUMNS)
    rows = min(HEAT_ROWS, max(len(set(d)) for d in p["depths"]))
    sums = collections.defaultdict(lambda: [0, 0])
    lengths = [0] * columns
    for i, (n, depths, hits) in enumerate(zip(p["seq_lens"], p["depths"], p["hits"])):
        column = i * columns // count
        lengths[column] = n
        for depth, hit in zip(depths, hits):
            cell = sums[column, min(int(depth * rows), rows - 1)]
            cell[0] += hit
            cell[1] += 1
    return [(c, 100 * k / rows, 100 * (k + 1) / rows, 100 * h / n) for (c, k), (h, n) in sorted(sums.items())], lengths


def draw_depth(key, measured):
    usable = [(r, p) for r, p in measured if p.get("depths") and p.get("hits")]
    for r, p in measured:
        if not (p.get("depths") and p.get("hits")):
            print(f"{r.name}: results.json has no depths and hits, no heat map")
    if not usable:
        return []
    m = SmallMultiples("depth", len(usable), "Share of passkeys found, by depth in the prompt",
                       f"{MEASURES['accs']}, {describe_passkey(key)}; dashed: training length; grey: no key there")
    f = m.figure
    f.add(palette(), "set cbrange [0:100]", "set format cb '%g %%'", "set yrange [100:0]", "unset grid",
          f"set object 1 rectangle from graph 0,0 to graph 1,1 behind fc {colour(0xE8E8E8)} fs noborder")
    for r, p in usable:
        cells, lengths = heat_cells(p)
        within = sum(n <= r.train_length for n in p["seq_lens"]) * len(lengths) / len(p["seq_lens"]) - 0.5
        m.next(r.label, "prompt length (tokens)", "depth of the key", [(f"{y} %%", y) for y in (0, 25, 50, 75, 100)])
        most = max(2, m.panel[0] // 52)
        step = -(-len(lengths) // most)
        ticks = ", ".join(f'"{tokens(n)}" {i}' for i, n in enumerate(lengths) if i % step == 0)
        f.add(f"set xrange [-0.5:{len(lengths) - 0.5}]", f"set xtics ({ticks})")
        f.add(f"set arrow from {within}, graph 0 to {within}, graph 1 nohead front lc {colour(0xD55E00)} lw 2.5 dt 2")
        # boxes reach under the next ones, else the page shines through between them
        block = f.data((c, c - 0.5, c + 0.54, low, high + 0.5, a) for c, low, high, a in cells)
        f.plot([f"{block} using 1:4:2:3:4:5:6 with boxxyerror fs solid 1 noborder lc palette notitle"])
    return [f]


# ----------------------------------------------------------------------------
# perplexity by position


def perplexity_config(entry):
    """What has to agree for a picture: articles and joined text are different measures of one dataset."""
    return dataset_name(entry), is_joined(entry), entry.get("seq_len"), entry.get("window_size")


def describe_perplexity(config):
    dataset, joined, seq_len, window = config
    return f"{dataset}{', documents joined' if joined else ''} (seq_len {seq_len}, window {window})"


def draw_perplexity(runs, described):
    is_number = lambda v: v is not None
    found = [(r, e) for r in runs for e in r.perplexity() if any(map(is_number, e.get("perplexity", [])))]
    if not found:
        return []
    count = collections.Counter(perplexity_config(e) for _, e in found)
    config = max(count, key=lambda c: (count[c], not c[1], c[2] or 0))
    lines = [(r, e) for r, e in found if perplexity_config(e) == config]
    for r, e in found:
        if perplexity_config(e) != config:
            print(f"{r.name}: perplexity on {printable(describe_perplexity(perplexity_config(e)))} is left out")
    lines.sort(key=lambda line: -([v for v in line[1]["perplexity"] if is_number(v)][-1]))
    labels, lengths = [r.label for r, _ in lines], [r.train_length for r, _ in lines]
    articles = lines[0][1].get("articles")
    with_error = any(e.get("standard_error") for _, e in lines)
    pieces = f", {articles:g} {'rows of joined documents' if config[1] else 'articles'}" if articles else ""
    note = f"{config[0]}{pieces}, windows of {config[3]} tokens"
    f = Figure("perplexity", 970 + legend_width(labels), 620, "Perplexity by position",
               note + ("; band: one standard error" if with_error else "") + f"; {described}")
    seen = [p for _, e in lines for p in e["positions"]] + lengths
    length_axis(f, min(seen) / 1.08, max(seen) * 1.08, "position (end of the window, tokens)")
    values = [v for _, e in lines for v in e["perplexity"] if is_number(v)]
    if max(values) > 8 * min(values):
        f.add("set logscale y 10", f"set yrange [{min(values) / 1.15}:{max(values) * 1.15}]", "set mytics 10")
    else:
        room = 0.06 * (max(values) - min(values)) or 1
        f.add(f"set yrange [{min(values) - room}:{max(values) + room}]")
    f.panel(110, 940, 95, 545, "perplexity")
    f.legend(960, 95)
    f.training_lengths(lengths)
    bands, curves = [], []
    for r, e in lines:
        rows = list(zip(e["positions"], e["perplexity"], e.get("standard_error") or [0] * len(e["positions"])))
        block = f.data(rows)
        if e.get("standard_error"):
            bands.append(f"{block} using 1:($2-$3):($2+$3) with filledcurves fs transparent solid 0.15 noborder "
                         f"lc {colour(r.colour)} notitle")
        marks = f"{r.marks} pi {max(1, len(rows) // 16)}"
        curves.append(f"{block} using 1:2 with linespoints {r.line} {marks} title {quote(r.label)}")
    f.plot(bands + curves)
    return [f]


# ----------------------------------------------------------------------------
# learned priors


def power_of_ten(e):
    return "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] if c != "-" else "⁻" for c in str(e))


def longest_length(run):
    """Where the x axis ends: the longest length that the run was measured at, at least 16 times the training length."""
    return max([16 * run.train_length] + [n for p in run.passkey().values() for n in p["seq_lens"]])


def prior_axis(f, values):
    """P on a logarithmic scale, most negative at the bottom: a power law is a straight line. Returns the ticks."""
    low, high = max(min(values), 1e-4) / 1.5, min(max(values), 1e8) * 1.5
    f.add("set logscale y 10", f"set yrange [{high}:{low}]")
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = -(-(last - first) // 7) or 1
    return [("−" + power_of_ten(e), 10.0 ** e) for e in range(first, last + 1, step)]


def draw_priors(run, name):
    layers = run.priors()
    if not layers:
        return []
    end = longest_length(run)
    count = 120
    distances = sorted({round(end ** (i / (count - 1))) for i in range(count)})
    prior = PRIORS[run.kind][1]
    curves = [(label, [[-prior(theta, d) for d in distances] for theta in heads]) for label, heads in layers]
    slopes = alibi_slopes(run.heads)
    values = [v for _, heads in curves for h in heads for v in h] + [s * d for s in slopes for d in (1, end)]
    scaled = run.encoding.endswith("_ssmax") and run.model_args.get("ssmax_prior", "inside") == "inside"
    m = SmallMultiples(name, len(layers), f"Learned priors of {run.label}: bias P(d) at distance d",
                       "one line per head" + (", before Scalable-Softmax multiplies it" if scaled else "") +
                       "; grey: ALiBi's heads; dashed: training length", panel=(270, 260))
    f = m.figure
    f.add(palette(0.92), f"set cbrange [1:{max(2, run.heads)}]", "set cblabel 'head' offset -1,0")
    step = max(1, run.heads // 8)
    f.add(f"set cbtics ({', '.join(map(str, range(1, run.heads + 1, step)))})")
    length_axis(f, 1, end, "")
    first, last = 0, int(math.log2(end))
    every = max(2, (last - first) // 6)
    f.add("set xtics (" + ", ".join(f'"{tokens(2 ** e)}" {2 ** e}' for e in range(first, last + 1, every)) + ")")
    ticks = prior_axis(f, values)
    for label, heads in curves:
        m.next(label, "distance d (tokens)", "P(d)", ticks)
        f.add(f"set arrow from {run.train_length}, graph 0 to {run.train_length}, graph 1 nohead back "
              f"lc {colour(GREY)} lw 1.5 dt 2")
        lines = [f"{f.data([(1, s), (end, s * end)])} with lines lc {colour(0xBBBBBB)} lw 1 notitle" for s in slopes]
        for h, ys in enumerate(heads):
            rgb = viridis(0.92 * h / max(1, run.heads - 1))
            lines.append(f"{f.data(zip(distances, ys))} with lines lc {colour(rgb)} lw 2 notitle")
        f.plot(lines + ["NaN lc palette notitle"])
    return [f]


def draw_all_priors(runs):
    learned = [r for r in runs if r.kind in PRIORS]
    if not learned:
        print(f"priors: none of the runs is of {', '.join(PRIORS)} (or _ssmax), whose learned priors are drawn")
    figures, names = [], set()
    for r in learned:
        name = "priors" if len(learned) == 1 else "priors_" + re.sub(r"[^A-Za-z0-9.-]+", "_", r.label)[-100:]
        name = name if name not in names else f"{name}_{len(names)}"
        names.add(name)
        drawn = draw_priors(r, name)
        figures += drawn
        if not drawn:
            print(f"{r.name}: model.safetensors is not there or has no prior, no priors are drawn")
    return figures


# ----------------------------------------------------------------------------


def parse_arguments():
    p = argparse.ArgumentParser(
        prog="scripts/plot.sh", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description="Draws runs, each as PNG and SVG; several runs are compared in the same pictures.\n\n"
        "  loss        training and validation loss against the step\n"
        "  passkey     passkey accuracy against prompt length\n"
        "  depth       the same by the key's depth, a heat map per run\n"
        "  perplexity  perplexity by position\n"
        "  priors      the learned prior of every head of bam, kerple_* and alibi_learned, beside ALiBi's lines\n\n"
        "passkey, depth and perplexity need the results.json that ./evaluate writes.",
        epilog="example: scripts/plot.sh logs/l12/*/version_00 --out plots")
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as logs/l12/bam_ssmax/version_00")
    p.add_argument("--out", metavar="DIR",
                   help="where pictures go (default: the run's folder, or plots for several runs)")
    p.add_argument("--only", metavar="LIST", default=",".join(PICTURES), help="these pictures, such as loss,passkey")
    p.add_argument("--measure", choices=MEASURES, default="accs",
                   help="of the passkey picture: accs = teacher forced (default), greedy = greedy decoding, "
                        "natural = prompt and answer tokenised as one text")
    p.add_argument("--passkey", metavar="KEY",
                   help="which passkey results, such as \"('random', 20, 5, 0)\", or the same with \" step 500 seed 7 keys all "
                        "dtype float32\" for those of older weights or other settings (default: those that most runs "
                        "have)")
    p.add_argument("--positions", action="store_true",
                   help="also draw what was evaluated with changed positions, such as --rope_scaling yarn")
    a = p.parse_args()
    a.only = a.only.split(",")
    unknown = [x for x in a.only if x not in PICTURES]
    if unknown:
        raise RunError(f"--only {unknown[0]}: expected some of {','.join(PICTURES)}")
    return a


def main():
    a = parse_arguments()
    folders = list(dict.fromkeys(f.rstrip("/") or f for f in a.runs))
    runs = [Run(f) for f in folders]
    views = [v for r in runs for v in r.with_changed_positions()] if a.positions else []
    give_styles(runs + views)
    described = describe(runs)
    figures = []
    if "loss" in a.only:
        figures += draw_loss(runs, described)
    evaluated = []
    for r in runs:
        if os.path.exists(r.path("results.json")):
            evaluated.append(r)
        elif a.only != ["loss"]:
            print(f"{r.name}: no results.json, so neither passkey, depth nor perplexity; make it with ./evaluate")
    evaluated += views
    key, measured = passkey_of(evaluated, a.passkey)
    if measured and "passkey" in a.only:
        figures += draw_passkey(key, measured, a.measure, described)
    if measured and "depth" in a.only:
        figures += draw_depth(key, measured)
    if "perplexity" in a.only:
        figures += draw_perplexity(evaluated, described)
    if "priors" in a.only:
        figures += draw_all_priors(runs)
    if not figures:
        raise RunError("nothing to draw in these runs; train or evaluate them first")
    save(figures, a.out or (folders[0] if len(folders) == 1 else "plots"))


if __name__ == "__main__":
    run_script(main)
