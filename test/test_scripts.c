/*
The scripts as people call them: sweeps that finish, skip, go on, stop and fail; the array job; the published
command; pictures. They run in a shell and are judged by exit status, output and what they leave behind.
*/
#include "train_util.h"

#include "../llmc/posenc.h"

// What a sweep passes on to train_gpt for runs of a few milliseconds.
#define MODEL                                                                                               \
    " --data_dir $S/data --dataset easy --dim 32 --n_heads 2 --n_layers 2 --batch_size 2 --tokenizer bytes" \
    " --sequence_length 32 --val_tokens 64 --val_tokens_padding 0 --val_loss_every 4 --learning_rate 1e-2"  \
    " --tokens_per_step 64"

// The answer of the last shell() call; $S in a command is the scratch folder.
static char* output;

// Runs a command; returns its exit status. output holds what it printed, errors included.
static int shell(const char* command) {
    char* log = text("%s/shell.log", scratch);
    char* line = text("{ %s; } >%s 2>&1", command, log);
    int status = system(line);
    free(output);
    output = read_text(log, NULL);
    free(line);
    free(log);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void expect_status(int want, const char* command) {
    int got = shell(command);
    if (got != want) { print_error("%s\nexit status %d, expected %d:\n%s\n", command, got, want, output); }
    assert_int_equal(got, want);
}

// All words, separated by |, are in the output of the last command.
static void expect_words(const char* words) {
    char *list = xstrdup(words), *at = NULL;
    for (char* word = strtok_r(list, "|", &at); word; word = strtok_r(NULL, "|", &at)) {
        if (!strstr(output, word)) { print_error("expected '%s' in:\n%s\n", word, output); }
        assert_non_null(strstr(output, word));
    }
    free(list);
}

static void expect_columns(const char* s, size_t most) {
    for (; *s; s += s[strcspn(s, "\n")] == '\n' ? strcspn(s, "\n") + 1 : strcspn(s, "\n")) {
        if (strcspn(s, "\n") > most) { print_error("wider than %zu: %.*s\n", most, (int)strcspn(s, "\n"), s); }
        assert_true(strcspn(s, "\n") <= most);
    }
}

static void expect_folder(const char* relative, const char* names) {
    char* path = text("%s/%s", scratch, relative);
    assert_folder(path, names);
    free(path);
}

static size_t file_size(const char* relative) {
    char* path = text("%s/%s", scratch, relative);
    struct stat status;
    size_t size = stat(path, &status) == 0 ? (size_t)status.st_size : 0;
    free(path);
    return size;
}

static void write_scratch(const char* relative, const char* content) {
    char* path = text("%s/%s", scratch, relative);
    write_text_atomically(path, content);
    free(path);
}

// ----------------------------------------------------------------------------
// sweep.sh

#define TWO "scripts/sweep.sh --encodings bam_ssmax,alibi --sizes l2 --jobs 2" MODEL

static void test_sweep_finishes_and_skips(void** state) {
    (void)state;
    expect_status(0, TWO " --log_dir $S/skip --num_iterations 8");
    expect_words("l2 bam_ssmax: starts|l2 alibi: finished|\nbam_ssmax          l2             8  |summary.csv");
    expect_columns(strstr(output, "\nencoding ") + 1, 80);
    expect_status(0, "cat $S/skip/sweep/summary.csv");
    expect_words("encoding,size,run,state,steps,num_iterations,train_loss,|,finished,8,8,");
    assert_int_equal(count_words(output, "\n"), 3);

    expect_status(0, "md5sum $S/skip/l2/*/*/* 2>/dev/null >$S/before; " TWO
                     " --log_dir $S/skip --num_iterations 3 --num_iterations 8.0 --checkpoint_every 3");
    expect_words("l2 bam_ssmax: finished before|l2 alibi: finished before");
    expect_status(0, "md5sum $S/skip/l2/*/*/* 2>/dev/null | cmp - $S/before");

    expect_status(0, TWO " --log_dir $S/skip --num_iterations 8 --seed 7");  // another run
    expect_words("l2 bam_ssmax: starts|l2 alibi: starts");
    expect_folder("skip/l2/alibi", "version_00 version_01 ");
    expect_status(0, TWO " --log_dir $S/skip --num_iterations 8 --dry_run");
    expect_words("version_00");
    assert_null(strstr(output, "version_01"));
}

// A run that was killed between two checkpoints ends with the bytes of one that was not.
static void test_sweep_goes_on(void** state) {
    (void)state;
    expect_status(0, TWO " --log_dir $S/whole --num_iterations 12 --checkpoint_every 5 --keep_checkpoints 9");
    expect_status(0,
                  "cp -a $S/whole $S/cut; cd $S/cut/l2/alibi/version_00; rm -r *.safetensors checkpoints/step_*1[02]");
    expect_status(0, TWO " --log_dir $S/cut --num_iterations 12 --checkpoint_every 5");
    expect_words("l2 bam_ssmax: finished before|l2 alibi: goes on at step 5 of 12|l2 alibi: finished");
    expect_folder("cut/l2/alibi", "version_00 ");
    expect_status(0, "cmp $S/whole/l2/alibi/version_00/model.safetensors $S/cut/l2/alibi/version_00/model.safetensors");
    expect_status(0,
                  "cut -d, -f1,3 $S/whole/l2/alibi/version_00/train.log >$S/a; "
                  "cut -d, -f1,3 $S/cut/l2/alibi/version_00/train.log | cmp - $S/a");
}

static void test_sweep_stops(void** state) {
    (void)state;
    const char* log = "stop/l2/alibi/version_00/train.log";
    char* out = text("%s/stop.log", scratch);
    pid_t child = fork();
    if (child == 0) {
        int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, 1), dup2(fd, 2);
        execl("/bin/sh", "sh", "-c",
              "exec scripts/sweep.sh --encodings alibi,nope --sizes l2" MODEL
              " --log_dir $S/stop --num_iterations 1000000",
              (char*)NULL);
        _exit(127);
    }
    for (int i = 0; i < 6000 && file_size(log) < 200; i++) { usleep(10000); }
    kill(child, SIGINT);
    int status = 0, ended = 0;
    for (int i = 0; i < 6000 && (ended = waitpid(child, &status, WNOHANG)) == 0; i++) { usleep(10000); }
    if (ended == 0) { kill(child, SIGINT); }  // the second one kills the job
    assert_int_equal(ended, child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGINT);
    expect_status(0, "cat $S/stop.log");
    expect_words("stopping: 1 job will save|/1000000|stopped; go on with\n|scripts/sweep.sh --encodings alibi,nope");
    assert_true(file_size("stop/l2/alibi/version_00/optimizer.safetensors") > 0);
    expect_folder("stop/l2", "alibi ");  // the other one had not begun
    expect_status(0, "scripts/sweep.sh --encodings alibi,nope --sizes l2" MODEL
                     " --log_dir $S/stop --num_iterations 1000000 --dry_run");
    expect_words("--checkpoint|version_00 --checkpoint_args|--position_encoding nope");
    free(out);
}

