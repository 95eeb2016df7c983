# bam.c: `make` builds the programs, `make help` lists everything else.
# Settings, on the command line or in the environment: CC, CXX, ARCH (native), EXTRA_CFLAGS, BUILD (build), BACKEND
# (cpu, or cuda where there are nvcc and a GPU); for CUDA also PRECISION (bf16, fp32), CUDA_ARCHS (80 90 100) and
# USE_CUDNN (1: with cuDNN's attention).

MAKEFLAGS += --no-builtin-rules
BUILD ?= build
ARCH ?= native
PYTHON ?= python3

WARNINGS = -Wall -Wextra -Werror
# gnu11 with contraction: plain -std=c11 turns fused multiply-add off in GCC. No -ffast-math: masks are infinite.
COMMON = -march=$(ARCH) -ffp-contract=fast -fno-math-errno -fno-trapping-math $(WARNINGS) $(OPENMP_CFLAGS) \
         $(CONFIG_DEFINES) -MMD -MP $(EXTRA_CFLAGS)
CFLAGS = -std=gnu11 -O3 -g $(COMMON)
CXXFLAGS = -std=c++17 -O2 -g $(COMMON)
LDLIBS = $(LIB_DNNL) $(LIB_SENTENCEPIECE) $(LIB_CJSON) $(OPENMP_LIBS) -lpthread -lm

# What the machine has: HAVE_*, LIB_*, CONFIG_DEFINES. Found by compiling a line for each library.
# Not for goals that need no compiler, or that install it first.
ifneq ($(filter-out help clean format deps test fuzz demo demo-all,$(or $(MAKECMDGOALS),all)),)
include $(BUILD)/config.mk
endif

PROGRAMS = train_gpt evaluate dataset/prepare dataset/inspect dataset/synthetic

# One short line a file; `make V=1` shows whole commands.
Q = $(if $(V),,@)
say = $(if $(V),:,printf '  %-4s %s\n' $(1) $(2))

.PHONY: all help test torture bench bench-dist clean format deps demo demo-all program-tests left-out
all: $(PROGRAMS)
	@echo "bam.c is built for $(if $(filter cuda,$(BACKEND)),CUDA$(comma) $(PRECISION)$(comma),the CPU) with"
	@cat $(BUILD)/summary.txt

help:
	@echo "make            build train_gpt and the dataset tools, print what was found"
	@echo "make deps       install what is missing (scripts/install_deps.sh)"
	@echo "make test       install what is missing, build and run every test"
	@echo "make fuzz       random inputs to everything that reads a file or a message; needs clang; FUZZ_SECONDS=60 in all"
	@echo "make torture    kill tiny trainings KILLS times (300) at random moments, resume, compare the bits; SEED=N repeats"
	@echo "make demo       train four encodings and see which finds a key far beyond its training length"
	@echo "make demo-all   the same for all ten"
	@echo "make bench      measure speed and memory, write $(BUILD)/bench.json"
	@echo "make bench-dist   steps of 1 and 2 processes, communication hidden or not; needs mpirun"
	@echo "make cuda       build for CUDA (CUDA_ARCHS=\"80 90 100\", PRECISION=bf16 or fp32); scripts/gpu_check.sh tests it"
	@echo "make cuda USE_CUDNN=1   the same with cuDNN's attention for train_gpt --attention cudnn"
	@echo "make ptxas      registers, spills, shared memory and occupancy of every CUDA kernel against their budgets"
	@echo "make format     clang-format all sources"
	@echo "make clean      remove everything that was built"
	@echo "settings        CC=$(CC) CXX=$(CXX) ARCH=$(ARCH) BUILD=$(BUILD) EXTRA_CFLAGS=$(EXTRA_CFLAGS)"

$(BUILD)/config.mk: scripts/detect.sh
	@mkdir -p $(BUILD)
	@CC="$(CC)" CXX="$(CXX)" scripts/detect.sh $(BUILD)

deps:
	@scripts/install_deps.sh
	@mkdir -p $(BUILD)
	@CC="$(CC)" CXX="$(CXX)" scripts/detect.sh $(BUILD)

# ---------------------------------------------------------------- library
# RANKS: what only programs need that run on several processes
RANKS = $(patsubst %,$(BUILD)/llmc/ranks/%.o,ranks rendezvous)
OPS = $(filter-out $(RANKS) $(BUILD)/llmc/ranks/dist.o,$(patsubst %.c,$(BUILD)/%.o,$(wildcard llmc/*.c llmc/*/*.c)))
TOKENIZER = $(BUILD)/llmc/tokenizer.o

$(BUILD)/llmc/%.o: llmc/%.c $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) -c -o $@ $<

