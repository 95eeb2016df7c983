#!/usr/bin/env python3
"""A table of passkey accuracy: one row per run and per way in which evaluations changed its positions, one column per
length of the text in tokens."""

import sys

from runs import Run, printable, run_script


def accuracies(run):
    """Length to accuracy of the run's first passkey measurement; empty without one."""
    for measurement in run.passkey().values():
        pairs = zip(measurement["seq_lens"], measurement.get("accs") or [])
        return {length: accuracy for length, accuracy in pairs if accuracy is not None}
    return {}


def main(folders):
    if not folders or folders[0] in ("-h", "--help"):
        print("usage: scripts/passkey_table.py RUN...\n" + __doc__)
        return
    runs = [view for run in map(Run, folders) for view in [run, *run.with_changed_positions()]]
    named = lambda run: f"{run.encoding}, {printable(run.positions)}" if run.positions else run.encoding
    table = [(named(run), accuracies(run)) for run in runs]
    lengths = sorted({length for _, row in table for length in row})
    width = max(17, *(len(name) + 1 for name, _ in table))
    print(f"{'tokens':<{width}}" + "".join(f"{length:>8}" for length in lengths))
    for encoding, row in table:
        cells = (f"{100 * row[length]:.0f} %" if length in row else "" for length in lengths)
        print(f"{encoding:<{width}}" + "".join(f"{cell:>8}" for cell in cells))


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
