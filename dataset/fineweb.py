#!/usr/bin/env python3
"""
FineWeb or FineWeb-Edu (Penedo et al. 2024), 10 or 100 billion GPT-2 tokens of it, or files of it, as JSON Lines:

    dataset/fineweb.py --version 10B | dataset/prepare - --format jsonl --out data/10B
    dataset/fineweb.py --local 000_00000.parquet | dataset/prepare - --format jsonl --out data/part
"""

import sys

import stream


def main():
    parser = stream.create_parser("Prints FineWeb as JSON Lines for dataset/prepare.")
    parser.add_argument("--version", choices=["10B", "100B"], default="10B", help="which sample (10B)")
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    options = parser.parse_args()
    return stream.run(options, f"HuggingFaceFW/fineweb{'-edu' if options.edu else ''}", f"sample-{options.version}T")


if __name__ == "__main__":
    sys.exit(main())