$(BUILD)/llmc/%.o: llmc/%.cpp $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,c++,$<)
	$(Q)$(CXX) $(CXXFLAGS) -c -o $@ $<

$(RANKS) $(BUILD)/llmc/ranks/dist.o: CFLAGS += $(MPI_CFLAGS)

# ---------------------------------------------------------------- programs
# The commit goes into every run's args.json; the file changes only when the commit does.
BUILD_INFO = -DBAMC_COMMIT='"$(shell cat $(BUILD)/commit.txt)"' -DBAMC_FLAGS='"$(CC) $(CFLAGS)"'
.PHONY: force
$(BUILD)/commit.txt: force
	@mkdir -p $(BUILD)
	@git describe --always --dirty 2>/dev/null >$@.new || echo unknown >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(BUILD)/train_gpt.o: train_gpt.cu $(BUILD)/config.mk $(BUILD)/commit.txt
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) $(BUILD_INFO) -x c -c -o $@ $<

$(BUILD)/%.o: %.c $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) -c -o $@ $<

# The programs are made again when the backend has changed since.
$(BUILD)/backend.txt: force
	@mkdir -p $(BUILD)
	@echo "$(BACKEND)" >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

ifeq ($(BACKEND),cuda)
train_gpt evaluate: %: $(BUILD)/cuda/% $(BUILD)/backend.txt
	@cp -f $< $@
else
train_gpt: $(RANKS) $(BUILD)/llmc/ranks/dist.o
train_gpt: LDLIBS += $(LIB_MPI)
train_gpt evaluate: %: $(BUILD)/%.o $(OPS) $(TOKENIZER) $(BUILD)/backend.txt
	@$(call say,link,$@)
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $(filter %.o,$^) $(LDLIBS)
endif

dataset/%: $(BUILD)/dataset/%.o $(TOKENIZER)
	@$(call say,link,$@)
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $^ $(LDLIBS)

# ---------------------------------------------------------------- tests and benchmarks
include test/tests.mk

$(BUILD)/test/%: test/%.c $(OPS) $(RANKS) $(TOKENIZER)
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) -MT $@ -c -o $@.o $<
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $@.o $(filter %.o,$^) $(LDLIBS) $(LIB_MPI) -lcmocka

# the programs and their test with the encodings of test/encodings.h in the list
ENCODINGS = $(BUILD)/encodings
ENCODINGS_CFLAGS = -DPOSENC_EXTRA='"../test/encodings.h"' -DENCODINGS_FOLDER='"$(ENCODINGS)"'
ENCODINGS_OPS = $(ENCODINGS)/posenc.o $(filter-out %/posenc.o,$(OPS)) $(RANKS) $(BUILD)/llmc/ranks/dist.o $(TOKENIZER)
$(ENCODINGS)/train_gpt.o: train_gpt.cu
$(ENCODINGS)/evaluate.o: evaluate.c
$(ENCODINGS)/posenc.o: llmc/posenc.c
$(patsubst %,$(ENCODINGS)/%.o,train_gpt evaluate posenc): $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,cc,$(filter %.c %.cu,$^))
	$(Q)$(CC) $(CFLAGS) $(ENCODINGS_CFLAGS) -x c -c -o $@ $(filter %.c %.cu,$^)

$(ENCODINGS)/train_gpt $(ENCODINGS)/evaluate: %: %.o $(ENCODINGS_OPS)
	@$(call say,link,$@)
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $^ $(LDLIBS) $(LIB_MPI)

$(BUILD)/test/test_encodings: test/test_encodings.c $(ENCODINGS_OPS) | $(ENCODINGS)/train_gpt $(ENCODINGS)/evaluate
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) $(ENCODINGS_CFLAGS) -MT $@ -c -o $@.o $<
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $@.o $(filter %.o,$^) $(LDLIBS) $(LIB_MPI) -lcmocka

# NAME:NEED of those that this machine cannot run; test/run.sh leaves them out and says so
WITHOUT_MPI = $(if $(LIB_MPI),$(if $(shell command -v mpirun),,mpirun),MPI)
WITHOUT_EMULATOR = $(if $(filter yes,$(EMULATOR)),,CUDA-headers)
LEFT_OUT = $(WITHOUT_MPI:%=test_dist:%) $(foreach t,$(EMU_PROGRAM_TESTS),$(WITHOUT_EMULATOR:%=$(t):%)) \
           $(if $(WITHOUT_EMULATOR),,$(addprefix test_emu_dist:,$(or $(WITHOUT_MPI),$(if $(NCCL),,nccl.h))))
