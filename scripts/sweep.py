"""Trains every encoding at every size, several jobs at a time; started by sweep.sh. Run folders: runs.py."""

import csv
import fcntl
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from runs import Run, RunError, last_row, passkey_accuracy, printable, run_script

HELP = """usage: scripts/sweep.sh [--flag VALUE | --flag=VALUE]... [flags of train_gpt]
Trains encodings x sizes. Skips runs that are finished, goes on with those that were interrupted, and ends with a
table and LOG_DIR/sweep/summary.csv. Exit status 1 if a job failed.

  --encodings LIST  such as bam_ssmax,alibi (default: nope, sinusoidal, rotary, alibi, bam, each also with _ssmax)
  --sizes LIST      such as l6,l12 (default: l12)
  --jobs N          runs at a time (default: one, or one per GPU); each gets its own share of the cores
  --gpus LIST       such as 0,1,2,3: each job gets one of them in CUDA_VISIBLE_DEVICES
  --eval FLAGS      run evaluate after each run with these flags in quotes; "" for its defaults
  --log_dir DIR     where run folders are (default: logs); output of job SIZE ENCODING goes to
                    DIR/sweep/SIZE_ENCODING.log
  --cell N          only the N-th run, counted from 0: for array jobs, see slurm_sweep.sh
  --count           print how many runs there are, and nothing else
  --dry_run         print what would be done
  --summary         print the table and write the CSV, train nothing

Every other flag goes to train_gpt. A run counts as the one asked for if its args.json agrees with all of them;
those that only say how to run (--device, --checkpoint_every, ...) may differ. Ctrl-C lets the jobs save and stops;
the same command goes on.

  TRAIN     command that trains (default: ./train_gpt), such as TRAIN="mpirun -np 4 ./train_gpt"
  EVALUATE  command that evaluates (default: ./evaluate)

example: scripts/sweep.sh --encodings bam_ssmax,alibi --sizes l6,l8 --jobs 2 --dataset mytext \\
             --num_iterations 2000 --tokens_per_step 32768 --val_loss_every 100 --eval "--linspace_end 8192"
"""

STANDARD = ["nope", "sinusoidal", "rotary", "alibi", "bam"]  # those of --encodings by default
ENCODINGS = STANDARD + ["kerple_log", "kerple_power", "alibi_learned", "sandwich", "t5", "table", "fire", "fox", "cable"]
ENCODINGS += ["mix"]
SIZES = ["l2", "l4", "l6", "l8", "l12", "l15", "l18", "l24"]
# Flags that do not change what a run is.
HOW_TO_RUN = {"log_dir", "data_dir", "tokenizer", "device", "compile", "tensorcores", "recompute", "checkpoint_every",
              "keep_checkpoints", "sample_every", "sample_prompt", "sample_length", "temperature", "top_p",
              "debug_batches"}
OURS = {"checkpoint", "checkpoint_args", "reset_steps", "run_name", "position_encoding", "model_size"}
ALIASES = {"theta_beta_init": "thata_beta_init"}
MULTIPLES = (1, 4, 16)  # of the training length, in the table
POLL_SECONDS = 0.05
MOST = 10000  # jobs at a time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ----------------------------------------------------------------------------
# command line