static void test_sweep_failures(void** state) {
    (void)state;
    expect_status(1, TWO " --log_dir $S/fail --num_iterations 8 --learning_rat 1");
    expect_words(
        "failed: l2 bam_ssmax: error: unknown flag --learning_rat|fail/sweep/l2_bam_ssmax.log|failed: l2 alibi");

    // a damaged checkpoint stops its own job only
    expect_status(0, TWO " --log_dir $S/bad --num_iterations 4");
    expect_status(0, "cd $S/bad/l2/alibi/version_00; rm -r checkpoints; echo damaged >optimizer.safetensors");
    expect_status(1, TWO " --log_dir $S/bad --num_iterations 4");
    expect_words("l2 bam_ssmax: finished before|failed: l2 alibi: error: |optimizer.safetensors is not a safetensors");
    assert_null(strstr(output, "Traceback"));

    // and one that ends well but early is a failure too
    expect_status(1, "TRAIN='echo all is well' scripts/sweep.sh --encodings nope --sizes l2 --log_dir $S/early");
    expect_words("failed: l2 nope: all is well|no finished run of these flags");

    static const struct {
        const char *flags, *words;
    } cases[] = {
        {"--encodings bam,bm", "unknown 'bm'"},
        {"--sizes l3", "unknown 'l3'"},
        {"--jobs 0", "--jobs: found '0'"},
        {"--cell 10", "a number from 0 to 9"},
        {"--position_encoding bam", "--encodings"},
        {"--jobs", "value is missing"},
        {"l6", "unexpected 'l6'"},
        {"--checkpoint x", "--checkpoint is set by the sweep"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* command = text("scripts/sweep.sh --log_dir $S/refused %s", cases[i].flags);
        expect_status(1, command);
        assert_int_equal(strncmp(output, "error: ", 7), 0);
        assert_int_equal(count_words(output, "\n"), 1);
        expect_words(cases[i].words);
        free(command);
    }
    expect_status(1, "TRAIN=/nowhere/train scripts/sweep.sh --log_dir $S/refused");
    expect_words("cannot run /nowhere/train");
    expect_folder("refused", "");
}

// A run that another sweep is at is left alone.
static void test_sweep_locks(void** state) {
    (void)state;
    expect_status(0, "mkdir -p $S/lock/l2/alibi; flock $S/lock/l2/alibi/.sweep.lock " TWO
                     " --log_dir $S/lock --num_iterations 4");
    expect_words("l2 alibi: another sweep is at it|l2 bam_ssmax: finished");
    expect_folder("lock/l2/alibi", "");
}

static const char passkey_json[] =
    "{\"passkey\":{\"('equidistant', 4, 5, 0)\":{\"seq_lens\":[32,120,500],\"accs\":[1,0.75,0.25],"
    "\"greedy\":[1,0.5,0],\"natural\":[1,1,0],\"depths\":[[0,0,0,0],[0,0.3,0.6,1],[0,0.3,0.6,1]],"
    "\"hits\":[[1,1,1,1],[0,1,1,1],[0,0,0,1]]}},"
    "\"perplexity\":[{\"window_size\":32,\"seq_len\":128,\"dataset_dir\":\"wiki\",\"perplexity\":[9,8,null,12],"
    "\"positions\":[32,64,96,128],\"standard_error\":[1,1,1,1],\"mean\":9,\"articles\":3}]}";

static void test_sweep_evaluates(void** state) {
    (void)state;
    write_scratch("results.json", passkey_json);
    write_scratch("evaluate",
                  "echo evaluate \"$@\"; cp $S/results.json $2/ && [ $4 != 1 ] || { echo error: as asked; exit 1; }\n");
    expect_status(0, "EVALUATE=\"sh $S/evaluate\" " TWO " --log_dir $S/eval --num_iterations 4 --eval '--patience 3'");
    expect_words("l2 alibi: evaluated|l2 bam_ssmax: evaluated| 100%  75%  25%");
    expect_columns(strstr(output, "\nencoding ") + 1, 80);
    expect_status(0,
                  "grep -c 'evaluate --log_dir .*/eval/l2/alibi/version_00 --patience 3' $S/eval/sweep/l2_alibi.log; "
                  "grep alibi $S/eval/sweep/summary.csv");
    expect_words(",1,0.75,0.25\n");
    expect_status(1, "EVALUATE=\"sh $S/evaluate\" " TWO " --log_dir $S/eval --num_iterations 4 --eval '--patience 1'");
    expect_words("l2 alibi: finished before|failed: l2 alibi: error: as asked");
}

static void test_slurm(void** state) {
    (void)state;
    write_scratch("sbatch", "#!/bin/sh\necho \"$@\"\n");
    expect_status(0,
                  "chmod +x $S/sbatch; root=$PWD; cd $S; PATH=$S:$PATH SBATCH_FLAGS='--gres=gpu:1' "
                  "$root/scripts/slurm_sweep.sh --encodings bam,alibi --sizes l2,l4 --seed 1");
    expect_words("--gres=gpu:1|--array=0-3 --requeue|--signal=B:USR1@120|--task|--sizes l2,l4 --seed 1");
    expect_status(0,
                  "SLURM_ARRAY_TASK_ID=1 scripts/slurm_sweep.sh --task " TWO " --log_dir $S/slurm --num_iterations 4");
    expect_folder("slurm/l2", "alibi ");
    expect_status(1, "SLURM_ARRAY_TASK_ID=0 scripts/slurm_sweep.sh --task " TWO " --log_dir $S/slurm --no_such_flag");
}

// The command lines of scripts/multi_node, from another folder; what runs in a job is a stand-in for Slurm's programs.
static void test_multi_node(void** state) {
    (void)state;
    static const struct {
        int status;
        const char *command, *words;
    } cases[] = {
        {0, "NP=3 $D/single_node.sh --seed 1", "mpirun -np 3 --bind-to none |/train_gpt --seed 1\n"},
        {0, "CUDA_VISIBLE_DEVICES=0,2 $D/single_node.sh", "mpirun -np 2 "},
        {0, "echo node1 slots=8 >hosts; NCCL_DEBUG=INFO HOSTFILE=hosts $D/mpirun.sh --seed 1",
         "mpirun --hostfile hosts --bind-to none |-x NCCL_DEBUG |/train_gpt --seed 1\n"},
        {1, "HOSTFILE=none $D/mpirun.sh", "error: HOSTFILE='none'"},
        {0, "NP=2 NODES=2 NODE=1 MASTER_ADDR=node1 $D/env.sh --seed 1",
         "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=29500 |RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 |"
         "/train_gpt --seed 1\n"},
        {1, "NP=2 NODES=2 $D/env.sh", "MASTER_ADDR is not set"},
        {0, "SBATCH_FLAGS=--nodes=2 $D/slurm.sh --seed 1", "sbatch --nodes=2 |/slurm.sh --seed 1\n"},
        {0, "SLURM_JOB_ID=7 $D/slurm.sh --seed 1", "srun --mpi=none --cpu-bind=none |/train_gpt --seed 1\n"},
        {0, "SLURM_JOB_ID=7 SLURM_RESTART_COUNT=1 $D/slurm.sh --seed 1",
         "/train_gpt --checkpoint logs/v1 --checkpoint_args\n"},
    };
    expect_status(0, "mkdir -p $S/bin $S/logs/v1; : >$S/logs/v1/model.safetensors");
    write_scratch("bin/srun", "#!/bin/sh\n[ $1 != --mpi=list ] || exit 0\nshift 3\nexec \"$@\"\n");
    write_scratch("bin/scontrol", "#!/bin/sh\n[ $1 = show ] && echo StdOut=job.out || echo scontrol \"$@\"\n");
    write_scratch("job.out", "run      logs/v0\n\nrun      logs/v1\n");
    expect_status(0, "chmod +x $S/bin/*");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* command = text("unset TRAIN; D=$PWD/scripts/multi_node; cd $S; export PATH=$S/bin:$PATH DRY_RUN=1; %s",
                             cases[i].command);
        expect_status(cases[i].status, command);
        expect_words(cases[i].words);
        free(command);
    }

    // what is told to save exits with 128 + signal; the job is queued again when its time was over, not when cancelled
    write_scratch("bin/saves",
                  "#!/bin/sh\ntrap 'sleep 0.3; echo saved; exit 138' USR1\ntrap 'exit 143' TERM\n"
                  "echo started\nwhile :; do sleep 0.05; done\n");
    write_scratch("bin/hangs",
                  "#!/bin/sh\ntrap : USR1\ntrap 'exit 143' TERM\n"
                  "echo started\nwhile :; do sleep 0.05; done\n");
#define SIGNALLED(script, processes, signal)                                                                        \
    "D=$PWD/scripts/multi_node; cd $S; chmod +x bin/saves bin/hangs; export PATH=$S/bin:$PATH TRAIN=$S/bin/saves; " \
    ": >log; " script                                                                                               \
    " >log 2>&1 & job=$!;"                                                                                          \
    " until [ $(grep -c started log) = " processes                                                                  \
    " ]; do sleep 0.05; done;"                                                                                      \
    " kill -" signal " $job; wait $job; status=$?; cat log; exit $status"
    expect_status(0, SIGNALLED("SLURM_JOB_ID=7 $D/slurm.sh", "1", "USR1"));
    expect_words("saved\n|scontrol requeue 7\n");
    expect_status(138, SIGNALLED("SLURM_JOB_ID=7 $D/slurm.sh", "1", "TERM"));
    expect_words("saved\n");
    assert_null(strstr(output, "requeue"));
    expect_status(138, SIGNALLED("NP=2 $D/env.sh", "2", "USR1"));
    assert_int_equal(count_words(output, "saved\n"), 2);
    expect_status(143, SIGNALLED("NP=2 $D/env.sh", "2", "TERM"));

    // mpirun gets SIGUSR1 for SIGTERM, and a second SIGTERM only when that comes later
    write_scratch("bin/mpirun", "#!/bin/sh\nwhile [ $1 != $TRAIN ]; do shift; done\nexec \"$@\"\n");
    expect_status(0, "chmod +x $S/bin/mpirun; echo node1 slots=8 >$S/hosts");
    expect_status(138, SIGNALLED("$D/single_node.sh", "1", "TERM $job; kill -TERM"));
    expect_words("saved\n");
    expect_status(138, SIGNALLED("HOSTFILE=hosts $D/mpirun.sh", "1", "USR1"));
    expect_words("saved\n");
    expect_status(143, SIGNALLED("TRAIN=$S/bin/hangs $D/single_node.sh", "1", "TERM $job; sleep 2.1; kill -TERM"));
    assert_null(strstr(output, "saved"));
}

