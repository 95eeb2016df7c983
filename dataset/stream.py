"""
What fineweb.py and wikipedia.py share: documents from the Hugging Face hub or from local files, one JSON object
{"text": ...} a line on standard output, which dataset/prepare reads with --format jsonl; progress on standard error.

The first line announces the stream and the last one says how many documents it had (llmc/stream_marks.h), so that a
stream that was cut short, by an error, a signal or a full disk, never becomes a dataset that looks whole: dataset/prepare
demands the end of what was announced. --no_marks is for other programs. Packages are imported only where they are
needed.
"""

import argparse
import errno
import gzip
import importlib
import json
import os
import re
import signal
import sys
import time
import zlib


MARK = "bamc_stream"


class StreamError(Exception):
    """One line for the user: what was found, what was expected, what to do."""


class Stopped(BaseException):
    """A signal came. No Exception, so that no library takes it for a failure that it can try again."""


def package(name, purpose):
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StreamError(
            f"{purpose} needs the Python package {name}, which {sys.executable} does not have; run: python3 -m venv "
            f".venv && .venv/bin/pip install {name}, and start this script with .venv/bin/python"
        ) from None


# ---------------------------------------------------------------- sources


def hub_documents(repository, configuration, field):
    datasets = package("datasets", f"streaming {repository}")
    try:
        for row in datasets.load_dataset(repository, name=configuration, split="train", streaming=True):
            yield row[field]
    except StreamError:
        raise
    except Exception as error:  # the hub's client raises its own, the network's and the system's
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise StreamError(f"{repository} {configuration}: {reason}; check the network, or give --local FILE") from None


