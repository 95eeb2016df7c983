# CUDA programs, tests and benchmarks, all under $(BUILD)/cuda. Included by the Makefile where scripts/detect.sh found
# nvcc (NVCC, CUDA_LIB). Settings: CUDA_ARCHS (compute capabilities without the dot), PRECISION (bf16, fp32).

CUDA_ARCHS ?= 80 90 100
PRECISION ?= bf16
ifeq ($(filter bf16 fp32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): expected bf16 or fp32)
endif

comma := ,
# machine code for each capability, and the newest one's PTX for devices that came later
NVCC_ARCHS = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
NVCC_FLAGS = -std=c++17 -O3 --threads 2 $(if $(LIB_NCCL),-DHAVE_NCCL) $(if $(filter fp32,$(PRECISION)),-DPRECISION_FP32) -Werror all-warnings \
             $(NCCL_INCLUDE:%=-isystem %) \
             -Xcompiler -Wall,-Wextra,-Werror$(foreach f,$(OPENMP_CFLAGS),$(comma)$(f))
CUDA_LIBS = -L$(CUDA_LIB) -Xlinker -rpath=$(CUDA_LIB) -lcublasLt $(LIB_SENTENCEPIECE) $(LIB_CJSON) \
            $(OPENMP_LIBS:%=-Xcompiler %) -lpthread -lm
CUDA_BUILD_INFO = -DBAMC_COMMIT='"$(shell cat $(BUILD)/commit.txt)"' -DBAMC_FLAGS='"nvcc $(NVCC_FLAGS) sm $(CUDA_ARCHS)"'

# What every object depends on: changes only when the flags do.
$(BUILD)/cuda/flags.txt: force
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVCC_ARCHS) $(NVCC_FLAGS)' >$@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# $(call run_nvcc,flags): $< to $@
compile_cuda = @mkdir -p $(@D); $(call say,nvcc,$<)
run_nvcc = $(Q)$(NVCC) $(NVCC_ARCHS) $(NVCC_FLAGS) $(1) -MMD -MP -MF $(@:.o=.d) -x cu -c -o $@ $<

$(BUILD)/cuda/train_gpt.o: train_gpt.cu $(BUILD)/cuda/flags.txt $(BUILD)/commit.txt
	$(compile_cuda)
	$(call run_nvcc,$(CUDA_BUILD_INFO))

$(BUILD)/cuda/%.o: %.c $(BUILD)/cuda/flags.txt
	$(compile_cuda)
	$(call run_nvcc,)

$(BUILD)/cuda/%.o: %.cu $(BUILD)/cuda/flags.txt
	$(compile_cuda)
	$(call run_nvcc,)

CUDA_PROGRAMS = $(BUILD)/cuda/train_gpt $(BUILD)/cuda/evaluate
$(BUILD)/cuda/train_gpt: $(RANKS)
$(BUILD)/cuda/train_gpt: CUDA_LIBS += $(LIB_NCCL) $(patsubst -Wl$(comma)%,-Xlinker %,$(LIB_MPI))
$(CUDA_PROGRAMS): %: %.o $(TOKENIZER)
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS)

$(BUILD)/cuda/dev/bench_cuda: %: %.o
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS)

# Tests on a real device. Those that compare with the CPU's operators need oneDNN, all need cmocka. Left to the emulator:
# test_emu_bugs and test_emu_nccl_errors make mistakes that only the emulator survives, tests that include one of the
# CPU read its memory.
CUDA_TESTS_EMULATED = test_emu_bugs test_emu_nccl_errors $(basename $(notdir $(shell grep -l '^\#include "test_.*\.c"' test/*.cu)))
CUDA_TESTS_NCCL = $(basename $(notdir $(shell grep -l '^\#include <nccl.h>' test/*.cu)))
CUDA_TESTS = $(filter-out $(CUDA_TESTS_EMULATED),$(patsubst test/%.cu,%,$(wildcard test/test_*.cu)))
CUDA_TESTS_OF_CPU = $(basename $(notdir $(shell grep -lE 'cuda_ops_util\.h|namespace cpu' $(CUDA_TESTS:%=test/%.cu))))
CUDA_TESTS_HERE = $(if $(LIB_CMOCKA),$(filter-out $(if $(LIB_NCCL),,$(CUDA_TESTS_NCCL)) \
                    $(if $(LIB_DNNL),,$(CUDA_TESTS_OF_CPU)),$(CUDA_TESTS)))

$(BUILD)/cuda/test/%: $(BUILD)/cuda/test/%.o $(if $(LIB_DNNL),$(OPS) $(TOKENIZER))
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS) $(if $(filter $(CUDA_TESTS_NCCL),$(@F)),$(LIB_NCCL)) $(LIB_DNNL) $(LIB_CMOCKA)

.PRECIOUS: $(BUILD)/cuda/%.o
.PHONY: cuda cuda-tests cuda-test-names ptxas
cuda: $(CUDA_PROGRAMS)
	@echo "$(CUDA_PROGRAMS): $(PRECISION), compute capabilities $(CUDA_ARCHS)"
	@$(if $(GPU),cp -f $(CUDA_PROGRAMS) . && echo "copied to ./train_gpt and ./evaluate",\
	    echo "no GPU here: ./train_gpt and ./evaluate stay as they are")

cuda-tests: $(CUDA_TESTS_HERE:%=$(BUILD)/cuda/test/%)

# for scripts: the tests that can be built here, then those that cannot
cuda-test-names:
	@echo $(CUDA_TESTS_HERE)
	@echo $(filter-out $(CUDA_TESTS_HERE),$(CUDA_TESTS))

# Registers, spills, shared memory and occupancy of every kernel against dev/ptxas_budget.txt.
ptxas:
	@NVCC="$(NVCC)" BUILD="$(BUILD)" $(PYTHON) scripts/ptxas.py $(CUDA_ARCHS)

-include $(wildcard $(BUILD)/cuda/*.d $(BUILD)/cuda/*/*.d)