// The commands that README.md and docs/ranks.md show start something, and train_gpt knows their flags.
static void test_documented_ranks(void** state) {
    (void)state;
    expect_status(0,
                  "awk '/^```/ { on = !on; next } on { if (sub(/\\\\$/, \"\")) { printf \"%s\", $0 } else { print } }' "
                  "README.md docs/ranks.md | grep scripts/multi_node >$S/commands; "
                  "ln -s $PWD/scripts $S/scripts; echo node1 slots=8 >$S/hosts; ./train_gpt --help >$S/flags; "
                  "cd $S; DRY_RUN=1 CUDA_VISIBLE_DEVICES=0,1 sh -e commands 2>&1; "
                  "sed 's/.*\\.sh//' commands | grep -oe '--[a-z_]*' | sort -u | while read flag; do "
                  "grep -qe \" $flag \" flags || echo unknown $flag; done");
    assert_int_equal(count_words(output, "train_gpt --dataset") + count_words(output, "slurm.sh --dataset"), 11);
    assert_null(strstr(output, "unknown"));
}

static void test_published_command(void** state) {
    (void)state;
    expect_status(0, "LAUNCHER='echo mpirun -np 4' BATCH_SIZE=16 scripts/train_paper.sh --seed 3 | tail -n 1");
    expect_words(
        "mpirun -np 4 |--num_iterations 20000 |--tokens_per_step 589824 |--position_encoding bam_ssmax |"
        "--model_size l12 |--sequence_length 512 |--batch_size 16 |--weight_decay 0.1 |--learning_rate 1e-3 |"
        "--learning_rate_decay_frac 0.1 |--val_loss_every 32 |--dtype bfloat16 |--seed 3\n");
    static const char* const scripts[] = {
        "train_paper",      "sweep",         "slurm_sweep", "plot", "multi_node/single_node", "multi_node/mpirun",
        "multi_node/slurm", "multi_node/env"};
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        char* command = text("scripts/%s.sh --help", scripts[i]);
        expect_status(0, command);
        expect_words("usage: ");
        free(command);
    }
}

