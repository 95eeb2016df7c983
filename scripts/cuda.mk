# CUDA programs, tests and benchmarks, all under $(BUILD)/cuda. Included by the Makefile where scripts/detect.sh found
# nvcc (NVCC, CUDA_LIB). Settings: CUDA_ARCHS (compute capabilities without the dot), PRECISION (bf16, fp32), USE_CUDNN
# (1: with cuDNN's attention; CUDNN_HOME is the folder of its include and lib if it is in none of CUDNN_PLACES).

CUDA_ARCHS ?= 80 90 100
PRECISION ?= bf16
ifeq ($(filter bf16 fp32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): expected bf16 or fp32)
endif

USE_CUDNN ?= 0
ifeq ($(filter 0 1,$(USE_CUDNN)),)
$(error USE_CUDNN=$(USE_CUDNN): expected 0 or 1)
endif

# machine code for each capability, and the newest one's PTX for devices that came later
NVCC_ARCHS = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS))
NVCC_FLAGS = -std=c++17 -O3 --threads 2 $(if $(filter fp32,$(PRECISION)),-DPRECISION_FP32) $(CUDNN_DEFINE) \
             $(if $(LIB_NCCL),-DHAVE_NCCL) $(NCCL_INCLUDE:%=-isystem %) -Werror all-warnings \
             -Xcompiler -Wall,-Wextra,-Werror$(foreach f,$(OPENMP_CFLAGS),$(comma)$(f))
CUDA_LIBS = -L$(CUDA_LIB) -Xlinker -rpath=$(CUDA_LIB) -lcublasLt $(CUDNN_LIBS) $(LIB_SENTENCEPIECE) $(LIB_CJSON) \
            $(OPENMP_LIBS:%=-Xcompiler %) -lpthread -lm
CUDA_BUILD_INFO = -DBAMC_COMMIT='"$(shell cat $(BUILD)/commit.txt)"' -DBAMC_FLAGS='"nvcc $(NVCC_FLAGS) sm $(CUDA_ARCHS)"'

# cuDNN: the first place with both its header and its library, and the headers of its frontend.
ifeq ($(USE_CUDNN),1)
DEPS = .deps/cudnn
PIP_CUDNN := $(shell $(PYTHON) -c 'import nvidia.cudnn; print(nvidia.cudnn.__path__[0])' 2>/dev/null)
CUDNN_PLACES = $(CUDNN_HOME) $(DEPS)/nvidia/cudnn $(patsubst %/lib64,%,$(CUDA_LIB)) /usr /usr/local $(PIP_CUDNN)
cudnn_folder = $(patsubst %/,%,$(dir $(firstword $(foreach d,$(1),$(wildcard $(place)/$(d)/$(2))))))
cudnn_headers = $(call cudnn_folder,include include/x86_64-linux-gnu,cudnn.h)
cudnn_library = $(call cudnn_folder,lib64 lib lib/x86_64-linux-gnu,libcudnn.so.9)
cudnn_pair = $(if $(and $(cudnn_headers),$(cudnn_library)),$(cudnn_headers) $(cudnn_library))
CUDNN := $(strip $(foreach place,$(CUDNN_PLACES),$(cudnn_pair)))
CUDNN_INCLUDE := $(word 1,$(CUDNN))
CUDNN_LIB := $(abspath $(word 2,$(CUDNN)))
CUDNN_FRONTEND := $(patsubst %/,%,$(dir $(firstword $(wildcard $(DEPS:%=%/include/cudnn_frontend.h) \
                  $(CUDNN_PLACES:%=%/include/cudnn_frontend.h)))))
CUDNN_MISSING = $(if $(filter fp32,$(PRECISION)),PRECISION=fp32 USE_CUDNN=1: cuDNN's attention has no float32; leave one out,\
    $(if $(CUDNN_INCLUDE),,USE_CUDNN=1: found no cudnn.h with libcudnn.so.9; run scripts/install_deps.sh --cudnn or set CUDNN_HOME)\
    $(if $(CUDNN_FRONTEND),,USE_CUDNN=1: found no cudnn_frontend.h; run scripts/install_deps.sh --cudnn))
CUDNN_DEFINE = -DUSE_CUDNN
CUDNN_OBJECT = $(BUILD)/cuda/llmc/attention/cudnn_graph.o
CUDNN_LIBS = -L$(CUDNN_LIB) -Xlinker -rpath=$(CUDNN_LIB) -l:libcudnn.so.9 -lnvrtc

$(CUDNN_OBJECT): llmc/attention/cudnn_graph.cpp $(BUILD)/cuda/flags.txt
	@mkdir -p $(@D)
	@$(call say,c++,$<)
	$(Q)$(CXX) $(CXXFLAGS) -isystem $(CUDNN_FRONTEND) -isystem $(CUDNN_INCLUDE) -isystem $(patsubst %/lib64,%/include,$(CUDA_LIB)) \
	    -c -o $@ $<
endif

# What every object depends on: changes only when the flags do.
$(BUILD)/cuda/flags.txt: force
	@$(if $(strip $(CUDNN_MISSING)),echo error: "$(strip $(CUDNN_MISSING))" >&2; exit 1)
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVCC_ARCHS) $(NVCC_FLAGS) $(CUDNN)' >$@.new
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

