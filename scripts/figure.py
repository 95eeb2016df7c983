"""Pictures as text for gnuplot: a page in pixels, panels on it, PNG and SVG of it. Used by plot.py."""

import math
import os
import subprocess
import tempfile

from runs import RunError, printable

GREY = 0x777777
VIRIDIS = (0x440154, 0x414487, 0x2A788E, 0x22A884, 0x7AD151, 0xFDE725)
# With the size of marks: the terminals measure fonts, dashes and marks in different units.
TERMINALS = {"png": ('pngcairo font "DejaVu Sans,13"', 1.1),
             "svg": ('svg font "DejaVu Sans,sans-serif,13" fontscale 1.28 dashlength 0.6', 0.75)}
MAX_TEXT = 300  # characters of a heading or label
LEFT = 105  # pixels for the y axis of small multiples


def colour(rgb, alpha=0):
    return f'rgb "#{alpha:02x}{rgb:06x}"' if alpha else f'rgb "#{rgb:06x}"'


def quote(text):
    """In single quotes, where gnuplot expands nothing; on one line and no longer than a picture is wide."""
    text = printable(text)
    return "'" + (text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…").replace("'", "''") + "'"


def tokens(n):
    """512, 4k, 16.5k: powers of two stay short."""
    if n >= 1024 and n % 1024 == 0:
        return f"{n // 1024}k"
    return f"{n / 1024:.1f}k" if n >= 10000 else str(n)


def mix(rgb, white):
    """The colour, lighter by a share 0...1."""
    return sum(int(c + (255 - c) * white) << shift for shift in (16, 8, 0) for c in [rgb >> shift & 255])


def viridis(x):
    at = min(max(x, 0.0), 1.0) * (len(VIRIDIS) - 1)
    i = min(int(at), len(VIRIDIS) - 2)
    parts = [(VIRIDIS[i] >> s & 255) * (i + 1 - at) + (VIRIDIS[i + 1] >> s & 255) * (at - i) for s in (16, 8, 0)]
    return sum(int(p) << s for p, s in zip(parts, (16, 8, 0)))


class Figure:
    """One picture: text for gnuplot, in pixels of a page of the given size."""

    def __init__(self, name, width, height, title, subtitle):
        self.name, self.width, self.height = name, max(width, 40 + int(8.2 * min(MAX_TEXT, len(subtitle)))), height
        self.blocks, self.body, self.count = [], [], 0
        self.heading(title, 24, 19, 0x222222)
        self.heading(subtitle, 50, 12, GREY)

    def heading(self, text, y, size, rgb):
        self.body.append(f"set label {quote(text)} at screen {20 / self.width},{1 - y / self.height} left "
                         f'font ",{size}" tc {colour(rgb)}')

    def data(self, rows):
        """A block of data; returns its name. None and NaN leave a gap."""
        name = f"$d{self.count}"
        self.count += 1
        text = lambda x: "NaN" if x is None or x != x else f"{x:.7g}"
        self.blocks.append(f"{name} << EOD\n" + "\n".join(" ".join(map(text, r)) for r in rows) + "\nEOD")
        return name

    def panel(self, left, right, top, bottom, ylabel=""):
        """Where the next plot's frame is, from the page's upper left corner."""
        self.body.append(f"set label {quote(ylabel)} at screen {(left - 82) / self.width},"
                         f"{1 - (top + bottom) / 2 / self.height} center rotate by 90")
        self.body += [f"set lmargin at screen {left / self.width}", f"set rmargin at screen {right / self.width}",
                      f"set tmargin at screen {1 - top / self.height}",
                      f"set bmargin at screen {1 - bottom / self.height}"]

    def legend(self, left, top):
        self.body.append(f"set key at screen {left / self.width},{1 - top / self.height} left top Left reverse "
                         "samplen 3 spacing 1.25 width 0")

    def add(self, *lines):
        self.body += lines

    def plot(self, curves):
        """Draws; headings and key are drawn once, with the first plot."""
        self.body.append("plot " + ", \\\n  ".join(curves))
        self.body.append("unset label\nunset arrow")

    def training_lengths(self, lengths):
        for n in sorted(set(lengths)):
            self.add(f"set arrow from {n}, graph 0 to {n}, graph 1 nohead back lc {colour(GREY)} lw 1.5 dt 2",
                     f'set label "trained: {tokens(n)}" at {n}, graph 1 offset 0,0.6 center font ",11" '
                     f"tc {colour(GREY)}")

    def script(self, terminal, mark_size, path):
        return "\n".join([
            "reset", f"set terminal {terminal} noenhanced size {self.width},{self.height} background rgb 'white'",
            f"set output {quote(path)}", "set encoding utf8", f"mark = {mark_size}", *self.blocks,
            f"set border 3 lc {colour(0x444444)}", "set tics nomirror out scale 0.6",
            f"set grid lc {colour(0xE4E4E4)} lt 1 lw 1", "set multiplot", *self.body,
            "unset multiplot", "unset output"])


def save(figures, out):
    """Draws into a folder beside the results and moves them when all are whole."""
    os.makedirs(out, exist_ok=True)
    # gnuplot works in the folder: no path, which may hold anything, is part of its script
    with tempfile.TemporaryDirectory(prefix=".plot_", dir=out) as folder:
        scripts, names = [], []
        for f in figures:
            for ending, (terminal, mark_size) in TERMINALS.items():
                names.append(f"{f.name}.{ending}")
                scripts.append(f.script(terminal, mark_size, names[-1]))
        done = subprocess.run(["gnuplot"], input="\n".join(scripts).encode(), stderr=subprocess.PIPE, cwd=folder)
        drawn = [os.path.join(folder, n) for n in names]
        if done.returncode != 0 or not all(os.path.exists(d) and os.path.getsize(d) for d in drawn):
            lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip(" ^")]
            raise RunError(f"gnuplot failed: {lines[-1] if lines else 'no picture'}; it has to be version 5.4 or newer")
        for picture in drawn:
            os.replace(picture, os.path.join(out, os.path.basename(picture)))
    for f in figures:
        print(f"wrote {printable(os.path.join(out, f.name))}.png .svg")