// ----------------------------------------------------------------------------
// plot.sh

// SCRATCH/FOLDER holds exactly these pictures, each whole as PNG and SVG.
static void expect_pictures(const char* folder, const char* names) {
    char *list = xstrdup(names), *at = NULL, *all = xstrdup("");
    for (char* name = strtok_r(list, " ", &at); name; name = strtok_r(NULL, " ", &at)) {
        char *png = text("%s/%s/%s.png", scratch, folder, name), *svg = text("%s/%s/%s.svg", scratch, folder, name);
        size_t png_size, svg_size;
        char *p = read_text(png, &png_size), *s = read_text(svg, &svg_size);
        assert_true(png_size > 5000 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0);
        assert_memory_equal(p + png_size - 8, "IEND\xae\x42\x60\x82", 8);
        assert_true(svg_size > 5000 && strstr(s, "<svg") && strstr(s, "</svg>"));
        char* longer = text("%s%s.png %s.svg ", all, name, name);
        free(png), free(svg), free(p), free(s), free(all);
        all = longer;
    }
    expect_folder(folder, all);
    free(list), free(all);
}

static void test_plot(void** state) {
    (void)state;
    expect_status(0, TWO " --log_dir $S/plot --num_iterations 12");
    expect_status(0, "scripts/plot.sh $S/plot/l2/bam_ssmax/version_00 --out $S/one");
    expect_words("version_00: no results.json, so neither|wrote ");
    expect_pictures("one", "loss priors");

    write_scratch("plot/l2/bam_ssmax/version_00/results.json", passkey_json);
    write_scratch("plot/l2/alibi/version_00/results.json", passkey_json);
    expect_status(0, "scripts/plot.sh $S/plot/l2/*/version_00 --out $S/two");
    expect_pictures("two", "depth loss passkey perplexity priors");
    expect_status(0, "cat $S/two/passkey.svg");
    expect_words("alibi<|bam_ssmax<|trained: 32<|prompt length (tokens)<|100 %<|teacher forced, 4 samples");
    expect_status(0, "scripts/plot.sh $S/plot/l2/alibi/version_00 --only passkey --measure greedy");
    assert_true(file_size("plot/l2/alibi/version_00/passkey_greedy.png") > 5000);

    // layers that differ: a panel for each layer that has a prior
    expect_status(0, "./train_gpt" MODEL
                     " --model_size l2 --n_layers 3 --layer_encodings bam_ssmax,nope,alibi_learned "
                     "--num_iterations 4 --log_dir $S/plot");
    expect_status(0,
                  "scripts/plot.sh $S/plot/l2/bam_ssmax+nope+alibi_learned/version_00 --out $S/layers --only priors");
    expect_pictures("layers", "priors");
    expect_status(0, "cat $S/layers/priors.svg");
    expect_words("bam_ssmax+nope+alibi_learned|>layer 1<|>layer 3<");
    assert_null(strstr(output, ">layer 2<"));

    expect_status(1, "scripts/plot.sh $S/plot/l2/alibi/version_00 --only perplexities --out $S/none");
    expect_words("error: --only perplexities");
    expect_status(1, "scripts/plot.sh $S/plot --out $S/none");
    expect_words("error: cannot open |args.json");
    write_scratch("plot/l2/alibi/version_00/results.json", "{\"passkey\": ");
    expect_status(1, "scripts/plot.sh $S/plot/l2/*/version_00 --out $S/none");
    expect_words("error: |alibi/version_00/results.json is not valid JSON");
    assert_null(strstr(output, "Traceback"));
    expect_folder("none", "");
}

