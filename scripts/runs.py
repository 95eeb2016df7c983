"""Run folders (LOG_DIR/SIZE/ENCODING/version_NN) as plot.py and sweep.py read them.

Everything but args.json may be missing: a log without rows is an empty list, a run without results has none. What is
there is checked, for people edit and copy these files: errors that a user can mend are RunError, one line that names
the file. Only the standard library.
"""

import copy
import json
import math
import os
import re
import struct
import sys

LARGEST = 1e15  # no number in a run's files is larger
MAX_HEADER = 100_000_000  # bytes of a safetensors header, as in llmc/safetensors.h
MAX_PRIOR = 1 << 24  # bytes of a tensor of the prior
TRAIN_COLUMNS, EVAL_COLUMNS = ("step", "loss", "exec_time", "tok/sec"), ("step", "loss")


class RunError(Exception):
    pass


def printable(text):
    """Text on one line, whatever a path or a file holds: control characters and bytes that are no text as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def run_script(main):
    """Runs main() and exits with what it returns. Errors of the user's are one line; output suits any locale."""
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
        if sys.stdout:
            sys.stdout.flush()
        sys.exit(status)
    except RunError as e:
        message = str(e)
    except OSError as e:
        message = f"{e.filename or 'output'}: {e.strerror or e}"
    except MemoryError:
        message = "out of memory"
    if sys.stdout:  # what cannot be written is not tried again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(f"error: {printable(message)}")


def read_json(path):
    try:
        with open(path, "rb") as f:
            return json.loads(f.read().decode("utf-8-sig"))
    except OSError as e:
        raise RunError(f"cannot open {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise RunError(f"{path} is not valid JSON ({e}); repair the file or move it away") from None


def is_number(x, least=-LARGEST, most=LARGEST):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and least <= x <= most


def is_list(x, count=None, least=-LARGEST, most=LARGEST, gaps=False):
    """A list of so many numbers, with gaps: or of None."""
    return (isinstance(x, list) and count in (None, len(x)) and
            all(is_number(v, least, most) or (gaps and v is None) for v in x))


def log_row(header, line):
    """A line as {column: number}; None for one that a crash cut short or something else damaged."""
    values = line.split(",")
    try:
        row = {name: float(value) for name, value in zip(header, values)}
    except ValueError:
        return None
    whole = len(values) == len(header) and 0 <= row["step"] <= LARGEST
    return row if whole and row["step"] == int(row["step"]) else None


def read_log(path, columns):
    """Rows of a CSV log as dictionaries of numbers; damaged rows, and a last one without its end, are left out."""
    try:
        with open(path, "rb") as f:
            lines = f.read().decode("utf-8", "replace").split("\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise RunError(f"cannot open {path}: {e.strerror}") from None
    header = lines[0].strip().split(",") if lines else []
    if lines and not set(columns) <= set(header):
        raise RunError(f"{path}: found first line '{lines[0][:60]}', expected {','.join(columns)} in it; repair the "
                       "file or move it away")
    return [row for row in (log_row(header, line) for line in lines[1:]) if row]


def last_row(path, columns=TRAIN_COLUMNS):
    """The last whole row of a CSV log, read from the file's end; None without one."""
    try:
        with open(path, "rb") as f:
            header = f.readline(4096).decode("utf-8", "replace").strip().split(",")
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 4096))
            lines = f.read().decode("utf-8", "replace").split("\n")[:-1]
    except OSError:
        return None
    if not set(columns) <= set(header):
        return None
    return next((row for row in (log_row(header, line) for line in reversed(lines)) if row), None)


# ----------------------------------------------------------------------------
# safetensors: 8 bytes of header length, JSON header, data


