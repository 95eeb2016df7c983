/*
cp.async. The worst that the hardware may do: the destination holds NaN from the copy's start until the thread waits
for its group, and the source is read at the start but must not change until then.
*/
#include "emulator.h"

namespace emu {

void cp_async(void* dst, const void* src, int bytes, int source_bytes) {
    Fiber* f = current_fiber();
    unsigned char* d = static_cast<unsigned char*>(dst);
    uintptr_t addresses = reinterpret_cast<uintptr_t>(dst) | (source_bytes ? reinterpret_cast<uintptr_t>(src) : 0);
    if (addresses % static_cast<uintptr_t>(bytes) != 0) { kernel_fault("cp.async: misaligned address"); }
    if (d < worker->arena || d + bytes > worker->arena + ARENA_BYTES) {
        kernel_fault("cp.async: destination is not in shared memory");
    }
    const void* instruction = __builtin_return_address(0);
    AsyncCopy copy = {dst, src, bytes, source_bytes, {0}};
    if (source_bytes) {
        checker::note(src, static_cast<size_t>(source_bytes), checker::READ, f, instruction);
        memcpy(copy.data, src, static_cast<size_t>(source_bytes));
    }
    checker::note(dst, static_cast<size_t>(bytes), checker::WRITE, f, instruction);
    checker::note_in_flight(dst, static_cast<size_t>(bytes), true);
    memset(dst, 0xff, static_cast<size_t>(bytes));
    f->copies.push_back(copy);
}

void cp_async_commit() {
    Fiber* f = current_fiber();
    f->groups.push_back(f->copies.size());
}

void cp_async_wait(int groups) {
    Fiber* f = current_fiber();
    size_t keep = static_cast<size_t>(groups);
    if (f->groups.size() <= keep) { return; }
    size_t done = f->groups.size() - keep, copies = f->groups[done - 1];
    for (size_t i = 0; i < copies; i++) {
        const AsyncCopy* c = &f->copies[i];
        size_t bytes = static_cast<size_t>(c->bytes);
        if (c->source_bytes && memcmp(c->data, c->src, static_cast<size_t>(c->source_bytes)) != 0) {
            kernel_fault("cp.async: the source changed while the copy was in flight");
        }
        memcpy(c->dst, c->data, bytes);
        checker::note_in_flight(c->dst, bytes, false);
        checker::note(c->dst, bytes, checker::WRITE, f, __builtin_return_address(0));
    }
    f->copies.erase(f->copies.begin(), f->copies.begin() + static_cast<ptrdiff_t>(copies));
    f->groups.erase(f->groups.begin(), f->groups.begin() + static_cast<ptrdiff_t>(done));
    for (size_t& end : f->groups) { end -= copies; }
}

}  // namespace emu