// Articles and joined text of one dataset are not one curve; entries are known by their new and their old names.
static void test_plot_perplexity(void** state) {
    (void)state;
    expect_status(0, TWO " --log_dir $S/ppl --num_iterations 2");
#define ENTRY(name, bos, value)                                                                                  \
    "{\"window_size\":32,\"seq_len\":64,\"dataset_dir\":\"" name "\",\"bos\":\"" bos "\",\"perplexity\":[" value \
    ",5],\"positions\":[32,64],\"mean\":9,\"articles\":3}"
    write_scratch("ppl/l2/alibi/version_00/results.json",
                  "{\"perplexity\":[" ENTRY("data/wiki", "each article starts with BOS", "7") "]}");
    write_scratch("ppl/l2/bam_ssmax/version_00/results.json",
                  "{\"perplexity\":[" ENTRY("wiki", "each article starts with BOS", "8") "," ENTRY(
                      "data/wiki", "BOS and EOS are dropped, documents joined", "9") "]}");
#undef ENTRY
    expect_status(0, "scripts/plot.sh $S/ppl/l2/*/version_00 --out $S/ppl_out --only perplexity");
    expect_words("bam_ssmax/version_00: perplexity on wiki, documents joined (seq_len 64, window 32) is left out");
    expect_status(0, "cat $S/ppl_out/perplexity.svg");
    expect_words("wiki, 3 articles|alibi<|bam_ssmax<");
}