def safetensors_header(path):
    """(header, offset of the data)."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(size - 8, MAX_HEADER):
                raise ValueError
            header = json.loads(f.read(length))
            if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
                raise ValueError
            return header, 8 + length
    except OSError as e:
        raise RunError(f"cannot open {path}: {e.strerror}") from None
    except (struct.error, ValueError, RecursionError):
        raise RunError(f"{path} is not a safetensors file; restore it from the run's checkpoints") from None


def safetensors_read(path, header, start, name):
    """A small tensor of F32 or BF16 as a flat list of finite numbers."""
    tensor = header.get(name)
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if not is_list(offsets, 2, 0) or not 0 <= offsets[1] - offsets[0] <= MAX_PRIOR:
        raise RunError(f"{path}: no usable tensor {name}; restore the file from the run's checkpoints")
    begin, end = map(int, offsets)
    with open(path, "rb") as f:
        f.seek(start + begin)
        data = f.read(end - begin)
    kind = tensor.get("dtype")
    if kind == "BF16":  # the upper half of an F32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    elif kind != "F32":
        raise RunError(f"{path}: {name} is {kind}, expected F32 or BF16")
    if len(data) % 4 or not data:
        raise RunError(f"{path}: {name} ends early; restore the file from the run's checkpoints")
    values = [value for (value,) in struct.iter_unpack("<f", data)]
    if not all(map(math.isfinite, values)):
        raise RunError(f"{path}: {name} is not finite; the run has diverged, plot an earlier checkpoint")
    return values


def alibi_slopes(heads):
    """Slopes by ALiBi's rule (Press et al. 2022, and their code for numbers of heads that are no power of two)."""
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    return first + [2.0 ** (-8 * (2 * k + 1) / (2 * n)) for k in range(heads - n)]


def bam_prior(theta, distance):
    """P(d) = -e^alpha r^beta, r = |d + mu| + 1e-5, mu = 2 sinh(m) (Bianchessi et al. 2025)."""
    alpha, beta, m = theta
    r = abs(distance + 2 * math.sinh(max(-300.0, min(m, 300.0)))) + 1e-5
    exponent = alpha + beta * math.log(r)
    return -math.exp(min(exponent, 69.0))  # where train_gpt clamps it, about 1e30


def kerple_power_prior(theta, distance):
    """P(d) = -r1 d^r2, r2 = 2 / (1 + e^-theta) (Chi et al. 2022), at d > 0."""
    return -math.exp(theta[0]) * distance ** (2 / (1 + math.exp(-theta[1])))


# Encodings whose learned bias is below zero: the tensors, each of one number a head, and P of them and a distance.
PRIORS = {
    "bam": (("theta_alpha", "theta_beta", "theta_mu"), bam_prior),
    "kerple_log": (("kerple_log_scale", "kerple_log_rate"),
                   lambda theta, d: -math.exp(theta[0]) * math.log1p(math.exp(theta[1]) * d)),
    "kerple_power": (("kerple_power_scale", "kerple_power_exponent"), kerple_power_prior),
    "alibi_learned": (("alibi_log_slope",), lambda theta, d: -math.exp(theta[0]) * d),
}


# ----------------------------------------------------------------------------
# results.json


def check_passkey(path, key, p):
    """Ends with an error unless p is a measurement: parallel lists by prompt length."""
    count = len(p["seq_lens"]) if isinstance(p, dict) and is_list(p.get("seq_lens"), least=0) else None
    good = count is not None and all(is_list(p.get(m, []), count, 0, 1, gaps=True) or not p.get(m)
                                     for m in ("accs", "greedy", "natural"))
    for name in ("depths", "hits"):
        rows = p.get(name) if good else None
        good = good and (not rows or (isinstance(rows, list) and len(rows) == count and
                                      all(is_list(row, least=0, most=1) and row for row in rows)))
    if not good:
        raise RunError(f"{path}: passkey {key} is not a measurement by prompt lengths; repair the file or move it away")