$(PROGRAM_TESTS:%=$(BUILD)/test/%): | $(PROGRAMS)
program-tests:
	@echo $(PROGRAM_TESTS)
left-out:
	@echo $(LEFT_OUT)

# Fuzz targets: clang with its sanitizers for what reads the input, the operators as the programs have them. Out of the
# archive each target takes what it needs. --wrap: see test/fuzz/fuzz.h.
FUZZ_TARGETS = $(sort $(basename $(notdir $(wildcard test/fuzz/fuzz_*.c test/fuzz/fuzz_*.cpp))))
FUZZ_CC ?= clang
FUZZ_CXX ?= clang++
FUZZ_SANITIZE = -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FUZZ_FLAGS = -O1 -g -march=$(ARCH) $(WARNINGS) -Wno-unknown-pragmas $(CONFIG_DEFINES) -MMD -MP $(FUZZ_SANITIZE)
FUZZ_WRAP = -Wl,--wrap=exit,--wrap=_exit,--wrap=atexit,--wrap=fopen,--wrap=fdopen,--wrap=fclose,--wrap=mmap,--wrap=munmap,--wrap=pthread_create
.PHONY: fuzz fuzz-targets
fuzz:
	@CC="$(CC)" CXX="$(CXX)" BUILD=$(BUILD) FUZZ_CXX="$(FUZZ_CXX)" test/fuzz/run.sh
fuzz-targets:
	@echo $(FUZZ_TARGETS:fuzz_%=%)

$(BUILD)/fuzz/%.o: test/fuzz/%.c $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(FUZZ_CC) -std=gnu11 $(FUZZ_FLAGS) -c -o $@ $<

$(BUILD)/fuzz/%.o: test/fuzz/%.cpp $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,c++,$<)
	$(Q)$(FUZZ_CXX) -std=c++17 $(FUZZ_FLAGS) -c -o $@ $<

$(BUILD)/fuzz/%.o: llmc/%.cpp $(BUILD)/config.mk
	@mkdir -p $(@D)
	@$(call say,c++,$<)
	$(Q)$(FUZZ_CXX) -std=c++17 $(FUZZ_FLAGS) -c -o $@ $<

$(BUILD)/fuzz/operators.a: $(OPS)
	@mkdir -p $(@D)
	@rm -f $@
	$(Q)ar rcs $@ $^

$(BUILD)/fuzz/fuzz_%: $(BUILD)/fuzz/fuzz_%.o $(BUILD)/fuzz/tokenizer.o $(BUILD)/fuzz/operators.a
	$(Q)$(FUZZ_CXX) $(FUZZ_SANITIZE) -fsanitize=fuzzer $(FUZZ_WRAP) -o $@ $^ $(LDLIBS:-fopenmp=-lgomp)

$(BUILD)/dev/%: dev/%.c $(OPS) $(TOKENIZER)
	@mkdir -p $(@D)
	@$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) -MT $@ -c -o $@.o $<
	$(Q)$(CXX) $(EXTRA_CFLAGS) -o $@ $@.o $(OPS) $(TOKENIZER) $(LDLIBS)

.PRECIOUS: $(BUILD)/%.o $(BUILD)/fuzz/%.o

ifeq ($(EMULATOR),yes)
include test/emu/rules.mk
endif

ifneq ($(NVCC),)
include scripts/cuda.mk
else
.PHONY: cuda cuda-tests ptxas
cuda cuda-tests ptxas:
	@echo "error: no nvcc found; install the CUDA toolkit, put nvcc into PATH or set CUDA_HOME" >&2; exit 1
endif

# the programs' tests know the answers of the CPU
test: deps
	@$(MAKE) --no-print-directory BACKEND=cpu all
	@BACKEND=cpu BUILD=$(BUILD) CC="$(CC)" CXX="$(CXX)" test/run.sh

KILLS ?= 300
torture: $(PROGRAMS)
	@$(PYTHON) test/torture.py --kills $(KILLS) $(if $(SEED),--seed $(SEED))

bench: $(BUILD)/dev/bench_matmul $(BUILD)/dev/bench_attention $(BUILD)/dev/bench_train $(BUILD)/dev/bench_evaluate
	@dev/bench.sh $(BUILD)

bench-dist: train_gpt
	@command -v mpirun >/dev/null || { echo "error: mpirun not found; run scripts/install_deps.sh" >&2; exit 1; }
	@dev/bench_dist.py $(BUILD)

demo demo-all: deps
	@$(MAKE) --no-print-directory all
	@scripts/demo.sh $(if $(filter demo-all,$@),--all)

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')

clean:
	rm -rf $(BUILD) $(PROGRAMS)

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d $(BUILD)/llmc/*/*.d)