// What was evaluated with changed positions is drawn and listed beside the model as it was trained, under its name.
static void test_changed_positions(void** state) {
    (void)state;
#define YARN "rope_scaling yarn rope_factor 8 rope_original_length 64"
#define OF(step) "\"of\":{\"step\":\"" step "\",\"positions\":\"" YARN "\"}"
#define LENGTHS "\"seq_lens\":[100,200],\"accs\":"
#define WINDOWS "\"window_size\":32,\"seq_len\":64,\"dataset_dir\":\"data/wiki\",\"positions\":[32,64],\"perplexity\":"
    write_scratch("ppl/l2/alibi/version_00/results.json",
                  "{\"passkey\":{\"(1)\":{" LENGTHS "[1,0.25]}},\"passkey_others\":[{\"key\":\"(1)\"," LENGTHS
                  "[1,1]," OF("9") "},{\"key\":\"(1)\"," LENGTHS
                                   "[1,0.75]," OF("10") "},3],\"perplexity\":[{" WINDOWS
                                                        "[7,8]}],\"perplexity_others\":[{" WINDOWS
                                                        "[7,6]," OF("10") "}]}");
    expect_status(0, "python3 scripts/passkey_table.py $S/ppl/l2/alibi/version_00");
    expect_words("100     200|alibi |100 %    25 %|alibi, " YARN "|100 %    75 %");
    expect_status(0,
                  "scripts/plot.sh $S/ppl/l2/alibi/version_00 --out $S/changed --only passkey,perplexity --positions");
    expect_status(0, "cat $S/changed/passkey.svg");
    expect_words("alibi<|alibi, " YARN "<");
    expect_status(0, "cat $S/changed/perplexity.svg");
    expect_words("alibi<|alibi, " YARN "<");
    expect_status(0, "scripts/plot.sh $S/ppl/l2/alibi/version_00 --out $S/trained --only passkey,perplexity");
    expect_status(1, "grep -q yarn $S/trained/passkey.svg $S/trained/perplexity.svg");
}

