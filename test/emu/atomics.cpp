/*
Atomic read-modify-write of device and shared memory; blocks on other cores may take part.
*/
#include "emulator.h"

// Both loops end when no other core has written in between.
template <class T, class Update>
static inline __attribute__((always_inline)) T read_modify_write(T* p, Update update, const void* instruction) {
    emu::checker::note(p, sizeof(T), emu::checker::ATOMIC, emu::current, instruction);
    T before, after;
    __atomic_load(p, &before, __ATOMIC_RELAXED);
    do {
        after = update(before);
    } while (!__atomic_compare_exchange(p, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

#define ATOMIC(T, name, expression)                                                \
    T name(T* p, T v) {                                                            \
        return read_modify_write(                                                  \
            p, [v](T before) { return expression; }, __builtin_return_address(0)); \
    }
ATOMIC(float, atomicAdd, before + v)
ATOMIC(double, atomicAdd, before + v)
ATOMIC(int, atomicAdd, before + v)
ATOMIC(unsigned, atomicAdd, before + v)
ATOMIC(unsigned long long, atomicAdd, before + v)
ATOMIC(int, atomicMax, max(before, v))
ATOMIC(unsigned, atomicMax, max(before, v))
ATOMIC(int, atomicMin, min(before, v))
ATOMIC(unsigned, atomicMin, min(before, v))
ATOMIC(unsigned, atomicOr, before | v)
ATOMIC(unsigned, atomicAnd, before& v)
ATOMIC(int, atomicExch, (static_cast<void>(before), v))
ATOMIC(unsigned, atomicExch, (static_cast<void>(before), v))

#define ATOMIC_CAS(T)                                                                                   \
    T atomicCAS(T* p, T expected, T v) {                                                                \
        return read_modify_write(                                                                       \
            p, [=](T before) { return before == expected ? v : before; }, __builtin_return_address(0)); \
    }
ATOMIC_CAS(int)
ATOMIC_CAS(unsigned)
ATOMIC_CAS(unsigned long long)
