/*
The whole model on the CUDA backend: the very tests of test_model.c, against the float64 oracle, for all ten encodings,
in the precision of floatX. In the emulator its operators go through the sanitized builds in their own tests.
*/
#include "test_model.c"