// Whatever people, crashes and other programs leave in a run folder: one line that names the file, and no traceback.
static void test_damaged_runs(void** state) {
    (void)state;
    static const struct {
        const char *file, *content, *words;
    } cases[] = {
        {"results.json", "[]", "expected an object"},
        {"results.json", "{\"passkey\": []}", "\"passkey\" is of another kind"},
        {"results.json", "{\"passkey\": {\"k\": {\"seq_lens\": [1, 2], \"accs\": [1]}}}", "passkey k"},
        {"results.json", "{\"passkey\": {\"k\": {\"seq_lens\": [\"a\"], \"accs\": [1]}}}", "passkey k"},
        {"results.json", "{\"perplexity\": [{\"positions\": [0], \"perplexity\": [1]}]}", "entry of perplexity"},
        {"results.json", "{\"perplexity\": [{\"positions\": [32], \"perplexity\": [-1e999]}]}", "entry of perplexity"},
        {"results.json", "\xff\xfe", "not valid JSON"},
        {"train.log", "a table\n1,2\n", "found first line 'a table'"},
        {"eval.log", "\xff\n", "found first line"},
        {"args.json", "[1]", "no object 'args'"},
        {"args.json", "{\"args\": {\"position_encoding\": [1]}, \"model_args\": {}}", "no usable 'position_encoding'"},
        {"model.safetensors", "short", "not a safetensors file"},
    };
    expect_status(0, "scripts/sweep.sh --encodings bam_ssmax --sizes l2" MODEL " --log_dir $S/hurt --num_iterations 8");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* file = text("broken/l2/bam_ssmax/version_00/%s", cases[i].file);
        expect_status(0, "rm -rf $S/broken; cp -a $S/hurt $S/broken");
        write_scratch(file, cases[i].content);
        expect_status(1, "scripts/plot.sh $S/broken/l2/bam_ssmax/version_00 --out $S/none");
        assert_true(count_words(output, "error: ") == 1 && !strstr(output, "Traceback"));
        expect_words(cases[i].file);
        expect_words(cases[i].words);
        int status = shell("python3 -B scripts/passkey_table.py $S/broken/l2/bam_ssmax/version_00");
        assert_true(status == 0 || (strncmp(output, "error: ", 7) == 0 && count_words(output, "\n") == 1));
        shell("scripts/sweep.sh --encodings bam_ssmax --sizes l2 --log_dir $S/broken --summary");
        assert_null(strstr(output, "Traceback"));
        free(file);
    }
    // rows that are damaged are left out, the others drawn
    expect_status(
        0, "printf '\\377\\377,1\\n9,nan,nan,1,1,1,1\\n9,1,\\n\\0000,1' >>$S/hurt/l2/bam_ssmax/version_00/train.log");
    expect_status(0, "scripts/plot.sh $S/hurt/l2/bam_ssmax/version_00 --out $S/rows --only loss");
    expect_pictures("rows", "loss");
    // a whole older checkpoint is what a sweep goes on from
    expect_status(0,
                  "cd $S/hurt/l2/bam_ssmax/version_00/checkpoints; mkdir step_000000009; touch .DS_Store; "
                  "cp -a step_000000008 step_000000010; echo damaged >step_000000010/optimizer.safetensors");
    expect_status(
        0, "scripts/sweep.sh --encodings bam_ssmax --sizes l2" MODEL " --log_dir $S/hurt --num_iterations 8 --dry_run");
    expect_words("l2 bam_ssmax: finished");
    expect_status(1, "scripts/sweep.sh --encodings bam --sizes l2 --log_dir $S/refused --eval \"'\"");
    expect_words("error: --eval|close its quotes");
}

// Names that a shell, gnuplot or an 8-bit locale would take for something else; full and closed outputs.
static void test_plot_names(void** state) {
    (void)state;
    expect_status(0, "scripts/sweep.sh --encodings bam_ssmax --sizes l2" MODEL " --log_dir $S/name --num_iterations 4");
    expect_status(0,
                  "run=$S/name/l2/bam_ssmax/version_00; mkdir $S/odd; "
                  "cp -a $run \"$S/odd/$(printf 'a\\nb')\"; cp -a $run \"$S/odd/c '\\`touch pwned\\`\\\" \\\\\"; "
                  "cp -a $run \"$S/odd/$(printf '\\377e')\"");
    static const char* const locales[] = {"C", "C.utf8"};
    for (size_t i = 0; i < 2; i++) {
        char* command = text(
            "LC_ALL=%s PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 scripts/plot.sh \"$S/odd/$(printf 'a\\nb')\" $S/odd/c* "
            "\"$S/odd/$(printf '\\377e')\" --out \"$S/$(printf 'o\\nut%zu')\"",
            locales[i], i);
        expect_status(0, command);
        expect_words("a\\nb: no results.json|wrote |/loss.png");
        free(command);
    }
    expect_status(0,
                  "ls \"$S/$(printf 'o\\nut0')\" | wc -l; ls pwned $S/pwned \"$S/$(printf 'o\\nut0')/pwned\" || true");
    expect_words("8\n");  // the losses and three priors
    assert_int_equal(count_words(output, "No such file"), 3);
    expect_status(1, "scripts/plot.sh $S/name/l2/bam_ssmax/version_00 --out $S/full >/dev/full");
    expect_words("error: output: No space left");
    assert_int_equal(count_words(output, "\n"), 1);
    expect_status(0, "scripts/plot.sh $S/name/l2/bam_ssmax/version_00 --out $S/full >&-");
}

