#!/usr/bin/env python3
"""Kill storm: tiny trainings that save after every step are killed at random microseconds, resumed each time, and must
end with the very bytes of a training that nothing disturbed: weights, moments, rows of train.log and eval.log.

Rounds take turns: kills alone; kills while evaluate reads the run; the same on a disk (tmpfs) that is full at a random
place; a limit on the size of files. Every round mixes in SIGTERM, SIGHUP and SIGINT, some of them with a SIGKILL behind. Within
a round no checkpoint that the program has announced may be lost, no error may leave anything half-written, and each
result of evaluate must be the one that the weights of its step give.

usage: test/torture.py [--kills 300] [--seed N] [--steps 120] [--rounds kills,evaluate,disk,limit]
The last line has the figures; the exit status is 0 when nothing was lost. TRAIN_GPT and EVALUATE name other programs.
"""
import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

TRAIN = os.environ.get("TRAIN_GPT", "./train_gpt")
EVALUATE = os.environ.get("EVALUATE", "./evaluate")
ROUNDS = ["kills", "evaluate", "disk", "limit"]
ENCODINGS = ["bam_ssmax", "nope", "rotary", "alibi_ssmax"]
MODEL = """--tokenizer bytes --model_size l2 --dim 32 --n_layers 1 --n_heads 2 --batch_size 2 --sequence_length 32
    --tokens_per_step 128 --learning_rate 1e-2 --warmup_iters 5 --learning_rate_decay_frac 0.1 --val_loss_every 7
    --val_tokens 256 --val_tokens_padding 0 --sample_every 5 --sample_length 8 --checkpoint_every 1""".split()
PERPLEXITY = """--tokenizer bytes --passkey_sample_size 0 --perplexity --perplexity_dataset storm --perplexity_join
    --perplexity_seq_len 64 --perplexity_ntokens 640 --perplexity_window_size 64""".split()
# columns that do not depend on the clock
COLUMNS = {"train.log": [0, 2, 3, 4], "eval.log": [0, 2]}
FILES = ["model.safetensors", "optimizer.safetensors"]
CHECKPOINT_BYTES, LARGEST_FILE = 326_000, 217_000  # of one of these models, a little less than they are
POLITE = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
LEFT_OUT = 77  # exit status where nothing can be done here
MAX_STUCK = 200  # lives one after another without a new checkpoint


class Figures:
    """What has been counted; faults are printed when they are found."""

    def __init__(self):
        self.kills = self.inside_save = self.at_start = self.polite = self.errors = 0
        self.resumes = self.starts = self.rounds = self.losses = self.differing = self.other_faults = 0
        self.evaluations = self.labels = 0

    def fault(self, kind, what):
        setattr(self, kind, getattr(self, kind) + 1)
        print(f"FAULT: {what}", flush=True)

    @property
    def faults(self):
        return self.losses + self.other_faults


def read(path):
    with open(path, "rb") as f:
        return f.read()


def differing_bytes(a, b):
    return abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b)) if a != b else 0


def columns(path):
    rows = read(path).decode().splitlines()
    return "\n".join(",".join(row.split(",")[c] for c in COLUMNS[os.path.basename(path)]) for row in rows).encode()


def checkpoints(run):
    """Steps of the checkpoints in a run, ascending; none where there is no run."""
    folder = os.path.join(run, "checkpoints") if run else ""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(n[5:]) for n in names if re.fullmatch(r"step_\d+", n))


def unfinished(run):
    """What a save has left half-written in a run."""
    names = [n for n in os.listdir(run) if n.endswith(".safetensors.tmp")] if run else []
    folder = os.path.join(run, "checkpoints") if run else ""
    return set(names + ([n for n in os.listdir(folder) if n.endswith((".tmp", ".new"))] if os.path.isdir(folder) else []))


def traces_of_save(run):
    """What shows that a program ended in the middle of a save: an unfinished folder or file, a link that does not yet
    point to the newest checkpoint."""
    traces, steps = unfinished(run), checkpoints(run)
    for name in FILES if steps else []:
        link, newest = os.path.join(run, name), os.path.join(run, "checkpoints", f"step_{steps[-1]:09d}", name)
        if not os.path.exists(link) or not os.path.samefile(link, newest):
            traces.add(f"{name} is not of {steps[-1]}")
    return traces


