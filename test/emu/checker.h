/*
The race checker's hooks. In the checker build (EMU_RACE) kernels are compiled with -fsanitize=thread and linked
against checker.cpp in place of the ThreadSanitizer runtime, so every load and store of a kernel is seen; the
emulator tells it about barriers and memory. In other builds the hooks are empty.
*/
#ifndef CHECKER_H
#define CHECKER_H

#include <stddef.h>

namespace emu {
struct Thread;

namespace checker {
enum Access { READ, WRITE, ATOMIC };

#ifdef EMU_RACE
const bool CHECKER_ON = true;
void set_shared_memory(unsigned char* base, size_t bytes);
void set_device_memory(unsigned char* base, size_t bytes);
void device_allocated(const void* p, size_t bytes);
void device_freed(const void* p, size_t bytes);
void host_wrote(const void* p, size_t bytes);

void launch_started();
size_t errors();  // since launch_started
void block_started(size_t dynamic_bytes);
void shared_allocated(const void* p, size_t bytes);
void barrier_arrived(int id, unsigned linear, int threads, bool waits);
void barrier_released(int id, int threads, int block_threads);
void warp_synchronized(unsigned first_thread, unsigned lanes);
void note(const void* p, size_t bytes, Access access, const Thread* t, const void* instruction);
void note_in_flight(const void* p, size_t bytes, bool in_flight);
#else
const bool CHECKER_ON = false;
inline void set_shared_memory(unsigned char*, size_t) {}
inline void set_device_memory(unsigned char*, size_t) {}
inline void device_allocated(const void*, size_t) {}
inline void device_freed(const void*, size_t) {}
inline void host_wrote(const void*, size_t) {}
inline void launch_started() {}
inline size_t errors() { return 0; }
inline void block_started(size_t) {}
inline void shared_allocated(const void*, size_t) {}
inline void barrier_arrived(int, unsigned, int, bool) {}
inline void barrier_released(int, int, int) {}
inline void warp_synchronized(unsigned, unsigned) {}
inline void note(const void*, size_t, Access, const Thread*, const void*) {}
inline void note_in_flight(const void*, size_t, bool) {}
#endif

}  // namespace checker
const bool CHECKER = checker::CHECKER_ON;
}  // namespace emu

#endif
