#!/usr/bin/env python3
"""A table of passkey accuracy: one row per run, one column per length of the text in tokens."""

import sys

from runs import Run, run_script


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
    runs = [Run(folder) for folder in folders]
    table = [(run.encoding, accuracies(run)) for run in runs]
    lengths = sorted({length for _, row in table for length in row})
    print("tokens           " + "".join(f"{length:>8}" for length in lengths))
    for encoding, row in table:
        cells = (f"{100 * row[length]:.0f} %" if length in row else "" for length in lengths)
        print(f"{encoding:<17}" + "".join(f"{cell:>8}" for cell in cells))


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
