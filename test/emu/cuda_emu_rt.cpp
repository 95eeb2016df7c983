// cuda_emu_rt.cpp -- emulator runtime: fibers, scheduler, barriers, warp collectives, cp.async, cuda runtime API shim.
#include "cuda_emulator.h"
#include "emu_race.h"
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>
#include <omp.h>
#include <sys/mman.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_ASAN 1
#else
#define EMU_ASAN 0
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)0)
#endif

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

namespace emu {
__thread Thread* cur = nullptr;
namespace {
constexpr int kMaxThreads = 1024, kMaxWarps = 32, kBars = 16;
constexpr size_t kArena = 256 << 10;

struct Stack { char* base; size_t size; void* top; };
struct CpOp { void* dst; const void* src; unsigned short n, sn; unsigned char snap[16]; };

struct ThreadX : Thread {            // full thread state
  void* sp = nullptr;
  Stack* stack = nullptr;
  void* fake = nullptr;              // ASan fake stack
  const char* wait = nullptr;        // what the thread is blocked in (for the deadlock report)
  unsigned wait_arg = 0;
  int bar_result = 0;
  std::vector<CpOp> cp;
  std::vector<unsigned> groups;      // end index in cp of each committed group
};
struct Kind { const char* name; void (*op)(void* const* pay, unsigned mask); };
struct Slot { unsigned mask = 0, arrived = 0; const Kind* kind = nullptr; void* pay[32]; };
struct WarpX {
  unsigned ready = 0, unstarted = 0, exited = 0, lanes = 0;
  int nslots = 0;
  Slot slot[32];
};
struct Bar { int count = 0, arrived = 0, acc = 0, op = -1; const char* who = nullptr; unsigned wait[kMaxWarps]; };

struct Worker {
  Block blk;
  ThreadX* th = nullptr;             // kMaxThreads
  WarpX* wp = nullptr;               // kMaxWarps
  Bar bar[kBars];
  unsigned runnable = 0;             // warps with ready|unstarted
  int nthreads = 0, nwarps = 0, exited = 0;
  unsigned order[kMaxWarps];
  std::vector<Stack*> free_stacks;
  std::vector<std::unique_ptr<Stack>> stacks;
  void* main_sp = nullptr; void* main_fake = nullptr; const void* main_bot = nullptr; size_t main_size = 0;
  void (*body)(void*) = nullptr; void* arg = nullptr;
  unsigned char* arena = nullptr; size_t arena_used = 0;
  uint64_t gen = 0;
  uint32_t rng = 1; unsigned mode = 0;
  bool failed = false; std::string err;
  Stats st;
  const char* kname = "";
  uint32_t rnd() { rng ^= rng << 13; rng ^= rng >> 17; rng ^= rng << 5; return rng; }
  Worker() {
    th = new ThreadX[kMaxThreads]; wp = new WarpX[kMaxWarps];
    char* m = (char*)mmap(nullptr, kArena + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    arena = (unsigned char*)m + 4096;
    mprotect(arena, kArena, PROT_READ | PROT_WRITE);
    race::set_shared_range(arena, kArena);
  }
  Stack* get_stack() {
    if (free_stacks.empty()) {
      size_t sz = config().stack;
      char* m = (char*)mmap(nullptr, sz + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (m == MAP_FAILED) { perror("emu stack"); abort(); }
      mprotect(m, 4096, PROT_NONE);
      size_t colour = (stacks.size() * 192) & 4095 & ~15;
      stacks.emplace_back(new Stack{m + 4096, sz, m + 4096 + sz - colour});
      return stacks.back().get();
    }
    Stack* s = free_stacks.back(); free_stacks.pop_back();
    ASAN_UNPOISON_MEMORY_REGION(s->base, s->size);
    return s;
  }
};
__thread Worker* tw = nullptr;                            // plain TLS: no init guard on the hot path
inline Worker& worker() { return *tw; }
Worker& make_worker() { static thread_local Worker w; tw = &w; return w; }
std::atomic<uint64_t> g_gen{1};
std::mutex g_mu; Stats g_stats;
inline ThreadX* me() { return static_cast<ThreadX*>(cur); }
inline WarpX* wx(Thread* t) { return reinterpret_cast<WarpX*>(t->warp); }

// ---- choosing the next thread --------------------------------------------------------------------------------------
inline unsigned pick_bit(Worker& w, unsigned m) {          // m != 0
  if (w.mode == 0) return __builtin_ctz(m);
  if (w.mode == 1) return 31 - __builtin_clz(m);
  unsigned r = w.rnd() & 31; unsigned x = (m >> r) | (r ? m << (32 - r) : 0);
  return (__builtin_ctz(x) + r) & 31;
}
inline ThreadX* pick(Worker& w, unsigned warp) {           // prefers `warp`; nullptr if nothing can run
  if (!w.runnable) return nullptr;
  if (!(w.runnable >> warp & 1) || (w.mode >= 2 && (w.rnd() & 7) == 0)) warp = pick_bit(w, w.runnable);
  WarpX& x = w.wp[warp];
  unsigned lane = pick_bit(w, x.ready | x.unstarted);
  return &w.th[warp * 32 + lane];
}
void fiber_main();
inline void take(Worker& w, ThreadX* t) {                  // remove from the runnable sets
  WarpX& x = w.wp[t->linear >> 5]; unsigned b = 1u << t->lane;
  x.ready &= ~b; x.unstarted &= ~b;
  if (!(x.ready | x.unstarted)) w.runnable &= ~(1u << (t->linear >> 5));
}
inline void make_ready(Worker& w, unsigned warp, unsigned lanes) { w.wp[warp].ready |= lanes; if (lanes) w.runnable |= 1u << warp; }

void raw_switch(Worker& w, void** save_sp, void** save_fake, void* sp, void* fake, const void* bot, size_t size) {
  (void)save_fake; (void)fake; (void)bot; (void)size;
  w.st.switches++;
#if EMU_ASAN
  __sanitizer_start_switch_fiber(save_fake, bot, size);
#endif
  emu_switch(save_sp, sp);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(save_fake ? *save_fake : nullptr, nullptr, nullptr);
#endif
}
void switch_to(Worker& w, void** save_sp, void** save_fake, ThreadX* t) {
  if (!t->stack) {
    t->stack = w.get_stack();
    void** p = (void**)((uintptr_t)t->stack->top & ~(uintptr_t)63);
    *--p = nullptr; *--p = (void*)fiber_main;      // rsp % 16 == 8 at entry
    for (int k = 0; k < 6; k++) *--p = nullptr;
    t->sp = p; t->fake = nullptr;
  }
  cur = t;
  raw_switch(w, save_sp, save_fake, t->sp, t->fake, t->stack->base, t->stack->size);
}
void to_main(Worker& w, ThreadX* t, bool dying) {
  cur = nullptr;
  static thread_local void* dead; 
  raw_switch(w, dying ? &dead : &t->sp, dying ? nullptr : &t->fake, w.main_sp, w.main_fake, w.main_bot, w.main_size);
}
std::string where(const ThreadX* t) {
  char b[160];
  snprintf(b, sizeof b, "%s block (%u,%u,%u) thread (%u,%u,%u)", worker().kname, t->block->bid.x, t->block->bid.y, t->block->bid.z, t->tid.x, t->tid.y, t->tid.z);
  return b;
}
[[noreturn]] void fail_str(const std::string& s) {
  Worker& w = worker();
  ThreadX* t = me();
  w.failed = true; w.err = where(t) + ": " + s;
  to_main(w, t, true);
  abort();
}
void deadlock(Worker& w) {
  std::map<std::string, int> c; std::map<std::string, unsigned> first;
  for (int i = 0; i < w.nthreads; i++) {
    ThreadX& t = w.th[i]; char b[128];
    if (w.wp[i >> 5].exited >> (i & 31) & 1) snprintf(b, sizeof b, "exited");
    else snprintf(b, sizeof b, "%s(0x%x)", t.wait ? t.wait : "?", t.wait_arg);
    if (!c[b]++) first[b] = i;
  }
  std::string s = "deadlock (divergent barrier or collective):";
  for (auto& p : c) s += " [" + std::to_string(p.second) + " threads, first " + std::to_string(first[p.first]) + ": " + p.first + "]";
  fail_str(s);
}
// current thread cannot continue: run something else until it is made ready again
void block_me(Worker& w, ThreadX* t, const char* what, unsigned arg) {
  t->wait = what; t->wait_arg = arg;
  ThreadX* n = pick(w, t->linear >> 5);
  if (!n) { deadlock(w); }
  take(w, n);
  if (n == t) return;
  switch_to(w, &t->sp, &t->fake, n);
  t->wait = nullptr;
}
void maybe_preempt(Worker& w, ThreadX* t) {       // random mode: let others go first after a release
  if (w.mode < 2 || (w.rnd() & 3)) return;
  make_ready(w, t->linear >> 5, 1u << t->lane);
  block_me(w, t, "preempted", 0);
}
// ---- block barriers --------------------------------------------------------------------------------------------------
void bar_release(Worker& w, Bar& b, int id) {
  for (int i = 0; i < w.nwarps; i++) {
    unsigned m = b.wait[i];
    if (b.op >= 0) for (unsigned x = m; x; x &= x - 1) w.th[i * 32 + __builtin_ctz(x)].bar_result = b.acc;
    make_ready(w, i, m); b.wait[i] = 0;
  }
  race::on_barrier(id, b.count, w.nthreads);
  b.arrived = 0; b.op = -1; b.count = 0; w.st.barriers++;
}
void bar_wait(int id, int count, int op, int pred, bool arrive_only) {
  Worker& w = worker(); ThreadX* t = me();
  if ((unsigned)id >= kBars) fail_str("barrier id out of range");
  if (count & 31) fail_str("named barrier thread count must be a multiple of 32");
  Bar& b = w.bar[id];
  if (b.arrived == 0) { b.count = count; b.op = op; b.acc = op == 1 ? 1 : 0; }
  else if (b.count != count || b.op != op) fail_str("barrier " + std::to_string(id) + " used with different thread counts/operations");
  if (op == 0) b.acc += pred != 0; else if (op == 1) b.acc &= pred != 0; else if (op == 2) b.acc |= pred != 0;
  b.arrived++;
  race::on_bar_arrive(id, t->linear, count, arrive_only);
  int need = count ? count : w.nthreads - w.exited;
  if (arrive_only) { if (b.arrived == need) bar_release(w, b, id); return; }
  b.wait[t->linear >> 5] |= 1u << t->lane;
  if (b.arrived == need) {
    if (!count && w.exited && config().strict_exit) fail_str("__syncthreads() after some threads have exited");
    bar_release(w, b, id);
    take(w, t);                                     // keep running
    maybe_preempt(w, t);
  } else block_me(w, t, id ? "bar.sync" : "__syncthreads", (unsigned)id);
}
// ---- warp collectives ------------------------------------------------------------------------------------------------
void coll_finish(Worker& w, WarpX& x, int si, unsigned warp) {
  Slot& s = x.slot[si];
  unsigned m = s.arrived;
  if (s.kind->op) s.kind->op(s.pay, m);
  w.st.collectives++;
  s.arrived = 0; s.mask = 0;
  while (x.nslots && !x.slot[x.nslots - 1].mask) x.nslots--;
  make_ready(w, warp, m);
}
void collective(const Kind* k, unsigned mask, void* pay) {
  Worker& w = worker(); ThreadX* t = me(); WarpX& x = *wx(t);
  if (!(mask >> t->lane & 1)) fail_str(std::string(k->name) + ": calling lane is not in the mask");
  int si = -1;
  for (int i = 0; i < x.nslots; i++) if (x.slot[i].mask == mask) { si = i; break; }
  if (si < 0) {
    for (int i = 0; i < x.nslots; i++) {
      if (!x.slot[i].mask) { if (si < 0) si = i; }
      else if (x.slot[i].mask & mask) {
        char b[160]; snprintf(b, sizeof b, "%s mask 0x%x overlaps a pending %s mask 0x%x", k->name, mask, x.slot[i].kind->name, x.slot[i].mask);
        fail_str(b);
      }
    }
    if (si < 0) si = x.nslots++;
    x.slot[si].mask = mask; x.slot[si].arrived = 0; x.slot[si].kind = k;
  }
  Slot& s = x.slot[si];
  if (s.kind != k) fail_str(std::string("divergent warp: ") + k->name + " meets " + s.kind->name);
  s.arrived |= 1u << t->lane; s.pay[t->lane] = pay;
  if (s.arrived == (mask & x.lanes & ~x.exited)) {
    coll_finish(w, x, si, t->linear >> 5);
    take(w, t);
    maybe_preempt(w, t);
  } else block_me(w, t, k->name, mask);
}
// ---- thread start/exit -------------------------------------------------------------------------------------------------
void on_exit(Worker& w, ThreadX* t) {
  WarpX& x = *wx(t);
  x.exited |= 1u << t->lane; w.exited++;
  for (int i = 0; i < x.nslots; i++) if (x.slot[i].mask && x.slot[i].arrived == (x.slot[i].mask & x.lanes & ~x.exited)) coll_finish(w, x, i, t->linear >> 5);
  Bar& b = w.bar[0];
  if (b.arrived && !b.count && b.arrived == w.nthreads - w.exited) {
    if (config().strict_exit) fail_str("__syncthreads() completed by exiting threads");
    bar_release(w, b, 0);
  }
}
void fiber_main() {
#if EMU_ASAN
  { const void* b; size_t s; __sanitizer_finish_switch_fiber(nullptr, &b, &s); if (!worker().main_bot) { worker().main_bot = b; worker().main_size = s; } }
#endif
  for (;;) {
    Worker& w = worker(); ThreadX* t = me();
    try { w.body(w.arg); }
    catch (const std::exception& e) { fail_str(std::string("exception in kernel: ") + e.what()); }
    t = me();
    on_exit(w, t);
    Stack* s = t->stack; t->stack = nullptr;
    ThreadX* n = pick(w, t->linear >> 5);
    if (n) {
      take(w, n);
      if (!n->stack) { n->stack = s; cur = n; continue; }     // a thread not yet started: reuse this fiber, no switch
      w.free_stacks.push_back(s);
      static thread_local void* dead;
      cur = n;
      raw_switch(w, &dead, nullptr, n->sp, n->fake, n->stack->base, n->stack->size);
    } else if (w.exited == w.nthreads) {
      w.free_stacks.push_back(s);
      to_main(w, t, true);
    } else { t->stack = s; deadlock(w); }
    abort();
  }
}
void run_block(Worker& w, uint3 bid, dim3 g, dim3 b, size_t smem) {
  int n = (int)(b.x * b.y * b.z);
  w.nthreads = n; w.nwarps = (n + 31) / 32; w.exited = 0; w.runnable = 0;
  w.blk.bid = bid; w.blk.bdim = b; w.blk.gdim = g;
  w.gen = w.blk.gen = g_gen.fetch_add(1, std::memory_order_relaxed);
  Config& c = config();
  w.mode = c.seed;
  uint64_t h = (c.seed * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)bid.x + ((uint64_t)bid.y << 20) + ((uint64_t)bid.z << 40)) * 0xbf58476d1ce4e5b9ull;
  w.rng = (uint32_t)(h >> 29) | 1; w.rnd(); w.rnd();
  ASAN_UNPOISON_MEMORY_REGION(w.arena, kArena);
  if (c.poison && smem) memset(w.arena, 0xff, smem);
  w.blk.dyn = w.arena; w.blk.dyn_bytes = smem;
  w.arena_used = (smem + 127) / 128 * 128 + (EMU_ASAN || race::active() ? 128 : 0);
  ASAN_POISON_MEMORY_REGION(w.arena, kArena);
  ASAN_UNPOISON_MEMORY_REGION(w.arena, smem);
  for (int i = 0; i < w.nwarps; i++) {
    WarpX& x = w.wp[i];
    int l = std::min(32, n - i * 32);
    x.lanes = l == 32 ? ~0u : (1u << l) - 1;
    x.unstarted = x.lanes; x.ready = x.exited = 0; x.nslots = 0;
    w.runnable |= 1u << i;
  }
  for (Bar& q : w.bar) { q.arrived = q.count = 0; q.op = -1; memset(q.wait, 0, sizeof q.wait); }
  uint3 t{0, 0, 0};
  for (int i = 0; i < n; i++) {
    ThreadX& x = w.th[i];
    x.tid = t; x.linear = i; x.lane = i & 31; x.warp = (Warp*)&w.wp[i >> 5]; x.block = &w.blk;
    if (x.stack) { w.free_stacks.push_back(x.stack); x.stack = nullptr; }     // left over after a failed block
    x.wait = nullptr; x.cp.clear(); x.groups.clear();
    if (++t.x == b.x) { t.x = 0; if (++t.y == b.y) { t.y = 0; t.z++; } }
  }
  race::on_block_start(smem);
  ThreadX* f = pick(w, 0); take(w, f);
#if EMU_ASAN
  w.main_bot = nullptr;
#endif
  switch_to(w, &w.main_sp, &w.main_fake, f);
  cur = nullptr;
  ASAN_UNPOISON_MEMORY_REGION(w.arena, kArena);
  w.st.blocks++;
}
std::mutex g_attr_mu; std::map<const void*, int> g_max_dyn;
}  // namespace

void fail(const char* fmt, ...) { char b[512]; va_list a; va_start(a, fmt); vsnprintf(b, sizeof b, fmt, a); va_end(a); fail_str(b); }
Config& config() {
  static Config c = [] { Config d; if (auto* s = getenv("EMU_SEED")) d.seed = atoi(s); if (auto* s = getenv("EMU_WORKERS")) d.workers = atoi(s); if (auto* s = getenv("EMU_POISON")) d.poison = atoi(s); if (EMU_ASAN) d.stack = 512 << 10; return d; }();
  return c;
}
Stats stats(bool reset) { std::lock_guard<std::mutex> l(g_mu); Stats s = g_stats; if (reset) g_stats = Stats(); return s; }

void device_access(bool on);
int find_alloc(const void* p, size_t n, bool* dev);
void launch_raw(const void* fn, const char* name, dim3 g, dim3 b, size_t smem, void (*body)(void*), void* arg) {
  auto bad = [&](const std::string& s) { throw Error(std::string("launch of ") + name + ": " + s); };
  uint64_t nt = (uint64_t)b.x * b.y * b.z, nb = (uint64_t)g.x * g.y * g.z;
  if (nt == 0 || nt > 1024 || b.z > 64) bad("invalid block size");
  if (nb == 0 || g.y > 65535 || g.z > 65535 || g.x > 0x7fffffffu) bad("invalid grid size");
  size_t lim = 48 << 10;
  { std::lock_guard<std::mutex> l(g_attr_mu); auto it = g_max_dyn.find(fn); if (it != g_max_dyn.end()) lim = std::max<size_t>(lim, it->second); }
  if (smem > lim) bad("dynamic shared memory " + std::to_string(smem) + " > " + std::to_string(lim) + " (cudaFuncSetAttribute missing?)");
  device_access(true);
  race::on_launch();
  int nw = config().workers ? config().workers : omp_get_max_threads();
  if (race::active()) nw = 1;
  if ((uint64_t)nw > nb) nw = (int)nb;
  std::atomic<uint64_t> next{0}; std::atomic<bool> stop{false}; std::string err;
  bool rev = config().seed == 1;
  auto work = [&] {
    Worker& w = make_worker(); w.body = body; w.arg = arg; w.kname = name; w.failed = false; w.st = Stats();
    for (uint64_t i; !stop && (i = next.fetch_add(1)) < nb;) {
      if (rev) i = nb - 1 - i;
      run_block(w, uint3{(unsigned)(i % g.x), (unsigned)(i / g.x % g.y), (unsigned)(i / g.x / g.y)}, g, b, smem);
      if (!w.failed && w.arena_used > (size_t)config().smem_limit + 8192) { w.failed = true; w.err = "too much shared memory"; }
      if (w.failed) { stop = true; std::lock_guard<std::mutex> l(g_mu); if (err.empty()) err = w.err; }
    }
    std::lock_guard<std::mutex> l(g_mu);
    g_stats.switches += w.st.switches; g_stats.collectives += w.st.collectives; g_stats.barriers += w.st.barriers; g_stats.blocks += w.st.blocks;
  };
  if (nw <= 1) work();
  else {
#pragma omp parallel num_threads(nw)
    work();
  }
  device_access(false);
  if (!err.empty()) throw Error(err);
  if (race::errors()) bad(std::to_string(race::errors()) + " memory errors reported by the checker");
}
void* shared_alloc(SharedSlot& s, size_t bytes, size_t align) {
  Worker& w = worker();
  size_t off = (w.arena_used + align - 1) / align * align;
  if (off + bytes > kArena) fail_str("static shared memory overflow");
  void* p = w.arena + off;
  w.arena_used = off + bytes + (EMU_ASAN || race::active() ? 64 : 0);
  w.arena_used = (w.arena_used + 15) / 16 * 16;
  ASAN_UNPOISON_MEMORY_REGION(p, bytes);
  if (config().poison) memset(p, 0xff, bytes);
  race::on_shared_alloc(p, bytes);
  s.gen = w.blk.gen; s.p = p;
  return p;
}
void bar_sync(int id, int count) { bar_wait(id, count, -1, 0, false); }
void bar_arrive(int id, int count) { bar_wait(id, count, -1, 0, true); }
int bar_red(int op, int pred) { bar_wait(0, 0, op, pred, false); return me()->bar_result; }
void yield() {
  Worker& w = worker(); ThreadX* t = me();
  // go to the back: prefer any other runnable thread
  if (!w.runnable) return;
  ThreadX* n = pick(w, t->linear >> 5); take(w, n);
  make_ready(w, t->linear >> 5, 1u << t->lane);
  switch_to(w, &t->sp, &t->fake, n);
}
void syncwarp(unsigned mask) {
  static const Kind k{"__syncwarp", [](void* const* p, unsigned m) { race::on_syncwarp((Thread*)p[__builtin_ctz(m)], m); }};
  collective(&k, mask, cur);
}
void shfl(unsigned mask, int mode, ShflArg* a) {
  static void (*const fin)(void* const*, unsigned, int) = [](void* const* p, unsigned m, int mode) {
    for (unsigned x = m; x; x &= x - 1) {
      int l = __builtin_ctz(x); ShflArg* q = (ShflArg*)p[l];
      int w = q->width, base = l & ~(w - 1), src = l;
      bool in = true;
      switch (mode) {
        case 0: src = base | (q->sel & (w - 1)); break;
        case 1: src = l - q->sel; in = src >= base; break;
        case 2: src = l + q->sel; in = src < base + w; break;
        default: src = l ^ q->sel; in = src < base + w; break;
      }
      if (!in) src = l;
      if (!(m >> src & 1)) fail_str("shuffle reads lane " + std::to_string(src) + " which does not take part");
      q->out = ((ShflArg*)p[src])->in;
    }
  };
  static const Kind k[4] = {{"__shfl_sync", [](void* const* p, unsigned m) { fin(p, m, 0); }}, {"__shfl_up_sync", [](void* const* p, unsigned m) { fin(p, m, 1); }},
                            {"__shfl_down_sync", [](void* const* p, unsigned m) { fin(p, m, 2); }}, {"__shfl_xor_sync", [](void* const* p, unsigned m) { fin(p, m, 3); }}};
  collective(&k[mode], mask, a);
}
namespace { struct V { unsigned in, out, part; }; struct M { uint64_t in; unsigned out; }; }
unsigned vote(unsigned mask, int mode, int pred) {
  static const Kind k{"vote", [](void* const* p, unsigned m) {
    unsigned r = 0; for (unsigned x = m; x; x &= x - 1) { int l = __builtin_ctz(x); if (((V*)p[l])->in) r |= 1u << l; }
    for (unsigned x = m; x; x &= x - 1) { V* v = (V*)p[__builtin_ctz(x)]; v->out = r; v->part = m; } }};
  V v{pred != 0, 0, 0}; collective(&k, mask, &v);
  if (mode == 0) return v.out; if (mode == 1) return v.out != 0; return v.out == v.part;
}
unsigned reduce(unsigned mask, int mode, unsigned val) {
  struct R { unsigned in, out; int mode; };
  static const Kind k{"__reduce_sync", [](void* const* p, unsigned m) {
    int f = __builtin_ctz(m); int mode = ((R*)p[f])->mode; unsigned a = ((R*)p[f])->in;
    for (unsigned x = m & (m - 1); x; x &= x - 1) { unsigned b = ((R*)p[__builtin_ctz(x)])->in;
      switch (mode) { case 0: a += b; break; case 1: a = std::min(a, b); break; case 2: a = std::max(a, b); break; case 3: a = (unsigned)std::min((int)a, (int)b); break;
        case 4: a = (unsigned)std::max((int)a, (int)b); break; case 5: a &= b; break; case 6: a |= b; break; default: a ^= b; } }
    for (unsigned x = m; x; x &= x - 1) ((R*)p[__builtin_ctz(x)])->out = a; }};
  R r{val, 0, mode}; collective(&k, mask, &r); return r.out;
}
unsigned match_any(unsigned mask, uint64_t v) {
  static const Kind k{"__match_any_sync", [](void* const* p, unsigned m) {
    for (unsigned x = m; x; x &= x - 1) { M* a = (M*)p[__builtin_ctz(x)]; a->out = 0; for (unsigned y = m; y; y &= y - 1) if (((M*)p[__builtin_ctz(y)])->in == a->in) a->out |= 1u << __builtin_ctz(y); } }};
  M a{v, 0}; collective(&k, mask, &a); return a.out;
}
// ---- tensor core ---------------------------------------------------------------------------------------------------------
namespace {
inline float bf_lo(uint32_t v) { return bits<float>(v << 16); }
inline float bf_hi(uint32_t v) { return bits<float>(v & 0xffff0000u); }
struct MmaArg { float* d; const uint32_t* a; const uint32_t* b; const float* c; };
void mma_op(void* const* p, unsigned m) {
  if (m != ~0u) fail_str("mma.sync by a partial warp");
  // PTX ISA m16n8k16: g=lane>>2, t=lane&3
  //  A regs: {a0,a1}=(g, 2t..) {a2,a3}=(g+8, 2t..) {a4,a5}=(g, 2t+8..) {a6,a7}=(g+8, 2t+8..)
  //  B regs: {b0,b1}=(k=2t.., n=g) {b2,b3}=(k=2t+8.., n=g);  C/D: c0,c1=(g, 2t..) c2,c3=(g+8, 2t..)
  alignas(64) float A[16][16], B[16][8], C[16][8];
  for (int l = 0; l < 32; l++) {
    const MmaArg* q = (const MmaArg*)p[l]; int g = l >> 2, t = l & 3;
    for (int r = 0; r < 4; r++) { int row = g + (r & 1) * 8, col = 2 * t + (r >> 1) * 8; A[row][col] = bf_lo(q->a[r]); A[row][col + 1] = bf_hi(q->a[r]); }
    for (int r = 0; r < 2; r++) { int row = 2 * t + r * 8; B[row][g] = bf_lo(q->b[r]); B[row + 1][g] = bf_hi(q->b[r]); }
    for (int r = 0; r < 2; r++) { C[g + r * 8][2 * t] = q->c[2 * r]; C[g + r * 8][2 * t + 1] = q->c[2 * r + 1]; }
  }
  for (int i = 0; i < 16; i++) {
    float acc[8];
    for (int n = 0; n < 8; n++) acc[n] = C[i][n];
    for (int k = 0; k < 16; k++) for (int n = 0; n < 8; n++) acc[n] += A[i][k] * B[k][n];
    for (int n = 0; n < 8; n++) C[i][n] = acc[n];
  }
  for (int l = 0; l < 32; l++) {
    const MmaArg* q = (const MmaArg*)p[l]; int g = l >> 2, t = l & 3;
    for (int r = 0; r < 2; r++) { q->d[2 * r] = C[g + r * 8][2 * t]; q->d[2 * r + 1] = C[g + r * 8][2 * t + 1]; }
  }
}
struct LdmArg { uint32_t* r; const void* row; int n; bool trans; const Thread* t; const void* pc; };
void ldm_op(void* const* p, unsigned m) {
  if (m != ~0u) fail_str("ldmatrix by a partial warp");
  const LdmArg* f = (const LdmArg*)p[0];
  Worker& w = worker();
  for (int i = 0; i < f->n; i++) {
    uint16_t T[8][8];
    for (int r = 0; r < 8; r++) {
      const LdmArg* q = (const LdmArg*)p[i * 8 + r];
      if (q->n != f->n || q->trans != f->trans) fail_str("ldmatrix: lanes disagree");
      if ((uintptr_t)q->row & 15) fail_str("ldmatrix: misaligned row address");
      if ((unsigned char*)q->row < w.arena || (unsigned char*)q->row + 16 > w.arena + kArena) fail_str("ldmatrix: address is not in shared memory");
      race::note(q->row, 16, false, q->t, q->pc);
      memcpy(T[r], q->row, 16);
    }
    for (int l = 0; l < 32; l++) {
      const LdmArg* q = (const LdmArg*)p[l]; int a = l >> 2, b = 2 * (l & 3);
      q->r[i] = f->trans ? (uint32_t)T[b][a] | (uint32_t)T[b + 1][a] << 16 : (uint32_t)T[a][b] | (uint32_t)T[a][b + 1] << 16;
    }
  }
}
}  // namespace
void mma_bf16_16816(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
  static const Kind k{"mma.sync", mma_op};
  MmaArg q{d, a, b, c}; collective(&k, ~0u, &q);
}
void ldmatrix(uint32_t* r, const void* row, int n, bool trans) {
  static const Kind k{"ldmatrix", ldm_op};
  LdmArg q{r, row, n, trans, cur, __builtin_return_address(0)}; collective(&k, ~0u, &q);
}
// ---- cp.async: destination is poisoned at issue and filled only at wait_group ----------------------------------------------
void cp_async(void* dst, const void* src, int bytes, int src_bytes) {
  ThreadX* t = me();
  if (((uintptr_t)dst | (src_bytes ? (uintptr_t)src : 0)) & (bytes - 1)) fail_str("cp.async: misaligned address");
  Worker& w = worker();
  if ((unsigned char*)dst < w.arena || (unsigned char*)dst + bytes > w.arena + kArena) fail_str("cp.async: destination is not in shared memory");
  CpOp o; o.dst = dst; o.src = src; o.n = bytes; o.sn = src_bytes;
  if (src_bytes) race::note(src, src_bytes, false, t, __builtin_return_address(0));
  race::note(dst, bytes, true, t, __builtin_return_address(0));
  race::note_async(dst, bytes, true);
  memset(o.snap, 0, sizeof o.snap); memcpy(o.snap, src_bytes ? src : o.snap, src_bytes);
  memset(dst, 0xff, bytes);
  t->cp.push_back(o);
}
void cp_async_commit() { ThreadX* t = me(); t->groups.push_back((unsigned)t->cp.size()); }
void cp_async_wait(int n) {
  ThreadX* t = me();
  if (n < 0) { cp_async_commit(); n = 0; }
  if ((int)t->groups.size() <= n) return;
  unsigned k = (unsigned)t->groups.size() - n, end = t->groups[k - 1];
  for (unsigned i = 0; i < end; i++) {
    CpOp& o = t->cp[i];
    if (o.sn && memcmp(o.snap, o.src, o.sn)) fail_str("cp.async: source changed while the copy was in flight");
    memcpy(o.dst, o.snap, o.n);
    race::note_async(o.dst, o.n, false);
    race::note(o.dst, o.n, true, t, __builtin_return_address(0));
  }
  t->cp.erase(t->cp.begin(), t->cp.begin() + end);
  t->groups.erase(t->groups.begin(), t->groups.begin() + k);
  for (unsigned& g : t->groups) g -= end;
}
}  // namespace emu

// ---- atomics ------------------------------------------------------------------------------------------------------------------
namespace { template <class T, class F> T rmw(T* p, F f) {
  T o, n; emu::race::note_atomic(p, sizeof(T), emu::cur, __builtin_return_address(0));
  __atomic_load(p, &o, __ATOMIC_RELAXED);
  do n = f(o); while (!__atomic_compare_exchange(p, &o, &n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return o; } }
float atomicAdd(float* p, float v) { return rmw(p, [v](float o) { return o + v; }); }
double atomicAdd(double* p, double v) { return rmw(p, [v](double o) { return o + v; }); }
int atomicAdd(int* p, int v) { return rmw(p, [v](int o) { return o + v; }); }
unsigned atomicAdd(unsigned* p, unsigned v) { return rmw(p, [v](unsigned o) { return o + v; }); }
unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return rmw(p, [v](unsigned long long o) { return o + v; }); }
__nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) {
  return emu::bits<__nv_bfloat162>(rmw((unsigned*)p, [v](unsigned o) { return emu::bits<unsigned>(__hadd2(emu::bits<__nv_bfloat162>(o), v)); })); }
int atomicMax(int* p, int v) { return rmw(p, [v](int o) { return std::max(o, v); }); }
unsigned atomicMax(unsigned* p, unsigned v) { return rmw(p, [v](unsigned o) { return std::max(o, v); }); }
int atomicMin(int* p, int v) { return rmw(p, [v](int o) { return std::min(o, v); }); }
unsigned atomicMin(unsigned* p, unsigned v) { return rmw(p, [v](unsigned o) { return std::min(o, v); }); }
int atomicExch(int* p, int v) { return rmw(p, [v](int) { return v; }); }
unsigned atomicExch(unsigned* p, unsigned v) { return rmw(p, [v](unsigned) { return v; }); }
float atomicExch(float* p, float v) { return rmw(p, [v](float) { return v; }); }
int atomicCAS(int* p, int c, int v) { return rmw(p, [=](int o) { return o == c ? v : o; }); }
unsigned atomicCAS(unsigned* p, unsigned c, unsigned v) { return rmw(p, [=](unsigned o) { return o == c ? v : o; }); }
unsigned long long atomicCAS(unsigned long long* p, unsigned long long c, unsigned long long v) { return rmw(p, [=](unsigned long long o) { return o == c ? v : o; }); }
unsigned atomicOr(unsigned* p, unsigned v) { return rmw(p, [v](unsigned o) { return o | v; }); }
unsigned atomicAnd(unsigned* p, unsigned v) { return rmw(p, [v](unsigned o) { return o & v; }); }

// ---- CUDA runtime API shim (prototypes come from the real cuda_runtime_api.h, so signatures are compiler-checked) ------------------
namespace {
struct Alloc { size_t n; bool device; };
std::map<uintptr_t, Alloc> g_allocs; std::mutex g_amu;
unsigned char* g_dev; size_t g_dev_used, g_dev_cap = (size_t)2 << 30; bool g_protect, g_dev_init;
std::map<size_t, std::vector<unsigned char*>> g_dev_free;
constexpr size_t kCanary = 256;
cudaError_t g_err = cudaSuccess;
cudaError_t set(cudaError_t e) { if (e != cudaSuccess) g_err = e; return e; }
void dev_init() {
  if (g_dev_init) return; g_dev_init = true;
  if (auto* s = getenv("EMU_PROTECT")) g_protect = atoi(s) && !EMU_ASAN;
  g_dev = (unsigned char*)mmap(nullptr, g_dev_cap, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  emu::race::set_device_range(g_dev, g_dev_cap);
  ASAN_POISON_MEMORY_REGION(g_dev, 0);
}
// 1: inside a live allocation, 0: outside of every allocation, -1 partly outside
int find(const void* p, size_t n, bool* dev) {
  std::lock_guard<std::mutex> l(g_amu);
  auto it = g_allocs.upper_bound((uintptr_t)p);
  if (it == g_allocs.begin()) return 0; --it;
  if ((uintptr_t)p >= it->first + it->second.n) return 0;
  *dev = it->second.device;
  return (uintptr_t)p + n <= it->first + it->second.n ? 1 : -1;
}
struct Unprotect { Unprotect() { emu::device_access(true); } ~Unprotect() { emu::device_access(false); } };
}  // namespace
void emu::device_access(bool on) { if (g_protect && g_dev_used) mprotect(g_dev, (g_dev_used + 4095) & ~4095ull, on ? PROT_READ | PROT_WRITE : PROT_NONE); }

extern "C" {
cudaError_t cudaMalloc(void** p, size_t n) {
  dev_init();
  if (!n) { *p = nullptr; return cudaSuccess; }
  unsigned char* r;
#if EMU_ASAN
  void* q = nullptr; if (posix_memalign(&q, 256, n)) return set(cudaErrorMemoryAllocation); r = (unsigned char*)q;
#else
  size_t cap = (n + 255) / 256 * 256 + kCanary;
  Unprotect u;
  auto& fl = g_dev_free[cap];
  if (!fl.empty()) { r = fl.back(); fl.pop_back(); }
  else { if (g_dev_used + cap > g_dev_cap) return set(cudaErrorMemoryAllocation); r = g_dev + g_dev_used; g_dev_used += cap; mprotect(g_dev, (g_dev_used + 4095) & ~4095ull, PROT_READ | PROT_WRITE); }
  memset(r + n, 0xA5, cap - n);
#endif
  if (emu::config().poison) memset(r, 0xff, n);
  std::lock_guard<std::mutex> l(g_amu); g_allocs[(uintptr_t)r] = Alloc{n, true};
  emu::race::on_malloc(r, n);
  *p = r; return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  size_t n; { std::lock_guard<std::mutex> l(g_amu); auto it = g_allocs.find((uintptr_t)p); if (it == g_allocs.end() || !it->second.device) return set(cudaErrorInvalidValue); n = it->second.n; g_allocs.erase(it); }
#if EMU_ASAN
  free(p); (void)n;
#else
  size_t cap = (n + 255) / 256 * 256 + kCanary; Unprotect u;
  for (size_t i = n; i < cap; i++) if (((unsigned char*)p)[i] != 0xA5) { fprintf(stderr, "emu: write past the end of a %zu byte device buffer (offset +%zu) found at cudaFree\n", n, i - n); return set(cudaErrorIllegalAddress); }
  if (emu::config().poison) memset(p, 0xff, n);
  emu::race::on_free(p, n);
  g_dev_free[cap].push_back((unsigned char*)p);
#endif
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t n) { *p = malloc(n); std::lock_guard<std::mutex> l(g_amu); g_allocs[(uintptr_t)*p] = Alloc{n, false}; return cudaSuccess; }
cudaError_t cudaFreeHost(void* p) { { std::lock_guard<std::mutex> l(g_amu); g_allocs.erase((uintptr_t)p); } free(p); return cudaSuccess; }
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, enum cudaMemcpyKind k) {
  bool dd = false, sd = false; int fd = find(d, n, &dd), fs = find(s, n, &sd);
  bool wd = k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice, ws = k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice;
  bool isdd = fd && dd, issd = fs && sd;
  if (k != cudaMemcpyDefault && (isdd != wd || issd != ws)) { fprintf(stderr, "emu: cudaMemcpy kind %d does not fit the pointers\n", (int)k); return set(cudaErrorInvalidValue); }
  if ((fd < 0) || (fs < 0)) { fprintf(stderr, "emu: cudaMemcpy runs past the end of an allocation\n"); return set(cudaErrorInvalidValue); }
  Unprotect u; memmove(d, s, n); emu::race::on_host_write(d, n); return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, enum cudaMemcpyKind k, cudaStream_t) { return cudaMemcpy(d, s, n, k); }
cudaError_t cudaMemset(void* d, int v, size_t n) { bool dd = false; if (find(d, n, &dd) != 1 || !dd) { fprintf(stderr, "emu: bad cudaMemset range\n"); return set(cudaErrorInvalidValue); } Unprotect u; memset(d, v, n); emu::race::on_host_write(d, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t) { return cudaMemset(d, v, n); }
cudaError_t cudaMemcpyToSymbol(const void* sym, const void* s, size_t n, size_t off, enum cudaMemcpyKind) { Unprotect u; memcpy((char*)sym + off, s, n); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* s) { *s = (cudaStream_t)malloc(1); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { free((void*)s); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { cudaError_t e = g_err; g_err = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError() { return g_err; }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "emulated CUDA error"; }
const char* cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "cudaError"; }
cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : set(cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* v, enum cudaDeviceAttr a, int) {
  switch (a) { case cudaDevAttrMultiProcessorCount: *v = 4; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)emu::config().smem_limit; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 8; break; case cudaDevAttrComputeCapabilityMinor: *v = 0; break; default: *v = 0; } return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int d) {
  if (d) return set(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p); snprintf(p->name, sizeof p->name, "CUDA emulator"); p->totalGlobalMem = g_dev_cap; p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = emu::config().smem_limit; p->sharedMemPerMultiprocessor = emu::config().smem_limit + 1024; p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->major = 8; p->minor = 0; p->multiProcessorCount = 4; p->l2CacheSize = 40 << 20; p->memoryBusWidth = 5120; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { std::lock_guard<std::mutex> l(g_amu); size_t u = 0; for (auto& a : g_allocs) if (a.second.device) u += a.second.n; *t = g_dev_cap; *f = g_dev_cap > u ? g_dev_cap - u : 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return cudaMallocHost(p, n); }
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t) { for (size_t i = 0; i < h; i++) { cudaError_t e = cudaMemcpy((char*)d + i * dp, (const char*)s + i * sp, w, k); if (e) return e; } return cudaSuccess; }
cudaError_t cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k) { return cudaMemcpy2DAsync(d, dp, s, sp, w, h, k, 0); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int b, size_t) { *n = b > 0 && b <= 1024 ? 2048 / ((b + 31) / 32 * 32) : 0; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int b, size_t s, unsigned) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, s); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void*) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; return cudaSuccess; }
using evt = std::chrono::steady_clock::time_point;
cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = (cudaEvent_t) new evt; return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (evt*)e; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) { *(evt*)e = std::chrono::steady_clock::now(); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = std::chrono::duration<float, std::milli>(*(evt*)b - *(evt*)a).count(); return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute a, int v) {
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) { if ((size_t)v > emu::config().smem_limit) return set(cudaErrorInvalidValue); std::lock_guard<std::mutex> l(emu::g_attr_mu); emu::g_max_dyn[f] = v; } return cudaSuccess; }
}
int emu::find_alloc(const void* p, size_t n, bool* dev) { return find(p, n, dev); }