def check_perplexity(path, e):
    """Ends with an error unless e is a perplexity by position, as lists of one length."""
    good = isinstance(e, dict) and is_list(e.get("positions", []), least=1)
    count = len(e.get("positions", [])) if good else 0
    good = good and is_list(e.get("perplexity", []), count, 1e-300, sys.float_info.max, gaps=True)
    good = good and (not e.get("standard_error") or is_list(e["standard_error"], count, 0, sys.float_info.max, True))
    good = good and all(e.get(n) is None or is_number(e[n], 0) for n in ("window_size", "seq_len", "articles"))
    good = good and all(e.get(n) is None or isinstance(e[n], str) for n in ("dataset_dir", "bos"))
    if not good:
        raise RunError(f"{path}: an entry of perplexity is not one by position; repair the file or move it away")


def dataset_name(entry):
    """Without the data/ that newer entries and the published program begin with."""
    return (entry.get("dataset_dir") or "?").removeprefix("data/")


def is_joined(entry):
    """Whether documents were joined; the published program, which does not say, takes articles of wikipedia alone."""
    return "joined" in entry["bos"] if entry.get("bos") else dataset_name(entry) != "wikipedia"


# ----------------------------------------------------------------------------
# one run


class Run:
    def __init__(self, folder):
        self.folder = folder.rstrip("/") or folder
        self.name = printable(self.folder)
        path = self.path("args.json")
        sections = read_json(path)
        parts = [sections.get(s) if isinstance(sections, dict) else None for s in ("args", "model_args")]
        for section, values in zip(("args", "model_args"), parts):
            if not isinstance(values, dict):
                raise RunError(f"{path} has no object '{section}'; give the run folder of a train_gpt run")
        self.args, self.model_args = parts
        self.encoding, self.size = self.word("position_encoding"), self.word("model_size")
        self.kind = self.encoding.removesuffix("_ssmax")
        self.train_length = self.whole(self.args, "sequence_length", 1, 1 << 30)
        self.iterations = self.whole(self.args, "num_iterations", 0, 10**12)
        self.heads = self.whole(self.model_args, "n_heads", 1, 1 << 16)
        self.version = os.path.basename(os.path.abspath(self.folder))
        self.positions = None  # those of the model as it was trained

    def word(self, name):
        value = self.args.get(name)
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 100:
            raise RunError(f"{self.path('args.json')} has no usable '{name}'; give the run folder of a train_gpt run")
        return value

    def whole(self, section, name, least, most):
        value = section.get(name)
        if not is_number(value, least, most) or value != int(value):
            raise RunError(f"{self.path('args.json')} has no usable '{name}', expected a number from {least} to {most}")
        return int(value)

    def path(self, name):
        return os.path.join(self.folder, name)

    def train_log(self):
        return read_log(self.path("train.log"), TRAIN_COLUMNS)

    def eval_log(self):
        return read_log(self.path("eval.log"), EVAL_COLUMNS)

    def section(self, name, kind):
        """A section of results.json, empty without it."""
        path = self.path("results.json")
        results = read_json(path) if os.path.exists(path) else {}
        if not isinstance(results, dict):
            raise RunError(f"{path}: expected an object of results; repair the file or move it away")
        found = kind() if results.get(name) is None else results[name]
        if not isinstance(found, kind):
            raise RunError(f"{path}: \"{name}\" is of another kind; repair the file or move it away")
        return found

    def with_changed_positions(self):
        """This run as evaluations have measured it that changed its positions: a Run for each way they did."""
        entries = self.section("passkey_others", list) + self.section("perplexity_others", list)
        of = [e["of"] for e in entries if isinstance(e, dict) and isinstance(e.get("of"), dict)]
        views = []
        for positions in dict.fromkeys(o["positions"] for o in of if isinstance(o.get("positions"), str)):
            views.append(copy.copy(self))
            views[-1].positions = positions
        return views

    def changed(self, section):
        """What a section of others has of these changed positions, the newest weights last."""
        found = [e for e in self.section(section, list) if isinstance(e, dict) and isinstance(e.get("of"), dict)]
        step = lambda e: int(e["of"].get("step")) if str(e["of"].get("step")).isdecimal() else 0
        return sorted((e for e in found if e["of"].get("positions") == self.positions), key=step)

    def passkey(self):
        """{key: measurement} of the newest weights."""
        if self.positions:
            found = {e["key"]: e for e in self.changed("passkey_others") if isinstance(e.get("key"), str)}
        else:
            found = self.section("passkey", dict)
        for key, p in found.items():
            check_passkey(self.path("results.json"), key, p)
        return found

    def other_passkey(self):
        """The same of other weights and settings, which the key tells; what is no measurement is left out."""
        found = {}
        for p in self.section("passkey_others", list):
            of = p.get("of") if isinstance(p, dict) else None
            if not isinstance(of, dict) or not isinstance(p.get("key"), str):
                continue
            key = " ".join([p["key"]] + [f"{n} {of[n]}" for n in ("step", "seed", "keys", "dtype", "positions") if n in of])
            try:
                check_passkey(self.path("results.json"), key, p)
            except RunError:
                continue
            found[key] = p
        return found

    def perplexity(self):
        found = self.changed("perplexity_others")[-1:] if self.positions else self.section("perplexity", list)
        for entry in found:
            check_perplexity(self.path("results.json"), entry)
        return found

    def checkpoints(self):
        """Folders that may hold a checkpoint, the newest first."""
        saved = self.path("checkpoints")
        names = os.listdir(saved) if os.path.isdir(saved) else []
        steps = sorted((n for n in names if re.fullmatch(r"step_[0-9]{9,}", n)), key=lambda n: -int(n[5:]))
        return [os.path.join(saved, n) for n in steps] + [self.folder]

    def checkpoint(self):
        """(steps taken, step at which the run ends) of the newest whole checkpoint; None before the first one."""
        fault = None
        for folder in self.checkpoints():
            if not all(os.path.isfile(os.path.join(folder, f"{n}.safetensors")) for n in ("model", "optimizer")):
                continue
            path = os.path.join(folder, "optimizer.safetensors")
            try:
                state = safetensors_header(path)[0].get("__metadata__", {})
                return int(state["step"]), int(state["schedule_start"]) + self.iterations
            except (KeyError, ValueError, TypeError):
                fault = fault or RunError(f"{path} holds no state of a run; move the run folder away")
            except RunError as e:
                fault = fault or e
        if fault:
            raise fault
        return None

    def priors(self):
        """[(layer's name, [theta of each head])] of a model that learned its prior; [] for any other."""
        path = self.path("model.safetensors")
        if not os.path.exists(path) or self.kind not in PRIORS:
            return []
        tensors = PRIORS[self.kind][0]
        header, start = safetensors_header(path)
        names = [n for n in header if n.endswith("prior." + tensors[0])]
        layer = lambda name: int((re.search(r"layers\.([0-9]{1,6})\.", name) or [0, -1])[1])
        priors = []
        for name in sorted(names, key=layer):
            theta = [safetensors_read(path, header, start, name.replace(tensors[0], tensor)) for tensor in tensors]
            if len(set(map(len, theta))) != 1:
                raise RunError(f"{path}: the parameters of {name} are for other numbers of heads; restore the file")
            label = "all layers" if layer(name) < 0 else f"layer {layer(name) + 1}"
            priors.append((label, list(zip(*theta))))
        return priors


def passkey_accuracy(passkey, length, measure="accs"):
    """Accuracy at the measured length nearest to `length`, at most a factor of sqrt(2) away; None without one."""
    pairs = zip(passkey["seq_lens"], passkey.get(measure) or [])
    near = [(abs(math.log2(n / length)), a) for n, a in pairs if n > 0 and a is not None]
    near = [pair for pair in near if pair[0] <= 0.5]
    return min(near)[1] if near else None
