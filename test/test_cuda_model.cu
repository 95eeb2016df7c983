/*
The whole model on the CUDA backend, executed in the emulator: the very tests of test_model.c, against the float64
oracle, for all ten encodings, in the precision of floatX. Device memory is the host's there, so the tests read it
directly. Its operators go through the sanitized builds in their own tests.
*/
// emulated in: plain
#include "test_model.c"
