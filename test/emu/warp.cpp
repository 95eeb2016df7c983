/*
Warp collectives: lanes gather by mask, and the last to arrive computes every lane's result. A mask names lanes as
CUDA does; lanes that have ended count as arrived. Lanes of one warp that meet in different collectives, or with
overlapping masks, are reported.

Layouts of mma and ldmatrix: PTX ISA 8.0, section 9.7.13.4.8 (m16n8k16) and 9.7.13.4.15 (ldmatrix).
*/
#include "emulator.h"

namespace emu {

// ----------------------------------------------------------------------------
// gathering

static void finish(Warp* warp, unsigned number, Gathering* g) {
    unsigned lanes = g->arrived;
    if (g->kind->finish) { g->kind->finish(g->arguments, lanes); }
    g->mask = g->arrived = 0;
    while (warp->gatherings > 0 && warp->gathering[warp->gatherings - 1].mask == 0) { warp->gatherings--; }
    make_ready(number, lanes);
}

static bool complete(const Warp* warp, const Gathering* g) {
    return g->arrived == (g->mask & warp->lanes & ~warp->exited);
}

// The gathering of this mask, begun if it is the first lane's.
static Gathering* find_gathering(Warp* warp, const Collective* kind, unsigned mask) {
    Gathering* unused = NULL;
    for (int i = 0; i < warp->gatherings; i++) {
        Gathering* g = &warp->gathering[i];
        if (g->mask == mask) { return g; }
        if (g->mask & mask) {
            kernel_fault("%s with mask 0x%x overlaps a waiting %s with mask 0x%x", kind->name, mask, g->kind->name,
                         g->mask);
        }
        if (g->mask == 0 && !unused) { unused = g; }
    }
    if (!unused) { unused = &warp->gathering[warp->gatherings++]; }
    unused->mask = mask;
    unused->arrived = 0;
    unused->kind = kind;
    return unused;
}

void gather(const Collective* kind, unsigned mask, void* argument) {
    Fiber* f = current_fiber();
    Warp* warp = warp_of(f);
    if (!(mask & bit(f->lane))) { kernel_fault("%s: the calling lane is not in mask 0x%x", kind->name, mask); }
    Gathering* g = find_gathering(warp, kind, mask);
    if (g->kind != kind) { kernel_fault("divergent warp: %s meets %s", kind->name, g->kind->name); }
    g->arrived |= bit(f->lane);
    g->arguments[f->lane] = argument;
    if (complete(warp, g)) {
        finish(warp, f->linear / WARP, g);
        keep_running(f);
    } else {
        wait_for_turn(f, kind->name, mask);
    }
}

void collectives_thread_exited(Fiber* f) {
    Warp* warp = warp_of(f);
    for (int i = warp->gatherings - 1; i >= 0; i--) {
        Gathering* g = &warp->gathering[i];
        if (g->mask && complete(warp, g)) { finish(warp, f->linear / WARP, g); }
    }
}

// ----------------------------------------------------------------------------
// synchronisation, shuffles, votes

void syncwarp(unsigned mask) {
    static const Collective kind = {"__syncwarp", [](void* const* arguments, unsigned lanes) {
                                        unsigned lane = lowest(lanes);
                                        checker::warp_synchronized(static_cast<Thread*>(arguments[lane])->linear - lane,
                                                                   lanes);
                                    }};
    gather(&kind, mask, current);
}

struct Shuffle {
    uint64_t in, out;
    ShuffleMode mode;
    int selector, width;
};

// The lane that `lane` reads; its own where the source is outside the segment, as the PTX ISA says.
static int shuffle_source(const Shuffle* s, int lane) {
    int segment = lane & ~(s->width - 1), source = lane;
    bool inside = true;
    switch (s->mode) {
        case SHUFFLE_INDEX: source = segment | (s->selector & (s->width - 1)); break;
        case SHUFFLE_UP:
            source = lane - s->selector;
            inside = source >= segment;
            break;
        case SHUFFLE_DOWN:
            source = lane + s->selector;
            inside = source < segment + s->width;
            break;
        case SHUFFLE_XOR:
            source = lane ^ s->selector;
            inside = source < segment + s->width;
            break;
    }
    return inside ? source : lane;
}

uint64_t shuffle(unsigned mask, ShuffleMode mode, uint64_t value, int selector, int width) {
    static const Collective kind = {
        "__shfl_sync", [](void* const* arguments, unsigned lanes) {
            for (unsigned m = lanes; m; m &= m - 1) {
                Shuffle* s = static_cast<Shuffle*>(arguments[lowest(m)]);
                int source = shuffle_source(s, static_cast<int>(lowest(m)));
                if (source < 0 || source >= WARP || !(lanes & bit(static_cast<unsigned>(source)))) {
                    kernel_fault("lane %u shuffles from lane %d, which does not take part", lowest(m), source);
                }
                s->out = static_cast<Shuffle*>(arguments[source])->in;
            }
        }};
    if (width <= 0 || width > WARP || (width & (width - 1))) { kernel_fault("__shfl_sync: width %d", width); }
    Shuffle s = {value, 0, mode, selector, width};
    gather(&kind, mask, &s);
    return s.out;
}

struct Vote {
    bool in;
    unsigned out, participants;
};

unsigned ballot(unsigned mask, bool predicate, unsigned* participants) {
    static const Collective kind = {"__ballot_sync", [](void* const* arguments, unsigned lanes) {
                                        unsigned votes = 0;
                                        for (unsigned m = lanes; m; m &= m - 1) {
                                            if (static_cast<Vote*>(arguments[lowest(m)])->in) {
                                                votes |= bit(lowest(m));
                                            }
                                        }
                                        for (unsigned m = lanes; m; m &= m - 1) {
                                            Vote* v = static_cast<Vote*>(arguments[lowest(m)]);
                                            v->out = votes;
                                            v->participants = lanes;
                                        }
                                    }};
    Vote v = {predicate, 0, 0};
    gather(&kind, mask, &v);
    *participants = v.participants;
    return v.out;
}

struct Reduced {
    unsigned value;
    Reduction reduction;
};

static unsigned reduce_two(Reduction reduction, unsigned a, unsigned b) {
    int x = static_cast<int>(a), y = static_cast<int>(b);
    switch (reduction) {
        case REDUCE_ADD: return a + b;
        case REDUCE_MIN: return min(a, b);
        case REDUCE_MAX: return max(a, b);
        case REDUCE_MIN_SIGNED: return static_cast<unsigned>(min(x, y));
        case REDUCE_MAX_SIGNED: return static_cast<unsigned>(max(x, y));
        case REDUCE_AND: return a & b;
        case REDUCE_OR: return a | b;
        default: return a ^ b;
    }
}

unsigned reduce(unsigned mask, Reduction reduction, unsigned value) {
    static const Collective kind = {"__reduce_sync", [](void* const* arguments, unsigned lanes) {
                                        Reduced* first = static_cast<Reduced*>(arguments[lowest(lanes)]);
                                        unsigned total = first->value;
                                        for (unsigned m = lanes & (lanes - 1); m; m &= m - 1) {
                                            total = reduce_two(first->reduction, total,
                                                               static_cast<Reduced*>(arguments[lowest(m)])->value);
                                        }
                                        for (unsigned m = lanes; m; m &= m - 1) {
                                            static_cast<Reduced*>(arguments[lowest(m)])->value = total;
                                        }
                                    }};
    Reduced r = {value, reduction};
    gather(&kind, mask, &r);
    return r.value;
}

struct Match {
    uint64_t in;
    unsigned out;
};

unsigned match_any(unsigned mask, uint64_t value) {
    static const Collective kind = {"__match_any_sync", [](void* const* arguments, unsigned lanes) {
                                        for (unsigned m = lanes; m; m &= m - 1) {
                                            Match* own = static_cast<Match*>(arguments[lowest(m)]);
                                            for (unsigned k = lanes; k; k &= k - 1) {
                                                if (static_cast<Match*>(arguments[lowest(k)])->in == own->in) {
                                                    own->out |= bit(lowest(k));
                                                }
                                            }
                                        }
                                    }};
    Match match = {value, 0};
    gather(&kind, mask, &match);
    return match.out;
}

// ----------------------------------------------------------------------------
// tensor cores

struct Mma {
    float* d;
    const uint32_t *a, *b;
    const float* c;
};

static float low_bf16(uint32_t pair) { return bits<float>(pair << 16); }
static float high_bf16(uint32_t pair) { return bits<float>(pair & 0xffff0000u); }

static void mma_finish(void* const* arguments, unsigned lanes) {
    if (lanes != FULL_MASK) { kernel_fault("mma by a part of a warp, lanes 0x%x", lanes); }
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const Mma* m = static_cast<const Mma*>(arguments[lane]);
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++) {
            int row = g + r % 2 * 8, column = 2 * t + r / 2 * 8;
            a[row][column] = low_bf16(m->a[r]);
            a[row][column + 1] = high_bf16(m->a[r]);
        }
        for (int r = 0; r < 2; r++) {
            int row = 2 * t + r * 8;
            b[row][g] = low_bf16(m->b[r]);
            b[row + 1][g] = high_bf16(m->b[r]);
            c[g + r * 8][2 * t] = m->c[2 * r];
            c[g + r * 8][2 * t + 1] = m->c[2 * r + 1];
        }
    }
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 16; k++) {
            for (int j = 0; j < 8; j++) { c[i][j] += a[i][k] * b[k][j]; }
        }
    }
    for (int lane = 0; lane < WARP; lane++) {
        const Mma* m = static_cast<const Mma*>(arguments[lane]);
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 2; r++) {
            m->d[2 * r] = c[g + r * 8][2 * t];
            m->d[2 * r + 1] = c[g + r * 8][2 * t + 1];
        }
    }
}