// The curves of the priors' picture are those of the model: one program prints both, read back line by line.
static void test_plotted_priors(void** state) {
    (void)state;
    static const double theta[][3] = {{0.3, 0.7, 0}, {-1, 1.2, 0.4}, {0.5, -0.3, -1.5}};
    static const size_t heads[] = {1, 8, 12, 40}, distances[] = {0, 1, 4, 77, 2000};
    expect_status(0,
                  "cd scripts; python3 -B -c '\n"
                  "import runs\n"
                  "for theta in (0.3, 0.7, 0), (-1, 1.2, 0.4), (0.5, -0.3, -1.5):\n"
                  "    print(*(runs.bam_prior(theta, d) for d in (0, 1, 4, 77, 2000)))\n"
                  "for heads in 1, 8, 12, 40: print(*runs.alibi_slopes(heads))'");
    char* at = output;
    for (size_t i = 0; i < 3; i++) {
        for (size_t d = 0; d < 5; d++) {
            assert_error_below(
                fabs(strtod(at, &at) /
                         bam_value(theta[i], (PosencHead){0, 1, POSENC_DEFAULT_SETTINGS, NULL}, distances[d]) -
                     1),
                1e-12);
        }
    }
    for (size_t i = 0; i < 4; i++) {
        for (size_t h = 0; h < heads[i]; h++) {
            assert_error_below(fabs(strtod(at, &at) / alibi_slope(h, heads[i]) - 1), 1e-12);
        }
        assert_int_equal(*at++, '\n');
    }
    assert_string_equal(at, "");
}

// ----------------------------------------------------------------------------
// --help

// Every script says what it is, and does nothing else: it runs in a copy of the scripts alone.
static void test_help(void** state) {
    (void)state;
    static const char* const scripts[] = {
        "dataset/get_tokenizer.sh",
        "scripts/demo.sh",
        "scripts/detect.sh",
        "scripts/gpu_check.sh",
        "scripts/install_deps.sh",
        "scripts/plot.sh",
        "scripts/slurm_sweep.sh",
        "scripts/sweep.sh",
        "scripts/train_paper.sh",
        "scripts/multi_node/env.sh",
        "scripts/multi_node/mpirun.sh",
        "scripts/multi_node/single_node.sh",
        "scripts/multi_node/slurm.sh",
        "dataset/fineweb.py",
        "dataset/wikipedia.py",
        "dev/bench.sh",
    };
    expect_status(
        0, "mkdir $S/help && cp -r --parents scripts dataset dev/bench.sh $S/help && find $S/help | sort >$S/was");
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        char* command = text("cd $S/help && PYTHONDONTWRITEBYTECODE=1 %s --help", scripts[i]);
        expect_status(0, command);
        expect_words("usage: ");
        free(command);
    }
    expect_status(0, "cd $S/help && DRY_RUN=1 dataset/get_tokenizer.sh");
    expect_words("data/tokenizer.model: would be taken from mistral-common");
    expect_status(1, "cd $S/help && dataset/get_tokenizer.sh --dest x");
    expect_status(1, "cd $S/help && scripts/install_deps.sh --lists");
    expect_status(0, "find $S/help | sort | cmp - $S/was && rm -r $S/help");
}

int main(void) {
    scratch_create();
    setenv("S", scratch, 1);
    setenv("OMP_NUM_THREADS", "1", 0);
    const char* program = getenv("TRAIN_GPT");
    setenv("TRAIN", program ? program : "./train_gpt", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sweep_finishes_and_skips),
        cmocka_unit_test(test_sweep_goes_on),
        cmocka_unit_test(test_sweep_stops),
        cmocka_unit_test(test_sweep_failures),
        cmocka_unit_test(test_sweep_locks),
        cmocka_unit_test(test_sweep_evaluates),
        cmocka_unit_test(test_slurm),
        cmocka_unit_test(test_multi_node),
        cmocka_unit_test(test_documented_ranks),
        cmocka_unit_test(test_published_command),
        cmocka_unit_test(test_plot),
        cmocka_unit_test(test_plot_perplexity),
        cmocka_unit_test(test_changed_positions),
        cmocka_unit_test(test_damaged_runs),
        cmocka_unit_test(test_plot_names),
        cmocka_unit_test(test_plotted_priors),
        cmocka_unit_test(test_help),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(output);
    return failed;
}
