# CUDA tests on the CPU: every test/test_*.cu in three builds, see README.md. Included by the Makefile where
# scripts/detect.sh found the CUDA headers. The program NAME is $(BUILD)/emu/BUILD/NAME with BUILD one of plain, asan,
# race; plain_fp32, asan_fp32 and race_fp32 are the same with `make PRECISION=fp32`'s type of weights.

EMU_CXX ?= g++
# without nccl.h (NCCL in config.mk) there is neither the emulated NCCL nor what includes it
EMU_TESTS = $(filter-out $(if $(NCCL),,$(call cuda_tests_that_need,nccl)),$(CUDA_TEST_NAMES))
EMU_SOURCES = $(filter-out $(if $(NCCL),,$(wildcard test/emu/nccl*.cpp)),$(wildcard test/emu/*.cpp))
EMU_FLAGS = $(CXXFLAGS) -g1 -Wno-unknown-pragmas -DCUDA_EMULATOR $(NCCL_INCLUDE:%=-isystem %) -isystem $(CUDA_INCLUDE)
EMU_SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

# of the emulator itself, of the test, of the linker
emu_flags_plain =
emu_test_flags_plain =
emu_link_plain =
emu_flags_asan = $(EMU_SANITIZE)
emu_test_flags_asan = $(EMU_SANITIZE)
emu_link_asan = $(EMU_SANITIZE)
# not linked with -fsanitize=thread: checker.cpp stands in for that runtime, and addr2line wants fixed addresses
emu_flags_race = -DEMU_RACE
emu_test_flags_race = -DEMU_RACE -fsanitize=thread --param tsan-instrument-func-entry-exit=0
emu_link_race = -no-pie

# $(call EMU_OBJECTS,build)
define EMU_OBJECTS
$(BUILD)/emu/$(1)/%.o: test/emu/%.cpp $(BUILD)/config.mk
	@mkdir -p $$(@D)
	$$(EMU_CXX) $$(EMU_FLAGS) $$(emu_flags_$(1)) -c -o $$@ $$<

.PRECIOUS: $(BUILD)/emu/$(1)/%.o
endef

# The kernels of attention, compiled once for all programs of a folder. An archive, so that a test which compiles them
# itself (with USE_CUDNN) does not get them twice.
# $(call EMU_ATTENTION,folder,build,flags)
define EMU_ATTENTION
$(BUILD)/emu/$(1)/attention.a: llmc/attention/attention.cu $(BUILD)/config.mk
	@mkdir -p $$(@D)
	$$(EMU_CXX) $$(EMU_FLAGS) $$(emu_test_flags_$(2)) $(3) -MT $$@ -x c++ -c -o $$(@:.a=.o) $$<
	@rm -f $$@
	$(AR) rcs $$@ $$(@:.a=.o)
endef

$(foreach build,plain asan race,$(eval $(call EMU_ATTENTION,$(build),$(build),)))
$(foreach build,plain asan race,$(eval $(call EMU_ATTENTION,$(build)_fp32,$(build),-DPRECISION_FP32)))

# $(call EMU_PROGRAM,folder,build,flags)
define EMU_PROGRAM
$(BUILD)/emu/$(1)/test_%: test/test_%.cu $(BUILD)/emu/$(1)/attention.a $(EMU_SOURCES:test/emu/%.cpp=$(BUILD)/emu/$(2)/%.o) \
                          $(OPS) $(TOKENIZER)
	@mkdir -p $$(@D)
	$$(EMU_CXX) $$(EMU_FLAGS) $$(emu_test_flags_$(2)) $(3) -MT $$@ -x c++ -c -o $$@.o $$<
	$$(EMU_CXX) $$(emu_link_$(2)) -o $$@ $$@.o $$(filter %.o,$$^) $$(filter %.a,$$^) $$(LDLIBS) -lcmocka
endef

$(foreach build,plain asan race,$(eval $(call EMU_OBJECTS,$(build))))
$(foreach build,plain asan race,$(eval $(call EMU_PROGRAM,$(build),$(build),)))
$(foreach build,plain asan race,$(eval $(call EMU_PROGRAM,$(build)_fp32,$(build),-DPRECISION_FP32)))

# The shipped programs on the emulated device, linked as for a GPU: without the operators of the CPU.
# $(call EMU_SHIPPED,folder,build,flags)
EMU_BUILD_INFO = $(if $(NCCL),-DHAVE_NCCL) -DBAMC_COMMIT='"$(shell cat $(BUILD)/commit.txt)"' -DBAMC_FLAGS='"$(EMU_CXX) -DCUDA_EMULATOR"'
define EMU_SHIPPED
$(BUILD)/emu/$(1)/train_gpt.o: train_gpt.cu $(BUILD)/config.mk $(BUILD)/commit.txt
$(BUILD)/emu/$(1)/evaluate.o: evaluate.c $(BUILD)/config.mk
$(BUILD)/emu/$(1)/train_gpt.o $(BUILD)/emu/$(1)/evaluate.o:
	@mkdir -p $$(@D)
	$$(EMU_CXX) $$(EMU_FLAGS) $$(EMU_BUILD_INFO) $$(emu_test_flags_$(2)) $(3) -x c++ -c -o $$@ $$<

$(BUILD)/emu/$(1)/train_gpt: $(RANKS)
$(BUILD)/emu/$(1)/train_gpt: LDLIBS += $(LIB_MPI)
$(BUILD)/emu/$(1)/train_gpt $(BUILD)/emu/$(1)/evaluate: %: %.o $(BUILD)/emu/$(1)/attention.a \
                                                        $(EMU_SOURCES:test/emu/%.cpp=$(BUILD)/emu/$(2)/%.o) $(TOKENIZER)
	$$(EMU_CXX) $$(emu_link_$(2)) -o $$@ $$(filter %.o,$$^) $$(filter %.a,$$^) $$(LDLIBS)
endef

$(foreach build,plain asan,$(eval $(call EMU_SHIPPED,$(build),$(build),)))
$(foreach build,plain asan,$(eval $(call EMU_SHIPPED,$(build)_fp32,$(build),-DPRECISION_FP32)))

EMU_SHIPPED_PROGRAMS = $(foreach build,plain plain_fp32,$(BUILD)/emu/$(build)/train_gpt $(BUILD)/emu/$(build)/evaluate)
$(EMU_PROGRAM_TESTS:%=$(BUILD)/test/%): private CFLAGS += -DEMU_FOLDER='"$(BUILD)/emu"'
$(EMU_PROGRAM_TESTS:%=$(BUILD)/test/%): | $(EMU_SHIPPED_PROGRAMS)

.PHONY: emu-tests
emu-tests:
	@echo $(EMU_TESTS)

-include $(wildcard $(BUILD)/emu/*/*.d)