void mma_bf16_16816(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
    static const Collective kind = {"mma", mma_finish};
    Mma m = {d, a, b, c};
    gather(&kind, FULL_MASK, &m);
}

struct LoadMatrix {
    uint32_t* r;
    const void* row;
    int matrices;
    bool transposed;
    const Thread* thread;
    const void* instruction;
};

// One row of 16 bytes, from where this lane points.
static void load_row(uint16_t row[8], const LoadMatrix* lane, const LoadMatrix* first) {
    const unsigned char* p = static_cast<const unsigned char*>(lane->row);
    if (lane->matrices != first->matrices || lane->transposed != first->transposed) {
        kernel_fault("ldmatrix: lanes execute different instructions");
    }
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) {
        kernel_fault("ldmatrix: misaligned row address of lane %u", lane->thread->lane);
    }
    if (p < worker->arena || p + 16 > worker->arena + ARENA_BYTES) {
        kernel_fault("ldmatrix: row address of lane %u is not in shared memory", lane->thread->lane);
    }
    checker::note(p, 16, checker::READ, lane->thread, lane->instruction);
    memcpy(row, p, 16);
}

static void ldmatrix_finish(void* const* arguments, unsigned lanes) {
    if (lanes != FULL_MASK) { kernel_fault("ldmatrix by a part of a warp, lanes 0x%x", lanes); }
    const LoadMatrix* first = static_cast<const LoadMatrix*>(arguments[0]);
    for (int i = 0; i < first->matrices; i++) {
        uint16_t x[8][8];
        for (int r = 0; r < 8; r++) { load_row(x[r], static_cast<const LoadMatrix*>(arguments[i * 8 + r]), first); }
        for (int lane = 0; lane < WARP; lane++) {
            const LoadMatrix* l = static_cast<const LoadMatrix*>(arguments[lane]);
            int row = lane / 4, column = 2 * (lane % 4);
            uint32_t low = l->transposed ? x[column][row] : x[row][column];
            uint32_t high = l->transposed ? x[column + 1][row] : x[row][column + 1];
            l->r[i] = low | high << 16;
        }
    }
}

void ldmatrix(uint32_t* r, const void* row, int matrices, bool transposed) {
    static const Collective kind = {"ldmatrix", ldmatrix_finish};
    LoadMatrix l = {r, row, matrices, transposed, current, __builtin_return_address(0)};
    gather(&kind, FULL_MASK, &l);
}

}  // namespace emu
