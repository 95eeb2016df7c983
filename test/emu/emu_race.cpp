#ifdef EMU_RACE
// emu_race.cpp -- happens-before race, bounds and uninitialised-read checker for emulated kernels.
// Kernel files are compiled (not linked) with -fsanitize=thread; g++ then calls __tsan_readN/__tsan_writeN, defined here.
#include "cuda_emulator.h"
#include "emu_race.h"
#include <set>
#include <vector>
#include <sys/mman.h>
#include <unistd.h>
namespace emu { namespace race {
namespace {
struct SCell { uint32_t wclk, rclk[2]; int16_t wt, rt[2]; uint8_t state, async_; };            // state: 0 invalid 1 allocated 2 initialised
struct GCell { uint32_t wgen, rgen; uint32_t wclk, rclk; int16_t wt, rt; uint8_t watomic, rmulti; };
constexpr int N = 1024;
unsigned char *sbase, *dbase; size_t ssize, dsize;
SCell* sc; GCell* gc; uint8_t* gstate;
uint32_t clk[N], base[N], wknown[N][32];
std::vector<uint32_t> full[N], acc[16]; bool has_full[N], in_bar[16][N];
uint32_t launch_gen, gen; size_t nerr; std::set<std::pair<const void*, int>> seen;

void report(int kind, const char* what, const void* addr, size_t n, bool wr, const Thread* t, const void* pc, int other) {
  nerr++;
  if (!seen.insert({pc, kind}).second || seen.size() > 12) return;
  char cmd[256], line[512] = "?"; 
  char exe[200]; ssize_t k = readlink("/proc/self/exe", exe, sizeof exe - 1); exe[k > 0 ? k : 0] = 0;
  snprintf(cmd, sizeof cmd, "addr2line -s -e %s %p", exe, (void*)((uintptr_t)pc - 1));
  if (FILE* f = popen(cmd, "r")) { if (!fgets(line, sizeof line, f)) strcpy(line, "?"); pclose(f); line[strcspn(line, "\n")] = 0; }
  const unsigned char* a = (const unsigned char*)addr; bool sh = a >= sbase && a < sbase + ssize;
  fprintf(stderr, "emu-check: %s: %zu-byte %s of %s memory +0x%zx at %s by block (%u,%u,%u) thread %u", what, n, wr ? "write" : "read", sh ? "shared" : "global", (size_t)(a - (sh ? sbase : dbase)), line,
          t ? t->block->bid.x : 0, t ? t->block->bid.y : 0, t ? t->block->bid.z : 0, t ? t->linear : 0);
  if (other >= 0) fprintf(stderr, ", conflicts with thread %d", other);
  fprintf(stderr, "\n");
}
// did (t2, c2) happen before the present point of t?
inline bool before(int t2, uint32_t c2, const Thread* t) {
  int l = t->linear;
  if (t2 == l || c2 <= base[t2]) return true;
  if ((t2 >> 5) == (l >> 5) && c2 <= wknown[l][t2 & 31]) return true;
  return has_full[l] && c2 <= full[l][t2];
}
void access(const void* p, size_t n, bool wr, const Thread* t, const void* pc, bool atomic) {
  const unsigned char* a = (const unsigned char*)p;
  if (a >= sbase && a < sbase + ssize) {
    if (!t) return;
    size_t o = a - sbase; int me = (int)t->linear; uint32_t c = clk[me];
    for (size_t i = 0; i < n; i++) {
      SCell& s = sc[o + i];
      if (!s.state) { report(1, "out of bounds", p, n, wr, t, pc, -1); return; }
      if (!wr && s.state == 1) { report(2, "uninitialised read", p, n, wr, t, pc, -1); s.state = 2; }
      if (s.async_ && !atomic) { report(3, "access to a cp.async destination in flight", p, n, wr, t, pc, s.wt); s.async_ = 0; }
      if (s.wt >= 0 && !atomic && !before(s.wt, s.wclk, t)) { report(4, wr ? "write-write race" : "read-after-write race", p, n, wr, t, pc, s.wt); s.wt = -1; }
      if (wr) {
        if (!atomic) for (int k = 0; k < 2; k++) if (s.rt[k] >= 0 && !before(s.rt[k], s.rclk[k], t)) { report(5, "write-after-read race", p, n, wr, t, pc, s.rt[k]); break; }
        s.wt = atomic ? -1 : (int16_t)me; s.wclk = c; s.rt[0] = s.rt[1] = -1; s.state = 2;
      } else {
        if (s.rt[0] < 0 || s.rt[0] == me || before(s.rt[0], s.rclk[0], t)) { s.rt[0] = (int16_t)me; s.rclk[0] = c; }
        else { s.rt[1] = (int16_t)me; s.rclk[1] = c; }
      }
    }
    return;
  }
  if (a >= dbase && a < dbase + dsize) {
    if (!t) { report(6, "HOST code dereferences a device pointer", p, n, wr, nullptr, pc, -1); return; }
    size_t o = a - dbase; int me = (int)t->linear; uint32_t c = clk[me];
    for (size_t i = 0; i < n; i++) {
      if (!gstate[o + i]) { report(1, "out of bounds", p, n, wr, t, pc, -1); return; }
      if (!wr && gstate[o + i] == 1) { report(2, "uninitialised read", p, n, wr, t, pc, -1); gstate[o + i] = 2; }
      if (wr) gstate[o + i] = 2;
      if ((o + i) & 1 && i) continue;
      GCell& g = gc[(o + i) >> 1];
      if (g.wgen >= launch_gen && !(atomic && g.watomic)) {
        if (g.wgen != gen) { report(7, "inter-block race (other block wrote)", p, n, wr, t, pc, g.wt); g.wgen = 0; }
        else if (!g.watomic && !atomic && !before(g.wt, g.wclk, t)) { report(4, "race", p, n, wr, t, pc, g.wt); g.wgen = 0; }
      }
      if (wr) {
        if (!atomic && g.rgen >= launch_gen) {
          if (g.rgen != gen || g.rmulti) { report(8, "inter-block race (other block read)", p, n, wr, t, pc, g.rt); }
          else if (!before(g.rt, g.rclk, t)) { report(5, "write-after-read race", p, n, wr, t, pc, g.rt); }
          g.rgen = 0;
        }
        g.wgen = gen; g.wt = (int16_t)me; g.wclk = c; g.watomic = atomic; 
      } else {
        g.rmulti = g.rgen >= launch_gen && (g.rmulti || g.rgen != gen);
        if (g.rgen != gen || before(g.rt, g.rclk, t)) { g.rgen = gen; g.rt = (int16_t)me; g.rclk = c; }
      }
    }
  }
}
void* big(size_t n) { void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); if (p == MAP_FAILED) { perror("shadow"); abort(); } return p; }
}  // namespace
bool active() { return true; }
size_t errors() { return nerr; }
void set_shared_range(void* p, size_t n) { sbase = (unsigned char*)p; ssize = n; sc = (SCell*)big(n * sizeof(SCell)); }
void set_device_range(void* p, size_t n) { dbase = (unsigned char*)p; dsize = n; gc = (GCell*)big(n / 2 * sizeof(GCell)); gstate = (uint8_t*)big(n); }
void on_launch() { launch_gen = gen + 1; nerr = 0; }
static void init_shared(size_t o, size_t n) { for (size_t i = 0; i < n; i++) sc[o + i] = SCell{0, {0, 0}, -1, {-1, -1}, 1, 0}; }
void on_block_start(size_t dyn) {
  gen++;
  for (size_t i = 0; i < ssize; i++) sc[i].state = 0;
  init_shared(0, dyn);
  for (int i = 0; i < N; i++) { clk[i] = 1; base[i] = 0; has_full[i] = false; }
  memset(wknown, 0, sizeof wknown);
  for (auto& a : acc) a.clear();
  memset(in_bar, 0, sizeof in_bar);
}
void on_shared_alloc(void* p, size_t n) { init_shared((unsigned char*)p - sbase, n); }
void on_malloc(void* p, size_t n) { memset(gstate + ((unsigned char*)p - dbase), 1, n); }
void on_free(void* p, size_t n) { memset(gstate + ((unsigned char*)p - dbase), 0, n); }
void on_host_write(void* p, size_t n) { unsigned char* a = (unsigned char*)p; if (a >= dbase && a < dbase + dsize) memset(gstate + (a - dbase), 2, n); }
static void join(std::vector<uint32_t>& v, const Thread* t, int l) {
  (void)t;
  if (v.empty()) v.assign(N, 0);
  for (int i = 0; i < N; i++) v[i] = std::max(v[i], base[i]);
  if (has_full[l]) for (int i = 0; i < N; i++) v[i] = std::max(v[i], full[l][i]);
  for (int i = 0; i < 32; i++) { uint32_t& x = v[(l & ~31) + i]; x = std::max(x, wknown[l][i]); }
  v[l] = std::max(v[l], clk[l]);
}
void on_bar_arrive(int id, unsigned linear, int count, bool arrive_only) {
  if (!count) return;
  join(acc[id], nullptr, (int)linear);
  clk[linear]++;
  in_bar[id][linear] = !arrive_only;
}
void on_barrier(int id, int count, int nthreads) {
  if (!count) { for (int i = 0; i < nthreads; i++) { base[i] = clk[i]; clk[i]++; has_full[i] = false; } return; }
  for (int i = 0; i < nthreads; i++) if (in_bar[id][i]) { full[i] = acc[id]; has_full[i] = true; in_bar[id][i] = false; }
  acc[id].clear();
}
void on_syncwarp(Thread* any, unsigned m) {
  int w = (int)(any->linear & ~31u);
  std::vector<uint32_t> j; bool anyfull = false;
  for (unsigned x = m; x; x &= x - 1) anyfull |= has_full[w + __builtin_ctz(x)];
  uint32_t k[32];
  for (int i = 0; i < 32; i++) { k[i] = 0; for (unsigned x = m; x; x &= x - 1) k[i] = std::max(k[i], wknown[w + __builtin_ctz(x)][i]); if (m >> i & 1) k[i] = std::max(k[i], clk[w + i]); }
  if (anyfull) for (unsigned x = m; x; x &= x - 1) join(j, nullptr, w + __builtin_ctz(x));
  for (unsigned x = m; x; x &= x - 1) { int l = w + __builtin_ctz(x); memcpy(wknown[l], k, sizeof k); if (anyfull) { full[l] = j; has_full[l] = true; } clk[l]++; }
}
void note(const void* p, size_t n, bool write, const Thread* t, const void* pc) { access(p, n, write, t, pc, false); }
void note_atomic(const void* p, size_t n, const Thread* t, const void* pc) { access(p, n, true, t, pc, true); }
void note_async(const void* p, size_t n, bool pending) { size_t o = (const unsigned char*)p - sbase; for (size_t i = 0; i < n; i++) sc[o + i].async_ = pending; }
} }
extern "C" {
#define H(n) void __tsan_read##n(void* p) { emu::race::access(p, n, false, emu::cur, __builtin_return_address(0), false); } void __tsan_write##n(void* p) { emu::race::access(p, n, true, emu::cur, __builtin_return_address(0), false); }
#define U(n) void __tsan_unaligned_read##n(void* p) { emu::race::access(p, n, false, emu::cur, __builtin_return_address(0), false); } void __tsan_unaligned_write##n(void* p) { emu::race::access(p, n, true, emu::cur, __builtin_return_address(0), false); }
H(1) H(2) H(4) H(8) H(16) U(2) U(4) U(8) U(16)
void __tsan_read_range(void* p, unsigned long n) { emu::race::access(p, n, false, emu::cur, __builtin_return_address(0), false); }
void __tsan_write_range(void* p, unsigned long n) { emu::race::access(p, n, true, emu::cur, __builtin_return_address(0), false); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
#endif