class Settings:
    def __init__(self, argv):
        names = [e + s for e in ENCODINGS for s in ("", "_ssmax")]
        standard = [e + s for e in STANDARD for s in ("", "_ssmax")]
        values = {"encodings": ",".join(standard), "sizes": "l12", "jobs": "", "gpus": "", "eval": None,
                  "log_dir": "logs", "cell": None}
        switches = {"count": False, "dry_run": False, "summary": False}
        self.train_flags = []  # (name, words as given)
        while argv:
            word, argv = argv[0], argv[1:]
            if word in ("-h", "--help"):
                print(HELP, end="")
                sys.exit(0)
            if not word.startswith("--"):
                raise RunError(f"unexpected '{word}': flags begin with --; see --help")
            name, equals, value = word[2:].partition("=")
            if name in OURS:
                raise RunError(f"--{name} is set by the sweep itself; use --encodings and --sizes, see --help")
            if name in switches and not equals:
                switches[name] = True
            elif name in values:
                if not equals:
                    if not argv:
                        raise RunError(f"--{name}: the value is missing; see --help")
                    value, argv = argv[0], argv[1:]
                values[name] = value
            else:
                words = [word]
                while not equals and argv and not re.match("--|-h$", argv[0]):
                    words.append(argv[0])
                    argv = argv[1:]
                self.train_flags.append((name, words))
        self.count, self.dry_run, self.summary = switches["count"], switches["dry_run"], switches["summary"]
        self.log_dir, self.eval = values["log_dir"].rstrip("/") or "/", values["eval"]
        self.encodings = self.choose("encodings", values, names)
        self.sizes = self.choose("sizes", values, SIZES)
        self.gpus = [g for g in values["gpus"].split(",") if g]
        self.jobs = self.number("jobs", values["jobs"] or str(max(1, len(self.gpus))), 1)
        cells = len(self.sizes) * len(self.encodings)
        self.cell = None if values["cell"] is None else self.number("cell", values["cell"], 0, cells - 1)
        self.train = self.words("TRAIN", os.environ.get("TRAIN", "")) or [os.path.join(ROOT, "train_gpt")]
        self.evaluate = self.words("EVALUATE", os.environ.get("EVALUATE", "")) or [os.path.join(ROOT, "evaluate")]
        self.eval_flags = self.words("--eval", self.eval or "")

    @staticmethod
    def words(name, text):
        try:
            return shlex.split(text)
        except ValueError as e:
            raise RunError(f"{name}: found '{text}', which does not split into words ({e}); close its quotes") from None

    @staticmethod
    def choose(name, values, known):
        chosen = list(dict.fromkeys(values[name].split(",")))
        for word in chosen:
            if word not in known:
                raise RunError(f"--{name}: unknown '{word}', expected some of {','.join(known)}")
        return chosen

    @staticmethod
    def number(name, text, least, most=None):
        if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= (most if most is not None else MOST):
            raise RunError(f"--{name}: found '{text}', expected a number from {least}" +
                           ("" if most is None else f" to {most}"))
        return int(text)

    def check_programs(self):
        for command, built in ((self.train, "make"), (self.evaluate, "make, or leave out --eval")):
            if command is self.evaluate and self.eval is None:
                continue
            if not shutil.which(command[0]):
                raise RunError(f"cannot run {command[0]}; build it with {built}")

    def is_same_run(self, run):
        """Does a run's args.json agree with the flags given for train_gpt?"""
        given = {}  # of a flag given twice train_gpt takes the last
        for name, words in self.train_flags:
            value = words[0].partition("=")[2] if "=" in words[0] else " ".join(words[1:])
            name = ALIASES.get(name, name)
            if name.startswith("no-"):
                name, value = name[3:], "false"
            if name not in HOW_TO_RUN:
                given[name] = value
        # an unknown flag: train_gpt refuses it
        return all(name in run.args and same_value(run.args[name], value) for name, value in given.items())


def same_value(saved, given):
    if isinstance(saved, bool):
        return saved == (given.lower() in ("", "1", "true"))
    try:
        return float(saved) == float(given)
    except (TypeError, ValueError):
        return saved == given


# ----------------------------------------------------------------------------
# one cell of the grid