class Life:
    """One process: from its start to its end by itself, by an error or by signals."""

    def __init__(self, command, errors_to, file_limit=None):
        def before_exec():
            for number in POLITE:  # ignored, perhaps, by whoever started this script in the background
                signal.signal(number, signal.SIG_DFL)
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        self.errors_path = errors_to
        self.out = b""
        with open(errors_to, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                preexec_fn=before_exec)

    def read_until(self, mark=None):
        while mark is None or mark not in self.out:
            block = os.read(self.process.stdout.fileno(), 65536)
            if not block:
                return
            self.out += block

    def strike(self, mark, signals):
        """Waits for the mark in the output (None: from the start on), then sends (seconds, signal) after signal."""
        if mark:
            self.read_until(mark)
        for seconds, number in signals:
            time.sleep(seconds)
            self.process.send_signal(number)

    def end(self):
        self.read_until()
        self.process.stdout.close()
        self.status = self.process.wait()
        self.out = self.out.decode(errors="replace")
        self.err = read(self.errors_path).decode(errors="replace")

    def started(self):
        return "\nrun      " in self.out

    def one_error(self):
        lines = [line for line in self.err.splitlines() if not line.startswith("warning: ")]
        return self.status == 1 and len(lines) == 1 and lines[0].startswith("error: ")


class Evaluator(threading.Thread):
    """Runs evaluate on the run again and again, kills every third, and checks that results.json is always whole and
    that each result belongs to the weights of the step that it names."""

    def __init__(self, storm, reference, disk_is_full):
        super().__init__(daemon=True)
        self.storm, self.reference, self.disk_is_full = storm, reference, disk_is_full
        self.random = random.Random(storm.random.random())
        self.means = {}
        self.done = threading.Event()

    def expected(self, step):
        """The perplexity that the undisturbed run's weights of this step give."""
        if step not in self.means:
            folder = tempfile.mkdtemp(dir=self.storm.work)
            shutil.copy(os.path.join(self.reference, "args.json"), folder)
            shutil.copy(os.path.join(self.reference, "checkpoints", f"step_{step:09d}", FILES[0]), folder)
            subprocess.run(self.command(folder), check=True, stdout=subprocess.DEVNULL)
            self.means[step] = self.entries(folder)[0]["mean"]
            shutil.rmtree(folder)
        return self.means[step]

    def command(self, run):
        return [EVALUATE, "--log_dir", run, "--data_dir", self.storm.data] + PERPLEXITY

    @staticmethod
    def entries(run):
        path = os.path.join(run, "results.json")
        return json.loads(read(path))["perplexity"] if os.path.exists(path) else []

    def check(self, run):
        figures = self.storm.figures
        try:
            entries = self.entries(run)
            for entry in entries:
                step = int(entry["of"]["step"])
                figures.labels += 1
                if entry["mean"] != self.expected(step):
                    figures.fault("other_faults", f"{run}: {entry['mean']} is not the perplexity of step {step}, "
                                                  f"which is {self.expected(step)}")
        except (ValueError, KeyError, OSError) as problem:
            figures.fault("other_faults", f"{run}/results.json: {problem}")

    def run(self):
        while not self.done.is_set():
            run = self.storm.run
            if run is None or not os.path.exists(os.path.join(run, FILES[0])):
                self.done.wait(0.01)
                continue
            life = Life(self.command(run), os.path.join(self.storm.work, "evaluate.err"))
            if self.random.random() < 1 / 3:
                life.strike(None, [(self.random.uniform(0, 0.03), signal.SIGKILL)])
            life.end()
            self.storm.figures.evaluations += 1
            if life.status not in (0, -signal.SIGKILL) and not (self.disk_is_full and life.one_error()):
                self.storm.figures.fault("other_faults", f"evaluate ended with {life.status}: {life.err}")
            self.check(run)
            self.done.wait(0.05)