def parquet_documents(path, field):
    pyarrow = package("pyarrow", "reading parquet")
    parquet = package("pyarrow.parquet", "reading parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                names = " ".join(file.schema_arrow.names)
                raise StreamError(f"{path}: found the columns {names}, expected {field}; give --text_field")
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                yield from batch.column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise StreamError(f"{path}: {' '.join(str(error).split())}; expected a parquet file") from None


class Marks:
    """Follows the marks of streams that were saved to a file: each that begins must end, with its number of documents."""

    def __init__(self):
        self.open = False
        self.documents = 0

    def take(self, words):
        found = re.fullmatch(r"begins|ends after (\d+) documents", str(words))
        if not found:
            raise ValueError(f"the stream {words}")
        ends = found[1] is not None
        if ends != self.open:
            raise ValueError("a stream ends that never began" if ends else "a stream begins in a stream that was cut short")
        if ends and int(found[1]) != self.documents:
            raise ValueError(f"the stream has {self.documents} documents, and says that it has {found[1]}")
        self.open = not ends
        self.documents = 0


def jsonl_documents(path, field):
    number = 0
    marks = Marks()
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if isinstance(row, dict) and MARK in row:
                    marks.take(row[MARK])
                    continue
                marks.documents += 1
                yield row[field]
        if marks.open:
            raise ValueError("the stream has no end: it was cut short")
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise StreamError(
            f'{path}:{number}: {reason}; expected one JSON object a line with the text in "{field}" (--text_field)'
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise StreamError(f"{path}: {error}; expected a whole gzip file") from None


READERS = {".parquet": parquet_documents, ".jsonl": jsonl_documents, ".jsonl.gz": jsonl_documents}


def reader_of(path):
    for suffix, reader in READERS.items():
        if path.endswith(suffix):
            return reader
    raise StreamError(f"{path}: unknown kind of file, expected a name in {', '.join(READERS)}")


def check_readable(path):
    """Without opening it: a named pipe gives its bytes only once."""
    if os.path.isdir(path):
        raise StreamError(f"{path}: a folder, expected a file; name the files in it")
    os.stat(path)
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def local_documents(paths, field):
    """Checks that every file is there before the first is read."""
    readers = [reader_of(path) for path in paths]
    for read in False, True:
        for path, reader in zip(paths, readers):
            try:
                if read:
                    yield from reader(path, field)
                else:
                    check_readable(path)
            except OSError as error:
                raise StreamError(f"{path}: {error.strerror or error}; expected a file that can be read") from None


# ---------------------------------------------------------------- progress


class Progress:
    """In place on a terminal, a line every ten seconds elsewhere."""

    def __init__(self):
        self.started = self.printed = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.documents = self.bytes = self.skipped = 0

    def line(self):
        seconds = max(time.monotonic() - self.started, 1e-9)
        skipped = f"  {self.skipped:,} skipped" if self.skipped else ""
        return f"{self.documents:,} documents{skipped}  {self.bytes / 1e6:,.1f} MB  {self.bytes / seconds / 1e6:.1f} MB/s"

    def update(self):
        now = time.monotonic()
        if now - self.printed >= (0.2 if self.terminal else 10):
            self.printed = now
            sys.stderr.write(f"\r\033[K{self.line()}" if self.terminal else f"{self.line()}\n")
            sys.stderr.flush()

    def clear(self):
        if self.terminal:
            sys.stderr.write("\r\033[K")


# ---------------------------------------------------------------- the program


class Output:
    """Standard output, where every failure to write is a StreamError, also that of closing it."""

    def __init__(self, marks):
        self.marks = marks

    def attempt(self, action):
        try:
            action()
        except OSError as error:
            raise StreamError(f"standard output: {error.strerror}; free space or choose another place") from None

    def line(self, value):
        self.attempt(lambda: sys.stdout.write(json.dumps(value) + "\n"))

    def mark(self, words):
        if self.marks:
            self.line({MARK: words})

    def close(self):
        self.attempt(sys.stdout.close)

    def fail(self, error):
        """A line that dataset/prepare refuses, with or without marks, if it can still be written."""
        try:
            if not sys.stdout.isatty():
                self.line({MARK: f"failed: {error}"} if self.marks else {"error": str(error)})
            self.close()
        except (AttributeError, ValueError, StreamError):  # closed from the start, closed by now, full
            pass


def write_documents(documents, options, progress, output):
    """Writes the documents that are long enough until a limit is reached; the last one may pass --max_bytes."""
    for number, text in enumerate(documents, 1):
        if not isinstance(text, str):
            raise StreamError(f"document {number}: found {type(text).__name__}, expected text; give --text_field")
        size = len(text.encode("utf-8", "surrogatepass"))
        if size < options.min_bytes:
            progress.skipped += 1
        else:
            output.line({"text": text})
            progress.documents += 1
            progress.bytes += size
        progress.update()
        if progress.documents == options.max_documents or progress.bytes >= (options.max_bytes or float("inf")):
            break


def natural(word):
    number = int(word)
    if number < 0:
        raise ValueError
    return number


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(1, f"error: {message}; see --help\n")


def create_parser(description):
    parser = Parser(description=description, allow_abbrev=False)
    parser.add_argument("--local", nargs="+", metavar="FILE", help=f"read these instead: {', '.join(READERS)}")
    parser.add_argument("--text_field", default="text", help="the field or column that holds the text (text)")
    parser.add_argument("--max_documents", type=natural, metavar="N", help="stop after this many documents")
    parser.add_argument("--max_bytes", type=natural, metavar="N", help="stop once this much text is written")
    parser.add_argument("--min_bytes", type=natural, default=0, metavar="N", help="skip shorter documents (0)")
    parser.add_argument(
        "--no_marks", action="store_true", help="no first and last line that let dataset/prepare know a whole stream"
    )
    return parser


def stopped(number, frame):
    raise Stopped("ended by a signal; run it again")


def open_standard_streams():
    """A closed one is nowhere to write to, and its number is not for other files."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def stream(options, repository, configuration, progress, output):
    if sys.stdout is None:
        raise StreamError("standard output is closed; connect it to dataset/prepare or to a file")
    if options.local:
        documents = local_documents(options.local, options.text_field)
    else:
        documents = hub_documents(repository, configuration, options.text_field)
    output.mark("begins")
    if options.max_documents != 0:
        write_documents(documents, options, progress, output)
    output.mark(f"ends after {progress.documents} documents")
    output.close()


def run(options, repository, configuration):
    """Streams options.local, or the hub's set when there is none; the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader has enough: end quietly
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    open_standard_streams()
    progress = Progress()
    output = Output(marks=not options.no_marks)
    try:
        stream(options, repository, configuration, progress, output)
        progress.clear()
        sys.stderr.write(f"{progress.line()}\n")
        return 0
    except (StreamError, Stopped) as error:
        progress.clear()
        sys.stderr.write(f"error: {error}\n")
        output.fail(error)
        return 1