class Cell:
    """One encoding at one size. state: waiting, training, evaluating, finished, failed, stopped, or elsewhere."""

    def __init__(self, settings, size, encoding):
        self.settings, self.size, self.encoding = settings, size, encoding
        self.name = f"{size} {encoding}"
        self.folder = os.path.join(settings.log_dir, size, encoding)
        self.log = os.path.join(settings.log_dir, "sweep", f"{size}_{encoding}.log")
        self.state, self.error, self.run = "waiting", "", None
        self.process = self.lock = self.log_start = None

    def find(self):
        """Sets run to the finished run of these flags, else to the newest that can go on, else to None; returns
        (steps taken, steps in all) of it."""
        self.run, progress = None, (0, None)
        versions = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        versions = [v for v in versions if re.fullmatch(r"version_\d+", v)]
        for version in sorted(versions, key=lambda v: int(v[8:])):
            path = os.path.join(self.folder, version)
            if not os.path.exists(os.path.join(path, "args.json")):
                continue
            run = Run(path)
            at = run.checkpoint()
            if at and self.settings.is_same_run(run) and not (self.run and progress[0] >= progress[1]):
                self.run, progress = run, at
        return progress

    def is_finished(self, progress):
        return self.run is not None and progress[0] >= progress[1]

    def has_finished(self):
        """After training: a damaged run folder, or one of other flags, is as good as none."""
        try:
            return self.is_finished(self.find())
        except (RunError, OSError):
            return False

    def take(self):
        """Keeps other sweeps from this cell while this program or its job lives; False if one has it."""
        os.makedirs(self.folder, exist_ok=True)
        self.lock = open(os.path.join(self.folder, ".sweep.lock"), "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def train_command(self):
        s = self.settings
        if self.run:
            flags = [w for name, words in s.train_flags if name in HOW_TO_RUN for w in words]
            return s.train + ["--checkpoint", self.run.folder, "--checkpoint_args"] + flags
        flags = [w for _, words in s.train_flags for w in words]
        return s.train + ["--log_dir", s.log_dir, "--model_size", self.size, "--position_encoding",
                          self.encoding] + flags

    def evaluate_command(self):
        return self.settings.evaluate + ["--log_dir", self.run.folder] + self.settings.eval_flags

    def start(self, command, place):
        """Runs a command in a session of its own, so that Ctrl-C reaches it only through stop()."""
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        with open(self.log, "ab") as out:
            self.log_start = out.tell()
            out.write(os.fsencode(f"$ {shlex.join(command)}\n"))
            out.flush()
            try:
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                                start_new_session=True, pass_fds=[self.lock.fileno()],
                                                env={**os.environ, **place.environment}, preexec_fn=place.enter)
            except (OSError, subprocess.SubprocessError) as e:
                reason = e.strerror if isinstance(e, OSError) else e
                out.write(os.fsencode(f"error: cannot run {command[0]}: {reason}\n"))
                self.process = None

    def output(self):
        """What the last command printed so far."""
        try:
            with open(self.log, "rb") as f:
                f.seek(self.log_start)
                return f.read().decode(errors="replace")
        except OSError:
            return ""

    def note_run(self):
        """Learns the folder of a run that has just begun from what train_gpt prints."""
        found = re.search(r"^run +(\S.*)$", self.output(), re.M)
        if not self.run and found:
            try:
                self.run = Run(found[1])
            except RunError:
                pass

    def fail(self, status):
        lines = [line.strip() for line in self.output().splitlines()[1:] if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        reason = printable((errors or lines or ["no output"])[-1])
        if status == 0:
            reason += f" (it ended well, but {self.folder} has no finished run of these flags)"
        self.error = f"killed by signal {-status}: {reason}" if status < 0 else reason
        self.state = "failed"


class Place:
    """What one job at a time may use: a GPU, or a set of cores."""

    def __init__(self, index, settings):
        self.cores, self.environment, self.cell = None, {}, None
        if settings.gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = settings.gpus[index % len(settings.gpus)]
        elif settings.jobs > 1:
            cores = sorted(os.sched_getaffinity(0))
            share = max(1, len(cores) // settings.jobs)
            self.cores = [cores[(index * share + k) % len(cores)] for k in range(share)]
            wanted = os.environ.get("OMP_NUM_THREADS", "")
            self.environment["OMP_NUM_THREADS"] = str(min(share, int(wanted) if wanted.isdigit() else share))

    def enter(self):
        if self.cores:
            os.sched_setaffinity(0, self.cores)


# ----------------------------------------------------------------------------
# running


def duration(seconds):
    minutes = int(seconds / 60)
    if minutes < 1:
        return f"{int(seconds)}s"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


class Sweep:
    def __init__(self, settings):
        self.settings = settings
        self.cells = [Cell(settings, size, encoding) for size in settings.sizes for encoding in settings.encodings]
        if settings.cell is not None:
            self.cells = [self.cells[settings.cell]]
        self.places = [Place(i, settings) for i in range(settings.jobs)]
        self.signals, self.stopped_by, self.told = 0, 0, 0
        self.live = bool(sys.stdout) and sys.stdout.isatty()

    def say(self, text):
        print(("\r\033[K" if self.live else "") + text, flush=True)

    def on_signal(self, number, _frame):
        self.signals += 1
        self.stopped_by = number

    def begin(self, cell, place):
        """Starts what a waiting cell needs; a cell that needs nothing is done at once."""
        try:
            if not cell.take():
                cell.state = "elsewhere"
                self.say(f"{cell.name}: another sweep is at it, skipped")
                return
            progress = cell.find()
        except (RunError, OSError) as e:
            reason = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else str(e)
            cell.state, cell.error = "failed", f"error: {printable(reason)}"
            self.say(f"{cell.name}: {cell.error}")
            return
        place.cell = cell
        if cell.is_finished(progress):
            self.say(f"{cell.name}: finished before, {cell.run.folder}")
            self.after_training(place)
            return
        self.say(f"{cell.name}: " + (f"goes on at step {progress[0]} of {progress[1]}" if cell.run else "starts"))
        cell.state = "training"
        cell.start(cell.train_command(), place)

    def after_training(self, place):
        cell = place.cell
        if self.settings.eval is None:
            self.release(place, "finished")
        else:
            cell.state = "evaluating"
            cell.start(cell.evaluate_command(), place)

    def release(self, place, state):
        place.cell.state = state
        if place.cell.log_start is not None:
            place.cell.note_run()
        place.cell.process = None
        place.cell.lock.close()
        place.cell = None

    def check(self, place):
        """Moves a place's cell on when its command has ended."""
        cell = place.cell
        status = cell.process.poll() if cell.process else 127
        if status is None:
            return
        trained = cell.state == "training"
        if self.signals and status != 0:
            self.release(place, "stopped")
        elif status != 0 or (trained and not cell.has_finished()):
            cell.fail(status)
            self.say(f"{cell.name}: failed: {cell.error}\n  see {cell.log}")
            self.release(place, "failed")
        elif trained:
            self.say(f"{cell.name}: finished, {cell.run.folder}")
            if self.signals:
                self.release(place, "finished" if self.settings.eval is None else "stopped")
            else:
                self.after_training(place)
        else:
            self.say(f"{cell.name}: evaluated")
            self.release(place, "finished")

    def stop(self):
        """The first signal lets jobs save, a second one kills them."""
        running = [p.cell for p in self.places if p.cell and p.cell.process and p.cell.process.poll() is None]
        if self.told == 0 and running:
            self.say(f"stopping: {len(running)} job{'s' if len(running) > 1 else ''} will save and leave; "
                     "once more to kill")
        for cell in running:
            if self.told == 0:
                cell.process.terminate()
            else:
                os.killpg(cell.process.pid, signal.SIGKILL)
        self.told = self.signals

    def run(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        waiting, drawn = list(self.cells), 0.0
        while True:
            if self.signals > self.told:
                self.stop()
            for place in self.places:
                if place.cell:
                    self.check(place)
                while not place.cell and waiting and not self.signals:
                    self.begin(waiting.pop(0), place)
            if not any(p.cell for p in self.places) and (not waiting or self.signals):
                break
            if self.live and time.monotonic() > drawn + 1:
                drawn = time.monotonic()
                columns = shutil.get_terminal_size().columns
                print("\r\033[K" + self.status()[: columns - 1], end="", flush=True)
            time.sleep(POLL_SECONDS)
        if self.live:
            print("\r\033[K", end="")
        for cell in waiting:
            cell.state = "stopped"

    def status(self):
        """3/10 done, 1 failed, 5h20m left | l12 bam 120/20000 loss 3.211 | ..."""
        count = lambda state: sum(c.state == state for c in self.cells)
        parts = [f"{count('finished')}/{len(self.cells)} done"]
        if count("failed"):
            parts[0] += f", {count('failed')} failed"
        seconds, left, known = {}, {}, True
        for place in self.places:
            cell = place.cell
            if not cell:
                continue
            if cell.state == "evaluating":
                parts.append(f"{cell.name} evaluates")
                continue
            cell.note_run()
            row = last_row(cell.run.path("train.log")) if cell.run else None
            if row and math.isfinite(row["exec_time"]):
                parts.append(f"{cell.name} {int(row['step']) + 1}/{cell.run.iterations} loss {row['loss']:.3f}")
                seconds[cell.size] = row["exec_time"]
                left[cell] = max(0, cell.run.iterations - row["step"] - 1) * row["exec_time"]
            else:
                parts.append(f"{cell.name} begins")
                known = False
        iterations = max([c.run.iterations for c in left], default=0)
        for cell in self.cells:
            if cell.state == "waiting":
                known = known and cell.size in seconds
                left[cell] = iterations * seconds.get(cell.size, 0)
        if known and left:
            parts[0] += f", {duration(max(max(left.values()), sum(left.values()) / len(self.places)))} left"
        return " | ".join(parts)


# ----------------------------------------------------------------------------
# summary


COLUMNS = ("encoding", "size", "run", "state", "steps", "num_iterations", "train_loss", "val_loss", "best_val_loss",
           "tokens_per_second") + tuple(f"passkey_{m}x" for m in MULTIPLES)


def passkey_columns(run):
    passkey = run.passkey()
    if not passkey:
        return {}
    key = max(passkey, key=lambda k: ("equidistant" in k, len(passkey[k]["seq_lens"])))
    return {f"passkey_{m}x": passkey_accuracy(passkey[key], m * run.train_length) for m in MULTIPLES}


def summarise(cell):
    row = dict.fromkeys(COLUMNS)
    row.update(encoding=cell.encoding, size=cell.size, state=cell.state)
    if cell.run:
        run, train, val = cell.run, cell.run.train_log(), cell.run.eval_log()
        row.update(run=run.folder, num_iterations=run.iterations, steps=len(train) and int(train[-1]["step"]) + 1)
        if train:
            speeds = [r["tok/sec"] for r in train if math.isfinite(r["tok/sec"])]
            row.update(train_loss=train[-1]["loss"],
                       tokens_per_second=round(statistics.median(speeds)) if speeds else None)
        if val:
            row.update(val_loss=val[-1]["loss"], best_val_loss=min(r["loss"] for r in val))
        row.update(passkey_columns(run))
    return row


def rate(x):
    for unit in ("", "k", "M", "G"):
        if x < 999.5:
            break
        x /= 1000
    return f"{x:.3g}{unit}"


def table_line(row):
    loss = lambda name: "-" if row[name] is None else f"{row[name]:.3f}"
    steps = "-" if row["run"] is None else str(row["steps"])
    if row["state"] != "finished" and row["run"] is not None:
        steps += f"/{row['num_iterations']}"
    cells = [f"{row['encoding']:<16}", f"{row['size']:>4}", f"{steps:>13}"]
    cells += [f"{loss(name):>6}" for name in ("train_loss", "val_loss", "best_val_loss")]
    cells.append(f"{'-' if row['tokens_per_second'] is None else rate(row['tokens_per_second']):>6}")
    for m in MULTIPLES:
        value = row[f"passkey_{m}x"]
        cells.append(f"{'-' if value is None else format(100 * value, '.0f') + '%':>4}")
    return " ".join(cells)


def print_summary(sweep, with_csv):
    rows = []
    for cell in sweep.cells:
        try:
            rows.append(summarise(cell))
        except RunError as e:
            cell.run, cell.state, cell.error = None, "failed", f"error: {printable(str(e))}"
            rows.append(summarise(cell))
    print(f"\n{'':<35} {'loss':>6} {'loss':>6} {'best':>6} {'':>6} {'passkey at':>14}")
    print(f"{'encoding':<16} {'size':>4} {'steps':>13} {'train':>6} {'val':>6} {'val':>6} {'tok/s':>6} " +
          " ".join(f"{str(m) + 'x':>4}" for m in MULTIPLES))
    print("\n".join(map(table_line, rows)))
    if not with_csv:
        return
    path = os.path.join(sweep.settings.log_dir, "sweep", "summary.csv")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".tmp", "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + ".tmp", path)
    print(f"wrote {printable(path)}")


def finish(sweep, argv):
    """Table, failures, how to go on; returns the exit status."""
    print_summary(sweep, sweep.settings.cell is None)
    failed = [c for c in sweep.cells if c.state == "failed"]
    for cell in failed:
        print(f"failed: {cell.name}: {cell.error}\n  log: {cell.log}")
    if sweep.signals:
        print(f"stopped; go on with\n  {shlex.join([os.path.join(os.path.dirname(__file__), 'sweep.sh')] + argv)}")
        return 128 + sweep.stopped_by
    return 1 if failed else 0


def preview(sweep):
    for cell in sweep.cells:
        progress = cell.find()
        if cell.is_finished(progress):
            cell.state = "finished"
        if sweep.settings.dry_run:
            command = None if cell.state == "finished" else shlex.join(cell.train_command())
            print(f"{cell.name}: " + (command or f"finished, {cell.run.folder}"))
            if sweep.settings.eval is not None and cell.run:
                print(f"{cell.name}: {shlex.join(cell.evaluate_command())}")


def main(argv):
    settings = Settings(argv)
    sweep = Sweep(settings)
    if settings.count:
        print(len(sweep.cells))
        return 0
    if settings.dry_run or settings.summary:
        preview(sweep)
        if settings.summary:
            print_summary(sweep, settings.cell is None)
        return 0
    settings.check_programs()
    sweep.run()
    return finish(sweep, argv)


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