# The kernels of attention, compiled once; an archive, for some tests use no attention.
CUDA_ATTENTION = $(BUILD)/cuda/attention.a
$(CUDA_ATTENTION): $(BUILD)/cuda/llmc/attention/attention.o $(CUDNN_OBJECT)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

CUDA_PROGRAMS = $(BUILD)/cuda/train_gpt $(BUILD)/cuda/evaluate
$(BUILD)/cuda/train_gpt: $(RANKS)
$(BUILD)/cuda/train_gpt: CUDA_LIBS += $(LIB_NCCL) $(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -pthread,$(LIB_MPI)))
$(CUDA_PROGRAMS): %: %.o $(TOKENIZER) $(CUDA_ATTENTION)
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS)

$(BUILD)/cuda/dev/bench_cuda: %: %.o $(CUDA_ATTENTION)
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS)

# Tests on a real device. All need cmocka, those that compare with the CPU's operators oneDNN, those of NCCL and cuDNN
# the library itself: the emulator's stand-ins would say nothing about them.
CUDA_TESTS = $(filter-out $(call cuda_tests_that_need,emulator),$(CUDA_TEST_NAMES))
CUDA_TESTS_NCCL = $(call cuda_tests_that_need,nccl)
CUDA_TESTS_MISSING = $(if $(LIB_CMOCKA),$(if $(LIB_DNNL),,$(call cuda_tests_that_need,cpu)) \
                       $(if $(LIB_NCCL),,$(CUDA_TESTS_NCCL)) $(if $(CUDNN),,$(call cuda_tests_that_need,cudnn)),$(CUDA_TESTS))
CUDA_TESTS_OF_NO_PRECISION = $(foreach r,$(CUDA_TEST_ROWS),$(if $(findstring :any:,$(r)),$(call row_name,$(r))))
CUDA_TESTS_HERE = $(filter-out $(CUDA_TESTS_MISSING),$(CUDA_TESTS))

$(BUILD)/cuda/test/%: $(BUILD)/cuda/test/%.o $(if $(LIB_DNNL),$(OPS) $(TOKENIZER)) $(CUDA_ATTENTION)
	@$(call say,link,$@)
	$(Q)$(NVCC) -o $@ $^ $(CUDA_LIBS) $(if $(filter $(CUDA_TESTS_NCCL),$(@F)),$(LIB_NCCL)) $(LIB_DNNL) $(LIB_CMOCKA)

.PRECIOUS: $(BUILD)/cuda/%.o
.PHONY: cuda cuda-tests cuda-test-names ptxas
cuda: $(CUDA_PROGRAMS)
	@echo "$(CUDA_PROGRAMS): $(PRECISION), compute capabilities $(CUDA_ARCHS)$(if $(CUDNN), with cuDNN of $(CUDNN_LIB))"
	@$(if $(GPU),cp -f $(CUDA_PROGRAMS) . && echo "copied to ./train_gpt and ./evaluate",\
	    echo "no GPU here: ./train_gpt and ./evaluate stay as they are")

cuda-tests: $(CUDA_TESTS_HERE:%=$(BUILD)/cuda/test/%)

# for scripts: the tests that can be built here, then those that cannot, then those of the first that depend on PRECISION
cuda-test-names:
	@echo $(CUDA_TESTS_HERE)
	@echo $(filter-out $(CUDA_TESTS_HERE),$(CUDA_TESTS))
	@echo $(filter-out $(CUDA_TESTS_OF_NO_PRECISION),$(CUDA_TESTS_HERE))

# Registers, spills, shared memory and occupancy of every kernel against dev/ptxas_budget.txt.
ptxas:
	@NVCC="$(NVCC)" BUILD="$(BUILD)" $(PYTHON) scripts/ptxas.py $(CUDA_ARCHS)

-include $(wildcard $(BUILD)/cuda/*.d $(BUILD)/cuda/*/*.d $(BUILD)/cuda/*/*/*.d)