class Storm:
    def __init__(self, options, kinds, figures, work):
        self.random = random.Random(options.seed)
        self.steps = options.steps
        self.quota = -(-options.kills // len(kinds))  # kills in one round, so that each kind gets its share
        self.figures, self.work = figures, work
        self.data = os.path.join(work, "data")
        self.run = None
        os.makedirs(self.data)
        subprocess.run(["dataset/synthetic", "--documents", "20", "--tokenizer", "bytes", "--out",
                        os.path.join(self.data, "storm")], check=True, stdout=subprocess.DEVNULL)

    def start_command(self, logs, encoding, keep):
        return [TRAIN, "--dataset", "storm", "--data_dir", self.data, "--log_dir", logs, "--position_encoding",
                encoding, "--num_iterations", str(self.steps), "--keep_checkpoints", str(keep)] + MODEL

    def folder(self, name, size=None):
        """A new folder for logs; a tmpfs of so many bytes where size is given."""
        path = tempfile.mkdtemp(prefix=f"{name}_", dir=self.work)
        if size:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
        return path

    def undisturbed(self, encoding, size):
        """Trains in peace, keeping every checkpoint, and measures how long it takes to start and to make a step."""
        logs = self.folder("whole", size)
        begin = time.monotonic()
        life = Life(self.start_command(logs, encoding, self.steps + 1), os.path.join(self.work, "train.err"))
        life.read_until(b"\nrun      ")
        self.start_seconds = time.monotonic() - begin
        life.end()
        if life.status != 0:
            sys.exit(f"error: {' '.join(life.process.args)}: status {life.status}: {life.err}")
        self.step_seconds = (time.monotonic() - begin - self.start_seconds) / self.steps
        return os.path.join(logs, "l2", encoding, "version_00")

    def newest_run(self, logs, encoding):
        """The run that has a checkpoint to go on from; None: start anew."""
        folder = os.path.join(logs, "l2", encoding)
        for name in sorted(os.listdir(folder) if os.path.isdir(folder) else []):
            if checkpoints(os.path.join(folder, name)):
                return os.path.join(folder, name)
        return None

    def choose_signals(self, starved):
        """When and how the next process ends: (mark to wait for, signals). One whose disk or file is too small should
        often come to notice that."""
        r = self.random
        if self.figures.kills >= self.enough or starved and r.random() < 0.6:
            return None, []
        number = r.choices([signal.SIGKILL] + POLITE, [80, 10, 6, 4])[0]
        at_start = r.random() < 0.2
        seconds = r.uniform(0, self.start_seconds if at_start else 16 * self.step_seconds)
        signals = [(seconds, number)]
        if number != signal.SIGKILL and r.random() < 0.5:
            signals.append((r.uniform(0, self.step_seconds), signal.SIGKILL))
        return None if at_start else b"\nrun      ", signals

    def judge(self, life, signals, kind, before):
        """Counts the end of a process and finds fault with it; before are the traces of those before it. Whether the
        round can go on."""
        f = self.figures
        traces = traces_of_save(self.run) - before
        if life.status == -signal.SIGKILL:
            f.kills += 1
            f.at_start += not life.started()
            f.inside_save += len(traces) > 0
        elif life.status in [-n for _, n in signals] + [128 + n for _, n in signals]:
            f.polite += 1
        elif life.status == 1 and kind in ("disk", "limit") and life.one_error():
            f.errors += 1
            left = traces & unfinished(self.run)
            if left:
                f.fault("other_faults", f"{self.run}: an error left {left}")
        elif life.status != 0:
            f.fault("other_faults", f"status {life.status} of {' '.join(life.process.args)}: {life.err}")
            return False
        return True

    def fill_disk(self, disk):
        """Leaves less free space than a checkpoint takes, two times out of three; otherwise all, so that the run gets on.
        Whether space was taken."""
        ballast = os.path.join(disk, "ballast")
        if os.path.exists(ballast):
            os.unlink(ballast)
        space = os.statvfs(disk)
        wanted = self.random.randrange(CHECKPOINT_BYTES)
        size = space.f_bavail * space.f_frsize - wanted
        if size <= 0 or self.random.random() > 2 / 3:
            return False
        with open(ballast, "wb") as f:
            f.write(bytes(size))
        return True

    def round(self, kind):
        """One run, killed until it is finished; then compared."""
        f, r = self.figures, self.random
        encoding, keep = ENCODINGS[f.rounds % len(ENCODINGS)], r.choice([1, 1, 2, 3])
        whole_size, size = None, None
        if kind == "disk":  # both, for steps are faster in memory
            whole_size, size = 2 * CHECKPOINT_BYTES * self.steps, int(CHECKPOINT_BYTES * (keep + 1.2)) + 200_000
        whole, logs = self.undisturbed(encoding, whole_size), self.folder(kind, size)
        self.run = None
        self.enough = f.kills + self.quota
        evaluator = Evaluator(self, whole, kind == "disk") if kind in ("evaluate", "disk") else None
        if evaluator:
            evaluator.start()
        before, begin = f.kills, time.monotonic()
        finished = self.lives(kind, logs, encoding, keep)
        if evaluator:
            evaluator.done.set()
            evaluator.join()
        if finished:
            self.compare(whole, self.run)
        print(f"{kind:8} {encoding:11} {self.steps} steps, {f.kills - before:3} kills, "
              f"{time.monotonic() - begin:.1f} s", flush=True)
        f.rounds += 1
        for folder in [logs, whole[:whole.index("/l2/")]]:
            if kind == "disk" and f.faults > 0:
                shutil.copytree(folder, folder + "_kept")
            if kind == "disk":
                subprocess.run(["umount", folder], check=True)
            if f.faults == 0:
                shutil.rmtree(folder)

    def lives(self, kind, logs, encoding, keep):
        """Processes one after another until one ends by itself; False when the round cannot go on."""
        f, r = self.figures, self.random
        best, stuck = 0, 0  # the newest step that is known to be saved; lives since it was
        while stuck < MAX_STUCK:
            self.run = self.newest_run(logs, encoding)
            full = kind == "disk" and self.fill_disk(logs)
            limit = r.randrange(LARGEST_FILE) if kind == "limit" and r.random() < 0.5 else None
            resumed = self.run is not None
            command = ([TRAIN, "--checkpoint", self.run, "--checkpoint_args"] if resumed
                       else self.start_command(logs, encoding, keep))
            before = traces_of_save(self.run)
            mark, signals = self.choose_signals(full or limit is not None)
            life = Life(command, os.path.join(self.work, "train.err"), limit)
            life.strike(mark, signals)
            life.end()
            f.resumes, f.starts = f.resumes + resumed, f.starts + (not resumed)
            self.run = self.newest_run(logs, encoding)
            if not self.judge(life, signals, kind, before):
                return False
            found = re.search(r"^resumed .* at step (\d+)$", life.out, re.M)
            if resumed and life.started() and not found:
                f.fault("other_faults", f"{self.run}: the resumed run does not say at which step: {life.out}")
            if "newest whole checkpoint" in life.err:  # a kill never damages one, so none is ever passed over
                f.fault("losses", f"{self.run}: {life.err}")
            if found and int(found[1]) < best:
                f.fault("losses", f"{self.run}: resumed at step {found[1]}, but step {best} had been saved")
            saved = [int(s) for s in re.findall(r"^saved step (\d+) to", life.out, re.M)]
            now = max(saved + [int(found[1])] if found else saved, default=0)
            best, stuck = max(best, now), 0 if now > best else stuck + 1
            if best > 0 and (self.run is None or max(checkpoints(self.run), default=0) < best):
                f.fault("losses", f"{self.run or logs}: step {best} was saved, but is not there")
                return False
            if life.status == 0:
                return True
        f.fault("other_faults", f"{self.run}: {MAX_STUCK} processes one after another got no further than step {best}")
        return False

    def compare(self, whole, run):
        for name in FILES + list(COLUMNS):
            paths = [os.path.join(folder, name) for folder in (whole, run)]
            a, b = [columns(p) if name in COLUMNS else read(p) for p in paths]
            different = differing_bytes(a, b)
            if different:
                self.figures.fault("other_faults", f"{different} bytes of {paths[1]} differ from {paths[0]}")
                self.figures.differing += different


def in_namespace(arguments):
    """Becomes this script again where it may mount file systems that end with it; returns where that is not allowed."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        probe = command + ["mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
        if shutil.which("unshare") and subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            os.execvp(command[0], command + [sys.executable, __file__, "--may_mount"] + arguments)


def report(f, options, seconds):
    print(f"torture: {f.kills} kills ({f.inside_save} inside a save, {f.at_start} while starting), "
          f"{f.polite} stopped by SIGTERM, SIGHUP or SIGINT, {f.errors} by a full disk or a file limit; "
          f"{f.resumes} resumes, {f.starts} starts, {f.rounds} runs compared; {f.evaluations} evaluations beside, "
          f"{f.labels} labels checked; {f.losses} losses, {f.differing} differing bytes, {f.other_faults} other "
          f"faults; {seconds:.0f} s, seed {options.seed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="how many processes are killed in all, at least")
    parser.add_argument("--seed", type=int, default=None, help="of the random choices; the default is drawn, printed")
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--rounds", default=",".join(ROUNDS), help="kinds of rounds, which take turns")
    parser.add_argument("--may_mount", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.rounds.split(",")
    if not set(kinds) <= set(ROUNDS):
        parser.error(f"--rounds {options.rounds}: expected some of {','.join(ROUNDS)}")
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    if "disk" in kinds and not options.may_mount:
        in_namespace(sys.argv[1:])
        print("the full disk is LEFT OUT: no right to mount a tmpfs (run as root)", flush=True)
        kinds.remove("disk")
    if not kinds:
        sys.exit(LEFT_OUT)
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
    print(f"seed {options.seed}", flush=True)
    figures, begin = Figures(), time.monotonic()
    work = tempfile.mkdtemp(prefix="bamc_torture_")
    storm = Storm(options, kinds, figures, work)
    turn = 0
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background SIGINT is ignored otherwise
        signal.signal(number, signal.default_int_handler)
    try:
        while figures.faults == 0 and (turn < len(kinds) or figures.kills < options.kills):
            storm.round(kinds[turn % len(kinds)])
            turn += 1
    except KeyboardInterrupt:
        print("interrupted; so far:")
    report(figures, options, time.monotonic() - begin)
    if figures.faults:
        sys.exit(f"error: {figures.faults} faults; what they left is in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