def legend_width(labels):
    return 80 + int(9.2 * min(MAX_TEXT, max(map(len, labels))))


def length_axis(figure, low, high, name):
    """A log2 axis over at least low...high with a tick at every power of two, or every other."""
    if high < 4 * low:
        low, high = low / 2, high * 2
    first, last = math.floor(math.log2(max(1, low))), math.ceil(math.log2(high))
    step = 1 if last - first <= 12 else 2
    ticks = ", ".join(f'"{tokens(2 ** e)}" {2 ** e}' for e in range(first, last + 1, step))
    figure.add("set logscale x 2", f"set xrange [{low}:{high}]", f"set xtics ({ticks})", f"set xlabel {quote(name)}")


def grid(count):
    """Columns and rows of small pictures."""
    columns = next(c for c, most in ((1, 1), (2, 4), (3, 9), (4, 16), (6, math.inf)) if count <= most)
    return columns, -(-count // columns)


class SmallMultiples:
    """Panels of one size in a grid, with room for a colour scale on the right."""

    def __init__(self, name, count, title, subtitle, panel=(300, 210)):
        self.columns, self.rows = grid(count)
        if count == 1:
            panel = (720, 400)
        elif count <= 4:
            panel = (440, 300)
        self.panel, self.gap, self.count, self.index = panel, (28, 74), count, 0
        width = LEFT + self.columns * (panel[0] + self.gap[0]) + 95
        height = 100 + self.rows * (panel[1] + self.gap[1]) + 10
        self.figure = Figure(name, max(width, 760), height, title, subtitle)
        x, h = LEFT + self.columns * (panel[0] + self.gap[0]) - 4, min(height - 200, 400)
        f = self.figure
        self.colorbox = (f"set colorbox user origin screen {x / f.width},{1 - (100 + h) / f.height} "
                         f"size screen {16 / f.width},{h / f.height}")

    def next(self, title, xlabel, ylabel, yticks):
        """Sets up the next panel; only the outer ones name their axes. yticks: [(label, value)]."""
        column, row = self.index % self.columns, self.index // self.columns
        left, top = LEFT + column * (self.panel[0] + self.gap[0]), 100 + row * (self.panel[1] + self.gap[1])
        f = self.figure
        f.panel(left, left + self.panel[0], top, top + self.panel[1], ylabel if column == 0 else "")
        lowest = self.index + self.columns >= self.count
        size = max(8, min(13, int(1.45 * self.panel[0] / max(1, len(title)))))
        f.add(f'set title {quote(title)} offset 0,-0.6 font ",{size}"', f"set xlabel {quote(xlabel if lowest else '')}",
              "set ytics (" + ", ".join(f'{quote(text if column == 0 else "")} {y}' for text, y in yticks) + ")",
              "unset key", self.colorbox if self.index == 0 else "unset colorbox")
        self.index += 1


def palette(end=1.0):
    steps = ", ".join(f'{i} "#{viridis(end * i / 20):06x}"' for i in range(21))
    return f"set palette defined ({steps})"
