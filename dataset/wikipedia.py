#!/usr/bin/env python3
"""
Wikipedia articles that are long enough to measure perplexity by position, or files of them, as JSON Lines:

    dataset/wikipedia.py --seq_len 32768 --max_documents 100 | dataset/prepare - --format jsonl --out data/wikipedia

Articles of fewer than three bytes a token of --seq_len are skipped: English text has about four and a half under a
vocabulary of 32768. `evaluate` leaves out what is still too short.
"""

import sys

import stream

BYTES_PER_TOKEN = 3


def main():
    parser = stream.create_parser("Prints long Wikipedia articles as JSON Lines for dataset/prepare.")
    parser.add_argument("--version", default="20231101.en", help="date and language (20231101.en)")
    parser.add_argument("--seq_len", type=stream.natural, default=0, metavar="N", help="tokens that articles must have")
    options = parser.parse_args()
    options.min_bytes = max(options.min_bytes, BYTES_PER_TOKEN * options.seq_len)
    return stream.run(options, "wikimedia/wikipedia", options.version)


if __name__ == "__main__":
    sys.exit(main())
