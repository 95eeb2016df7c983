# What the tests need to know about themselves, for the Makefile, scripts/cuda.mk, test/emu/rules.mk and, through
# `make -s cuda-rows`, for the scripts that run them. Included by the Makefile.

# Tests in C that start the shipped programs: built after them, and not sanitized, for that would say nothing of the
# programs. Every other test/test_*.c is run as it is and again under sanitizers.
PROGRAM_TESTS = test_startup test_prepare test_streams test_inspect test_synthetic test_train test_train_flags \
                test_resume test_checkpoint test_init_from test_layers test_evaluate test_evaluate_refuses test_scripts \
                test_torture test_dist test_encodings test_positions test_attention_flags test_mix $(EMU_PROGRAM_TESTS)
# and these the same programs compiled for CUDA, on the emulated device; see test/emu/rules.mk
EMU_PROGRAM_TESTS = test_emu_train test_emu_evaluate test_emu_dist

# Tests of the CUDA code, test/NAME.cu, a row each: NAME:ORDERS:BUILDS:PRECISIONS:NEEDS
#   ORDERS      of the threads, in which the emulator's plain build repeats it; 0 where the test sets them itself
#   BUILDS      of test/emu; plain alone where the others would take minutes and find nothing that operators' tests do not
#   PRECISIONS  of the build; any: the test has nothing that depends on it
#   NEEDS       beyond cmocka: cpu (the CPU's operators, so oneDNN), nccl, cudnn (on a device; the emulator has a stand-in),
#               emulator (makes mistakes that only the emulator survives)
EVERY_BUILD = plain,asan,race
CUDA_TEST_ROWS = \
    test_cuda_attention:0:$(EVERY_BUILD):bf16,fp32: \
    test_cuda_cudnn:0,1,2,3:$(EVERY_BUILD):bf16,fp32:cudnn \
    test_cuda_forget:0,1,2,3:$(EVERY_BUILD):bf16,fp32:cpu \
    test_cuda_model:0:plain:bf16,fp32: \
    test_cuda_ops:0,1,2,3:$(EVERY_BUILD):bf16,fp32:cpu \
    test_cuda_positions:0,1,2,3:$(EVERY_BUILD):bf16,fp32:cpu \
    test_cuda_update:0,1,2,3:$(EVERY_BUILD):bf16,fp32:cpu \
    test_emu:0,1,2,3:$(EVERY_BUILD):any: \
    test_emu_bugs:0:$(EVERY_BUILD):any:emulator \
    test_emu_cublaslt:0,1,2,3:$(EVERY_BUILD):any: \
    test_emu_nccl:0:$(EVERY_BUILD):any:nccl \
    test_emu_nccl_errors:0:$(EVERY_BUILD):any:nccl,emulator

comma := ,
row_name = $(word 1,$(subst :, ,$(1)))
row_needs = $(subst $(comma), ,$(word 5,$(subst :, ,$(1))))
CUDA_TEST_NAMES = $(foreach r,$(CUDA_TEST_ROWS),$(call row_name,$(r)))
# $(call cuda_tests_that_need,NEED)
cuda_tests_that_need = $(foreach r,$(CUDA_TEST_ROWS),$(if $(filter $(1),$(call row_needs,$(r))),$(call row_name,$(r))))

CUDA_TESTS_WITHOUT_ROW := $(filter-out $(CUDA_TEST_NAMES),$(patsubst test/%.cu,%,$(wildcard test/test_*.cu)))
ifneq ($(CUDA_TESTS_WITHOUT_ROW),)
$(error test/$(firstword $(CUDA_TESTS_WITHOUT_ROW)).cu has no row in CUDA_TEST_ROWS of test/tests.mk, so nothing would run it; add one)
endif

.PHONY: cuda-rows
cuda-rows:
	@echo $(CUDA_TEST_ROWS)
