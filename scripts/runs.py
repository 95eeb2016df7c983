"""Run folders (LOG_DIR/SIZE/ENCODING/version_NN) as plot.py and sweep.py read them.

Everything but args.json may be missing: a log without rows is an empty list, a run without results has none.
Only the standard library. Errors that a user can mend are RunError: one line that names the file.
"""

import csv
import json
import math
import os
import re
import struct


class RunError(Exception):
    pass


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except OSError as e:
        raise RunError(f"cannot open {path}: {e.strerror}") from None
    except ValueError as e:
        raise RunError(f"{path} is not valid JSON ({e}); repair the file or move it away") from None


def read_log(path):
    """Rows of a CSV log as dictionaries of numbers; rows that a crash cut short are left out."""
    rows = []
    try:
        with open(path, encoding="utf-8", newline="") as f:
            for row in csv.DictReader(f):
                try:
                    rows.append({name: float(value) for name, value in row.items()})
                except (TypeError, ValueError):
                    continue
    except FileNotFoundError:
        pass
    return rows


def last_row(path):
    """The last whole row of a CSV log, read from the file's end; None without one."""
    try:
        with open(path, "rb") as f:
            header = f.readline().decode().strip().split(",")
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 4096))
            lines = f.read().decode(errors="replace").split("\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        values = line.split(",")
        if len(values) == len(header) and values[0].isdigit():
            return {name: float(value) for name, value in zip(header, values)}
    return None


# ----------------------------------------------------------------------------
# safetensors: 8 bytes of header length, JSON header, data


def safetensors_header(path):
    """(header, offset of the data)."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            (length,) = struct.unpack("<Q", f.read(8))
            if length > size - 8:
                raise ValueError
            return json.loads(f.read(length)), 8 + length
    except OSError as e:
        raise RunError(f"cannot open {path}: {e.strerror}") from None
    except (struct.error, ValueError):
        raise RunError(f"{path} is not a safetensors file; restore it from the run's checkpoints") from None


def safetensors_read(path, header, start, name):
    """A tensor of F32 or BF16 as a flat list of numbers."""
    begin, end = header[name]["data_offsets"]
    with open(path, "rb") as f:
        f.seek(start + begin)
        data = f.read(end - begin)
    kind = header[name]["dtype"]
    if kind == "BF16":  # the upper half of an F32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    elif kind != "F32":
        raise RunError(f"{path}: {name} is {kind}, expected F32 or BF16")
    return [value for (value,) in struct.iter_unpack("<f", data)]


def alibi_slopes(heads):
    """Slopes by ALiBi's rule (Press et al. 2022, and their code for numbers of heads that are no power of two)."""
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    return first + [2.0 ** (-8 * (2 * k + 1) / (2 * n)) for k in range(heads - n)]


def bam_prior(theta, distance):
    """P(d) = -e^alpha r^beta, r = |d + mu| + 1e-5, mu = 2 sinh(m) (Bianchessi et al. 2025)."""
    alpha, beta, m = theta
    r = abs(distance + 2 * math.sinh(m)) + 1e-5
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
# one run


class Run:
    def __init__(self, folder):
        self.folder = folder.rstrip("/") or folder
        json_args = read_json(os.path.join(folder, "args.json"))
        try:
            self.args, self.model_args = json_args["args"], json_args["model_args"]
            self.encoding, self.size = self.args["position_encoding"], self.args["model_size"]
            self.kind = self.encoding.removesuffix("_ssmax")
            self.train_length = int(self.args["sequence_length"])
            self.iterations = int(self.args["num_iterations"])
            self.heads = int(self.model_args["n_heads"])
        except (KeyError, TypeError, ValueError) as e:
            raise RunError(f"{folder}/args.json has no usable {e}; give the run folder of a train_gpt run") from None
        self.version = os.path.basename(os.path.abspath(self.folder))
        self.tokens_per_step = json_args.get("dataset_args", {}).get("tokens_per_batch")

    def path(self, name):
        return os.path.join(self.folder, name)

    def train_log(self):
        return read_log(self.path("train.log"))

    def eval_log(self):
        return read_log(self.path("eval.log"))

    def results(self):
        path = self.path("results.json")
        return read_json(path) if os.path.exists(path) else {}

    def checkpoint(self):
        """(steps taken, step at which the run ends) of the newest checkpoint; None before the first one."""
        newest = self.folder
        saved = os.path.join(self.folder, "checkpoints")
        if os.path.isdir(saved):
            steps = sorted(name for name in os.listdir(saved) if re.fullmatch(r"step_\d{9,}", name))
            newest = os.path.join(saved, max(steps, key=lambda s: int(s[5:]))) if steps else newest
        path = os.path.join(newest, "optimizer.safetensors")
        if not os.path.exists(path):
            return None
        state = safetensors_header(path)[0].get("__metadata__", {})
        try:
            return int(state["step"]), int(state["schedule_start"]) + self.iterations
        except (KeyError, ValueError):
            raise RunError(f"{path} holds no state of a run; move the run folder away") from None

    def priors(self):
        """[(layer's name, [theta of each head])] of a model that learned its prior; [] for any other."""
        path = self.path("model.safetensors")
        if not os.path.exists(path) or self.kind not in PRIORS:
            return []
        tensors = PRIORS[self.kind][0]
        header, start = safetensors_header(path)
        names = [n for n in header if n.endswith("prior." + tensors[0])]
        layer = lambda name: int((re.search(r"layers\.(\d+)\.", name) or [0, -1])[1])
        priors = []
        for name in sorted(names, key=layer):
            theta = [safetensors_read(path, header, start, name.replace(tensors[0], tensor)) for tensor in tensors]
            label = "all layers" if layer(name) < 0 else f"layer {layer(name) + 1}"
            priors.append((label, list(zip(*theta))))
        return priors


def passkey_accuracy(passkey, length, measure="accs"):
    """Accuracy at the measured length nearest to `length`, at most a factor of sqrt(2) away; None without one."""
    off = [(abs(math.log2(n / length)), a) for n, a in zip(passkey["seq_lens"], passkey.get(measure, [])) if n > 0]
    near = [pair for pair in off if pair[0] <= 0.5]
    return min(near)[1] if near else None
